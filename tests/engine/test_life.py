"""Engines come and go: threads, memory and handles stay where they were, and an idle one does nothing at all."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ostinato import LLM
from ostinato.errors import BadInput, HardwareCannot, Unsupported
from ostinato.loop.mode import DecodeMode
from tests.cli import tiny_model
from tests.counts import soak
from tests.engine.opened import (
    DEADLINE_S,
    LONG,
    Gate,
    alone,
    bits,
    decoding,
    ids,
    open_engine,
    prompt,
    sampling,
    until,
)

SHORT = sampling(max_tokens=3)
N_CYCLES = soak(1000)


def our_threads() -> int:
    return sum(thread.name.startswith("ostinato") for thread in threading.enumerate())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def n_handles() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.soak
@pytest.mark.slow
def test_engines_opened_and_closed_leave_threads_handles_and_memory_where_they_were() -> None:
    """E-3."""

    def cycle(number: int) -> None:
        with open_engine(mode=("loop", "eager")[number % 2]) as engine:
            assert len(ids(engine.submit(prompt(number, 20), SHORT))) == 3

    for number in range(20):
        cycle(number)
    gc.collect()
    before = our_threads(), n_handles()
    memory = resident_bytes()
    for number in range(N_CYCLES):
        cycle(number)
    gc.collect()
    assert (our_threads(), n_handles()) == before
    assert resident_bytes() - memory < 16 * 2**20  # of one engine the rings alone have 12 MiB


def test_closing_ends_everybody_once_and_twice_is_no_harm() -> None:
    """E-14."""
    before = our_threads()
    engine = open_engine(n_slots=2, context=LONG)
    running = [decoding(engine, 1), decoding(engine, 2)]
    waiting = [engine.submit(prompt(i, 5), SHORT) for i in range(3)]
    engine.close()
    engine.close()
    for request in [*running, *waiting]:
        assert all(token.finish_reason is None for token in request)
        assert request.finish_reason == "cancelled"
    assert our_threads() == before
    with pytest.raises(BadInput, match="closed"):
        engine.submit(prompt(1, 5), SHORT)
    running[0].cancel()
    stats = engine.stats()
    assert stats.ended == {"cancelled": 5}
    assert (stats.live, stats.prefilling, stats.waiting, stats.pages_leased) == (0, 0, 0, 0)
    assert {slot.state for slot in engine.slots()} == {"free"}


def test_closing_waits_for_the_chunk_that_is_under_way() -> None:
    engine = open_engine()
    gate = Gate(engine)
    request = engine.submit(prompt(1, 100), SHORT)
    assert gate.reached.wait(DEADLINE_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert list(request) == []
    gate.open()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert (engine.stats().prefilling, engine.stats().pages_leased) == (0, 0)


@pytest.mark.slow
def test_a_loop_that_does_not_end_is_left_and_everything_else_is_closed(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("ostinato")]

    before, stuck = names(), threading.Event()
    monkeypatch.setattr(DecodeMode.exit, "__defaults__", (0.2,))
    monkeypatch.setattr("ostinato.loop.cpu_device.CLOSE_S", 0.2)
    llm = LLM(tiny_gguf, device="cpu", context=128)
    engine, part = llm._engine, llm._checkpoint._files[0]
    engine.runner.start._native.run_loop = lambda: stuck.wait(DEADLINE_S) and None  # type: ignore[attr-defined]
    request = engine.submit(prompt(1, 5), SHORT)
    until(lambda: engine.runner.decode_mode.running, "the loop is stuck")
    llm.close()
    assert request.finish_reason == "cancelled"
    assert "ran no step for 0 s" in (engine.fault or "")
    assert part._map is None, "the file is still mapped"
    assert sorted(names()) == sorted([*before, "ostinato-loop"])
    native = engine.runner.start._native  # type: ignore[attr-defined]
    assert native._opened, "freed, while a thread may be inside it"
    monkeypatch.setattr(engine.runner.start, "wait", lambda _: pytest.fail("closed once more, it waits once more"))
    engine.runner.close()
    stuck.set()
    until(lambda: names() == before, "the last thread has ended")
    native.close()


def test_a_caller_that_waits_for_room_when_an_engine_closes_gets_an_error() -> None:
    engine = open_engine(n_slots=1, context=LONG, queue=0)
    decoding(engine)
    told: list[BadInput] = []

    def ask() -> None:
        try:
            engine.submit(prompt(1, 5), SHORT, wait=True)
        except BadInput as error:
            told.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    engine.close()
    thread.join(DEADLINE_S)
    assert len(told) == 1


@pytest.mark.slow
def test_an_engine_that_is_dropped_ends_by_itself() -> None:
    before = our_threads()
    engine = open_engine(context=LONG)
    request = decoding(engine)
    assert our_threads() > before
    del engine
    gc.collect()
    until(lambda: our_threads() == before, "its threads have ended")
    assert request.ended


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["loop", "eager"])
def test_an_idle_engine_does_nothing_at_all(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(mode=mode) as engine:
        assert len(ids(engine.submit(prompt(1, 20), SHORT))) == 3
        until(lambda: engine.stats().pages_leased == 0 and not engine.runner.decode_mode.running, "it is idle")
        looks, steps, patience = 0, engine.stats().steps, engine._scheduler._wait_s

        def counted() -> float | None:
            nonlocal looks
            looks += 1
            return patience()

        time.sleep(0.1)  # it may still be on its way to bed
        monkeypatch.setattr(engine._scheduler, "_wait_s", counted)
        cpu = time.process_time()
        time.sleep(0.2)
        assert looks == 0
        assert time.process_time() - cpu < 0.05
        assert engine.stats().steps == steps
        assert len(ids(engine.submit(prompt(2, 20), SHORT))) == 3


def test_a_mode_that_cannot_run_is_refused_with_the_reason() -> None:
    before = our_threads()
    with pytest.raises(HardwareCannot, match=r"'graph' cannot run here: graphs are CUDA's"):
        open_engine(mode="graph")
    with pytest.raises(Unsupported, match="encoder"):
        open_engine("encoder")
    assert our_threads() == before
    with open_engine(mode="eager") as engine:
        assert engine.mode == "eager"
        assert [reason.partition(":")[0] for reason in engine.why_not] == ["loop"]


def test_a_sequence_may_end_with_its_first_token() -> None:
    """E-85."""
    wanted = sampling(max_tokens=1)
    with open_engine(n_slots=2) as engine:
        requests = [engine.submit(prompt(i, 16), wanted) for i in range(6)]
        assert [bits(request) for request in requests] == [alone(prompt(i, 16), wanted) for i in range(6)]
        assert engine.stats().steps == 0


@pytest.mark.slow
def test_a_program_that_forgets_to_close_ends_all_the_same(tmp_path: Path) -> None:
    """E-14. With the imports of a user: what is to be done at the end is done in the right order all the same."""
    code = """
import sys
from ostinato import LLM, Sampling
llm = LLM(sys.argv[1], device="cpu", context=4096)
answer = llm.stream("hello", Sampling(max_tokens=4000, ignore_eos=True))
next(answer)
print(llm.stats().live, flush=True)
"""
    model = tiny_model.write(tmp_path / "tiny.gguf", context=4096)
    ran = subprocess.run(
        [sys.executable, "-c", code, str(model)], timeout=60, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "1\n", "")
