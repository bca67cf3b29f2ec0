"""For event loops: the tokens of the synchronous calls, and slots that are free again however a call ends."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato import LLM, AsyncLLM, Completion, Sampling
from ostinato.errors import BadInput, BadOption, QueueFull
from ostinato.text.reasoning import Reasoning
from tests.cli import tiny_model

SHORT = Sampling(max_tokens=6, temperature=0.9, seed=3, ignore_eos=True)
ENDLESS = Sampling(ignore_eos=True)
SOON_S = 20.0  # on a busy machine; nothing waits for so long


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await work()

    asyncio.run(limited())


@pytest.fixture(scope="module")
def unhurried(tiny_gguf: Path) -> Iterator[LLM]:
    """Four slots and a queue of two, still at their answers when they are told to stop."""
    with LLM(tiny_gguf, device="cpu", mode="eager", slots=4, queue=2) as llm:
        yield llm


@asynccontextmanager
async def shared(llm: LLM) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(llm) as one:
        yield one
    await until_idle(llm)


async def until_idle(llm: LLM) -> None:
    async with asyncio.timeout(SOON_S):
        while (stats := llm.stats()).live or stats.prefilling or stats.waiting:
            await asyncio.sleep(0.001)


async def last(stream: AsyncIterator[Any]) -> Completion:
    pieces = [piece async for piece in stream]
    assert "".join(piece.text for piece in pieces) == pieces[-1].completion.text
    assert "".join(piece.reasoning for piece in pieces) == pieces[-1].completion.reasoning
    made: Completion = pieces[-1].completion
    return made


def test_an_answer_is_that_of_the_synchronous_call(tiny_gguf: Path, tiny_llm: LLM) -> None:
    async def work() -> None:
        async with AsyncLLM(tiny_gguf, device="cpu", context=tiny_llm.context) as llm:
            assert (await llm.generate("the sea", SHORT)).digest == tiny_llm.generate("the sea", SHORT).digest
            several = await llm.generate(["one", "two"], [SHORT, SHORT])
            assert [one.text for one in several] == [tiny_llm.generate(text, SHORT).text for text in ("one", "two")]
            assert (await llm.chat("hi", SHORT)).text == tiny_llm.chat("hi", SHORT).text
            talks = [[{"role": "user", "content": text}] for text in ("one", "two")]
            chats = await llm.chat(talks, [SHORT, SHORT])
            assert [one.text for one in chats] == [one.text for one in tiny_llm.chat(talks, SHORT)]
            assert (await last(llm.stream_chat("hi", SHORT))).text == tiny_llm.chat("hi", SHORT).text
            assert await llm.score("the sea") == tiny_llm.score("the sea")
            assert await llm.token_logprobs([5, 6, 7]) == tiny_llm.token_logprobs([5, 6, 7])
            np.testing.assert_array_equal(await llm.embed("the sea"), tiny_llm.embed("the sea"))
            assert llm.llm.tokenize("the sea") == tiny_llm.tokenize("the sea")

    run(work)


def test_a_chat_with_a_model_of_channels_separates_reasoning_and_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reasoning, "before", lambda _, sampling, prompt, calls: sampling)
    path = tiny_model.write(tmp_path / "channels.gguf", change=tiny_model.of_channels)

    async def work() -> None:
        async with AsyncLLM(path, device="cpu", context=512) as llm:
            sampling = Sampling(grammar=tiny_model.script(llm.llm.tokenizer, tiny_model.CHANNELS))
            for answer in (await llm.chat("hi", sampling), await last(llm.stream_chat("hi", sampling))):
                assert (answer.text, answer.reasoning) == ("Yes.", "hm, so")

    run(work)


def test_32_streams_on_4_slots_give_the_digests_of_the_synchronous_calls(tiny_gguf: Path) -> None:
    samplings = [Sampling(max_tokens=4 + n % 5, temperature=0.8, seed=n, ignore_eos=True) for n in range(32)]
    prompts = [[5 + n, 6, 7] for n in range(32)]

    async def work() -> None:
        async with AsyncLLM(tiny_gguf, device="cpu", slots=4, queue=32) as llm:
            streams = [llm.stream(prompt, one) for prompt, one in zip(prompts, samplings, strict=True)]
            answers = await asyncio.gather(*map(last, streams))
            found = [llm.llm.generate(prompt, one) for prompt, one in zip(prompts, samplings, strict=True)]
            assert [one.digest for one in answers] == [one.digest for one in found]

    run(work)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_cancelled_task_frees_its_slot(unhurried: LLM, call: str) -> None:
    async def work() -> None:
        async with shared(unhurried) as llm:
            asked = llm.generate("the sea", ENDLESS) if call == "generate" else last(llm.stream("the sea", ENDLESS))
            task = asyncio.ensure_future(asked)
            async with asyncio.timeout(SOON_S):
                while not unhurried.stats().live:
                    await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until_idle(unhurried)

    run(work)


def test_a_task_that_is_cancelled_at_any_moment_leaves_no_request_behind(unhurried: LLM) -> None:
    async def work() -> None:
        async with shared(unhurried) as llm:
            for n in range(12):
                task = asyncio.ensure_future(llm.generate("the sea", ENDLESS))
                for _ in range(n):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until_idle(unhurried)
        assert not llm._running

    run(work)


@pytest.mark.slow
def test_leaving_a_stream_frees_its_slot(unhurried: LLM) -> None:
    async def work() -> None:
        async with shared(unhurried) as llm:
            async for _ in llm.stream("the sea", ENDLESS):
                break
            gc.collect()
            await until_idle(unhurried)
            held = llm.stream("the sea", ENDLESS)
            await anext(held)
            assert unhurried.stats().live == 1
            await held.aclose()
            await until_idle(unhurried)

    run(work)


def test_a_full_queue_refuses_a_stream_and_lets_a_whole_answer_wait(unhurried: LLM) -> None:
    async def work() -> None:
        async with shared(unhurried) as llm:
            streams = [llm.stream([5 + n], ENDLESS) for n in range(4)]
            for stream in streams:
                await anext(stream)
            waiting = [asyncio.ensure_future(llm.generate([9, n], SHORT)) for n in range(4)]
            async with asyncio.timeout(SOON_S):
                while unhurried.stats().waiting < 2:
                    await asyncio.sleep(0.001)
            with pytest.raises(QueueFull):
                await last(llm.stream("the sea", SHORT))
            for stream in streams:
                await stream.aclose()
            texts = [one.text for one in await asyncio.gather(*waiting)]
            assert texts == [one.text for one in await llm.generate([[9, n] for n in range(4)], SHORT)]
            assert len(await llm.generate([[9, n] for n in range(20)], SHORT)) == 20

    run(work)


@pytest.mark.parametrize("own", [True, False])
def test_closing_ends_streams_that_run(tiny_gguf: Path, unhurried: LLM, own: bool) -> None:
    async def work() -> None:
        llm = AsyncLLM(tiny_gguf, device="cpu", mode="eager") if own else AsyncLLM(unhurried)
        await llm.open()
        tasks = [asyncio.ensure_future(last(llm.stream("the sea", ENDLESS))) for _ in range(3)]
        async with asyncio.timeout(SOON_S):
            while llm.llm.stats().live < 3:
                await asyncio.sleep(0.001)
        await llm.close()
        for task in tasks:
            with pytest.raises(BadInput, match="closed"):
                await task
        with pytest.raises(BadInput, match="closed"):
            await llm.generate("the sea", SHORT)
        await llm.close()  # twice is no mistake
        if not own:
            await until_idle(unhurried)
            assert unhurried.generate("the sea", SHORT).text

    run(work)


def test_another_event_loop_is_refused_with_the_way_to_share(unhurried: LLM) -> None:
    async def opened() -> AsyncLLM:
        return await AsyncLLM(unhurried).open()

    llm = asyncio.run(opened())
    with pytest.raises(BadInput, match=r"belongs to the event loop.*AsyncLLM\(LLM"):
        asyncio.run(llm.generate("the sea", SHORT))
    with pytest.raises(BadInput, match="belongs to the event loop"):
        asyncio.run(last(llm.stream("the sea", SHORT)))


def test_what_is_wrong_is_told_as_by_the_synchronous_calls(unhurried: LLM, tiny_gguf: Path) -> None:
    options: Any = {"contxt": 5}
    with pytest.raises(BadOption, match="context"):
        AsyncLLM(tiny_gguf, **options)
    with pytest.raises(BadOption, match="has its options already"):
        AsyncLLM(unhurried, context=48)

    async def work() -> None:
        with pytest.raises(BadInput, match="not open"):
            await AsyncLLM(tiny_gguf).generate("the sea")
        async with shared(unhurried) as llm:
            called: Any = llm
            for call in (called.stream, called.stream_chat):
                with pytest.raises(BadOption, match=r"Sampling\(max_tokens=5\)"):
                    call("hi", max_tokens=5)
            with pytest.raises(BadOption, match=r"chat\(messages, Sampling\(max_tokens=5\)"):
                await called.chat("hi", max_tokens=5)
            with pytest.raises(BadInput, match="index 1"):
                await llm.generate([[5, 6], [5, 3000]], SHORT)
            with pytest.raises(BadInput, match="opened before"):
                await llm.open()

    run(work)


def test_a_model_whose_opening_was_cancelled_is_closed_when_it_has_loaded(tiny_gguf: Path) -> None:
    made: list[LLM] = []

    def slowly() -> LLM:
        time.sleep(0.2)
        made.append(LLM(tiny_gguf, device="cpu"))
        return made[0]

    async def work() -> None:
        one = AsyncLLM(tiny_gguf)
        one._open_llm = slowly
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.open(), 0.05)
        async with asyncio.timeout(SOON_S):
            while not made or "closed" not in repr(made[0]):
                await asyncio.sleep(0.01)

    run(work)
