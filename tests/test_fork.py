"""A model that a process has opened, used in its forked child: refused at once, and the parent goes on."""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator

import pytest

from ostinato import LLM, Batch, Sampling
from ostinato.errors import Unsupported
from tests.cli import tiny_model

SHORT = Sampling(max_tokens=4, seed=1)
CHILD_S = 20  # after which a child that hangs is ended by its own clock


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(tiny_model.write(tmp_path_factory.mktemp("fork") / "tiny.gguf", context=256), device="cpu") as opened:
        opened.chat([{"role": "user", "content": "hello"}], SHORT)  # threads and the template's process have started
        yield opened


def in_child(work: Callable[[], object]) -> str:
    """What a forked child raised; the clock ends it if it hangs."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: this process has threads
        child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S)
        try:
            work()
            said = "it raised nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as heard:
        said = heard.read().decode()
    os.waitpid(child, 0)
    return said or "it hung"


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate("hello", SHORT),
    "stream": lambda llm: list(llm.stream("hello", SHORT)),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "hello"}], SHORT),
    "logits": lambda llm: llm.logits([1, 2]),
    "embed": lambda llm: llm.embed("hello"),
    "score": lambda llm: llm.score("hello there"),
    "stats": lambda llm: llm.stats(),
    "decoder": lambda llm: llm.decoder(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_a_forked_child_is_refused(llm: LLM, name: str) -> None:
    assert in_child(lambda: CALLS[name](llm)).startswith("Unsupported: this model was opened in process")


def test_a_stream_that_the_parent_began_is_refused_in_the_child(llm: LLM) -> None:
    stream = llm.stream("hello", Sampling(max_tokens=200, ignore_eos=True, seed=1))
    next(stream)
    assert in_child(lambda: list(stream)).startswith("Unsupported: this model was opened in process")
    assert len(list(stream)) > 1


def test_a_decoder_in_a_forked_child_is_refused(llm: LLM) -> None:
    decoder = llm.decoder()
    batch = Batch(token=[1, 2])
    decoder.decode(batch)
    assert in_child(lambda: decoder.decode(batch)).startswith("Unsupported: this model was opened in process")
    assert in_child(decoder.save_all).startswith("Unsupported: this model was opened in process")


def test_a_child_may_close_what_it_must_not_use_and_the_parent_goes_on(llm: LLM) -> None:
    before = llm.chat([{"role": "user", "content": "hello"}], SHORT)
    assert in_child(llm.close) == "it raised nothing"
    assert llm.chat([{"role": "user", "content": "hello"}], SHORT).digest == before.digest


def use(llm: LLM) -> str:
    try:
        llm.generate("hello", SHORT)
    except Unsupported as error:
        return str(error)
    return ""


def test_a_pool_that_forks_gets_the_refusal(llm: LLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        global shared
        shared = llm
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert "forked child" in pool.apply_async(use_shared).get(CHILD_S)


def use_shared() -> str:
    return use(shared)


shared: LLM
