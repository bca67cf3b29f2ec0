"""The Python interface for event loops: `AsyncLLM` answers like `LLM`, and its calls are awaited.

The engine's thread wakes the event loop when tokens have come. Threads of a small pool do what would block the loop
(loading, templates, tokenizing, grammars), and no request has a thread of its own. Text is made as in `llm.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Never, Self, TypeVar, Unpack, overload

from ostinato.calls import check_call, each_sampling, is_one_prompt, is_several, sampling_words
from ostinato.engine.answer import Answer, Completion, Piece, TokenLogprob
from ostinato.engine.request import CLOSED, Request, RequestSpec, Token
from ostinato.engine.token_queue import TokenDispatcher, TokenQueue
from ostinato.errors import BadInput, BadOption, QueueFull
from ostinato.files import store
from ostinato.files.unpack import Floats
from ostinato.llm import LLM, CheckedInput, Messages, Prompt, Samplings, Score
from ostinato.options import LoadOptions, LoadWords, Sampling, Talk, load_options, loads
from ostinato.text.answer import GenerationInput

ROOM_S: Final = 0.005  # between two looks at a full queue
_PROMPT_THREADS: Final = 4
_BESIDE_THREADS: Final = 2

T = TypeVar("T")


class AsyncLLM:
    """A model that answers on an event loop.

    >>> async with AsyncLLM("smollm2", context=4096) as llm:                           # doctest: +SKIP
    ...     async for piece in llm.stream_chat("Why is the sky blue?"):
    ...         print(piece.text, end="")

    `model` and options are those of `LLM`; or `model` is an open `LLM`, which is shared and not closed here. Any number
    of calls may run at once: `slots` requests are decoded together, the others wait in the queue. A call whose task is
    cancelled, and a stream that is left, free their slots. It belongs to the event loop on which it was opened.
    """

    @loads
    def __init__(
        self,
        model: str | Path | LLM = store.DEFAULT,
        *,
        load: LoadOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
        talk: Talk | None = None,
        **options: Unpack[LoadWords],
    ) -> None:
        if isinstance(model, LLM) and (load is not None or options):
            raise BadOption("an open LLM has its options already; give them where it is opened")
        wanted = load_options(load, options)
        self._open_llm = lambda: (
            model if isinstance(model, LLM) else LLM(model, load=wanted, progress=progress, talk=talk)
        )
        self._is_shared = isinstance(model, LLM)
        self._llm: LLM | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._running: set[Request] = set()
        self._line = asyncio.Lock()  # callers that wait for room in the queue, in their order

    # Life

    async def open(self) -> Self:
        """Load the model, on a thread; `async with` does it. It belongs to this event loop from now on."""
        if self._loop is not None:
            raise BadInput("this AsyncLLM was opened before; open another one")
        self._loop = asyncio.get_running_loop()
        self._prompts = ThreadPoolExecutor(_PROMPT_THREADS, "ostinato-prompt")
        self._beside = ThreadPoolExecutor(_BESIDE_THREADS, "ostinato-beside")
        self._dispatcher = TokenDispatcher(self._loop)
        opening = asyncio.ensure_future(self._in(self._prompts, self._open_llm))
        try:
            self._llm = await asyncio.shield(opening)
        except BaseException:  # a cancelled caller leaves a model that still loads, which must be closed too
            if not self._is_shared:
                opening.add_done_callback(_close_llm)
            self._end_threads()
            raise
        return self

    async def close(self) -> None:
        """Cancel running requests and release the model, unless it is shared; not usable afterwards."""
        if self._closed or self._llm is None:
            return
        self._closed = True
        for request in self._running:
            request.cancel()
        if not self._is_shared:
            await self._in(self._beside, self._llm.close)
        self._end_threads()

    def _end_threads(self) -> None:
        for threads in (self._prompts, self._beside):
            threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        if self._closed:
            return "<AsyncLLM, closed>"
        return "<AsyncLLM, not open>" if self._llm is None else f"<AsyncLLM of {self._llm!r}>"

    @property
    def llm(self) -> LLM:
        """The model itself: its properties, its tokenizer and what blocks."""
        if self._loop is None or self._llm is None:
            raise BadInput("this AsyncLLM is not open; `async with AsyncLLM(...) as llm` opens it")
        if self._closed:
            raise BadInput(CLOSED)
        return self._llm

    # Answers

    @overload
    async def generate(self, prompt: str, sampling: Sampling | None = None) -> Completion: ...
    @overload
    async def generate(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Completion: ...
    @overload
    async def generate(self, prompt: list[str] | list[list[int]], sampling: Samplings = None) -> list[Completion]: ...
    async def generate(self, prompt: Any, sampling: Samplings = None, **words: Any) -> Any:
        """The answer to a prompt; a list of prompts gives a list, in order. Waits while the queue is full."""
        one = is_one_prompt(prompt)
        prompts = [prompt] if one else prompt
        pairs = list(zip(prompts, each_sampling("generate(prompt", len(prompts), sampling, words), strict=True))
        answers = await self._complete(lambda llm: [llm._continuing(*each) for each in pairs])
        return answers[0] if one else answers

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, **words: Never) -> AsyncGenerator[Piece, None]:
        """The answer piece by piece; the last piece holds the `Completion`. QueueFull if too many requests wait."""
        check_call("stream(prompt", sampling, words)
        return self._stream(lambda llm: llm._continuing(prompt, sampling))

    @overload
    async def chat(self, messages: Messages, sampling: Sampling | None = None, **words: Any) -> Completion: ...
    @overload
    async def chat(
        self,
        messages: list[str] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: Samplings = None,
        **words: Any,
    ) -> list[Completion]: ...
    async def chat(self, messages: Any, sampling: Samplings = None, **words: Any) -> Any:
        """The answer to a conversation; a list of conversations gives a list. Waits while the queue is full."""
        several = is_several(messages)
        talks = messages if several else [messages]
        samplings = each_sampling("chat(messages", len(talks), sampling, sampling_words(words))
        pairs = list(zip(talks, samplings, strict=True))
        answers = await self._complete(lambda llm: [llm._answering(*each, words) for each in pairs])
        return answers if several else answers[0]

    def stream_chat(
        self, messages: Messages, sampling: Sampling | None = None, **words: Any
    ) -> AsyncGenerator[Piece, None]:
        """Like `stream`, for a conversation; `tools`, `tool_choice` and other words as for `LLM.chat`."""
        check_call("stream_chat(messages", sampling, sampling_words(words))
        return self._stream(lambda llm: llm._answering(messages, sampling, words))

    # What the model computes: a cancelled caller does not wait for it, and what has begun runs to its end

    @overload
    async def score(self, text: str) -> Score: ...
    @overload
    async def score(self, text: list[str]) -> list[Score]: ...
    async def score(self, text: Any) -> Any:
        """How well the model predicts a text; a list gives a list (`LLM.score`)."""
        return await self._in(self._beside, self._here().score, text)

    @overload
    async def token_logprobs(self, ids: Sequence[int], top: int = 0) -> tuple[TokenLogprob, ...]: ...
    @overload
    async def token_logprobs(self, ids: list[list[int]], top: int = 0) -> list[tuple[TokenLogprob, ...]]: ...
    async def token_logprobs(self, ids: Any, top: int = 0) -> Any:
        """The log-probability of each token but the first (`LLM.token_logprobs`)."""
        return await self._in(self._beside, self._here().token_logprobs, ids, top)

    async def embed(
        self,
        texts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        pooling: str | None = None,
        *,
        normalize: bool | None = None,
        prompt: str | None = None,
    ) -> Floats:
        """One vector per text (`LLM.embed`)."""
        llm = self._here()
        return await self._in(self._beside, lambda: llm.embed(texts, pooling, normalize=normalize, prompt=prompt))

    async def rank(self, query: str, texts: Sequence[str], *, prompt: str | None = None) -> Floats:
        """How well each text answers the query, by a ranking model (`LLM.rank`)."""
        llm = self._here()
        return await self._in(self._beside, lambda: llm.rank(query, texts, prompt=prompt))

    # Inside

    def _here(self) -> LLM:
        """The model, on its own event loop."""
        llm = self.llm
        if asyncio.get_running_loop() is not self._loop:
            raise BadInput(
                "this AsyncLLM belongs to the event loop on which it was opened, and is used on another one; open one "
                "on each loop: they can share a model, AsyncLLM(LLM(...))"
            )
        return llm

    async def _in(self, threads: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    async def _complete(self, asked: Callable[[LLM], list[GenerationInput]]) -> list[Completion]:
        """Answers that are generated together, in order; all prompts are checked first."""
        llm = self._here()
        checked = await self._in(self._prompts, lambda: llm._checked(asked(llm)))
        done: dict[int, Completion] = {}
        async with aclosing(self._pieces(checked, wait=True)) as pieces:
            async for number, piece in pieces:
                if piece.completion is not None:
                    done[number] = piece.completion
        return [done[number] for number in range(len(checked))]

    async def _stream(self, asked: Callable[[LLM], GenerationInput]) -> AsyncGenerator[Piece, None]:
        llm = self._here()
        checked = await self._in(self._prompts, lambda: llm._checked([asked(llm)]))
        async with aclosing(self._pieces(checked, wait=False)) as pieces:
            async for _, piece in pieces:
                yield piece

    async def _pieces(self, checked: list[CheckedInput], *, wait: bool) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of answers that run together, each with the number of its request; as in `LLM`, requests are
        submitted as the queue allows, and if it is full while none of these runs: `wait` for room, or QueueFull."""
        llm, box = self._here(), TokenQueue(sum(spec.most + 1 for spec, _ in checked), lambda: None)
        running: dict[int, Answer] = {}
        n_put, is_full = 0, False
        try:
            while running or n_put < len(checked):
                while n_put < len(checked) and not is_full:
                    try:
                        request = await self._put(checked[n_put][0], box, n_put, wait=wait and not running)
                    except QueueFull:
                        if not running:
                            raise
                        is_full = True  # until one of these ends
                        break
                    running[n_put] = llm._answer(checked[n_put][1], request)
                    n_put += 1
                while (heard := box.take()) is None:
                    await box.look()
                number, message = heard
                if number not in running:
                    continue  # it has met its stop string
                if isinstance(message, Exception):
                    raise message
                if not isinstance(message, Token):
                    raise BadInput(CLOSED)
                piece = running[number].push(message)
                if piece.completion is not None:
                    self._end(running.pop(number).source)  # a stop string ends it before the engine would
                    is_full = False
                yield number, piece
        finally:
            for answer in running.values():
                self._end(answer.source)

    async def _put(self, spec: RequestSpec, box: TokenQueue, number: int, *, wait: bool) -> Request:
        """Submit a request. Its caller may be cancelled meanwhile: then the request is cancelled too."""
        engine, sink = self._here()._engine, self._dispatcher.sink(box, number)
        if not wait:
            return await self._kept(self._in(self._prompts, lambda: engine.put(spec, sink=sink)))
        async with self._line:
            while True:
                try:
                    return await self._put(spec, box, number, wait=False)
                except QueueFull:
                    await asyncio.sleep(ROOM_S)

    async def _kept(self, putting: Any) -> Request:
        task: asyncio.Task[Request] = asyncio.ensure_future(putting)
        try:
            request = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_cancel_request)
            raise
        self._running.add(request)
        if self._closed:
            request.cancel()
        return request

    def _end(self, request: Request) -> None:
        request.cancel()
        self._running.discard(request)


def _close_llm(opening: asyncio.Future[LLM]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _cancel_request(task: asyncio.Task[Request]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().cancel()
