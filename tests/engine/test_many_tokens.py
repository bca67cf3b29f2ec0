"""Many tokens and many requests: no memory, no launch and no write of the host's for each of them (E)."""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.gpu_executor import perplexity
from ostinato import LLM
from ostinato.backends.torch.model import Model
from ostinato.build import shared_object
from ostinato.cache.kv_bytes import cell_bytes
from ostinato.errors import EngineDead
from ostinato.files.checkpoint import open_checkpoint
from ostinato.loop.layout import Finish, Word
from ostinato.models.registry import read_shape
from tests.engine.opened import LONG, decoding, ids, open_engine, prompt, sampling, until
from tests.engine.rig import DEADLINE_S, GREEDY, held, open_loop
from tests.engine.test_loop import alone
from tests.random_model import random_model

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PROMPT = [5, 9, 2, 77, 31]
ROOT = Path(__file__).parents[2]


def n_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())  # asks no object anything


@pytest.mark.parametrize("mode", ["eager", "loop"])
def test_the_lowest_id_of_equals_is_chosen_in_every_mode(mode: str) -> None:
    """E-68."""
    plain = random_model("kv")
    assert plain.head is not None
    model = replace(plain, head=replace(plain.head, weight=torch.zeros(128, 64)))
    assert alone(PROMPT, model=model, mode=mode, most=3) == [0, 0, 0]
    biased = replace(GREEDY, logit_bias={90: 1.0, 40: 1.0})
    assert alone(PROMPT, model=model, mode=mode, most=3, sampling=biased) == [40, 40, 40]


PROSE = """The lighthouse stood at the end of the point, where the land gave out and the water began. For thirty years
the keeper had climbed its stairs at dusk, carrying oil, and had come down at dawn with nothing. He knew the ships by
the sound of their horns and the weather by the smell of the stones. When the harbour board wrote that a machine would
do his work from the spring on, he read the letter twice, folded it, and went up to clean the glass."""


@pytest.mark.model
@pytest.mark.parametrize("mode", ["loop", "eager"])
def test_keys_and_values_of_8_bits_predict_a_text_as_well_as_those_of_16(default_model: Path, mode: str) -> None:
    """E-47: within half a percent, in 0.53 of the bytes."""
    found = {}
    for kv_type in ("f16", "q8_0"):
        with LLM(default_model, device="cpu", mode=mode, kv_type=kv_type, context=256) as llm:
            assert (llm.mode, llm.kv_type) == (mode, kv_type)
            found[kv_type] = llm.score(PROSE).perplexity
    assert 2 < found["f16"] < 100  # it is prose, and the model has read some
    assert 0 < abs(found["q8_0"] / found["f16"] - 1) < 0.005
    shape = read_shape(open_checkpoint(default_model))
    assert 0.53 <= cell_bytes(shape.attention[0], "q8_0") / cell_bytes(shape.attention[0], "f16") <= 0.57


def test_keys_and_values_of_8_bits_predict_a_text_token_by_token_too() -> None:
    """E-47, of decode steps; random weights predict a text so badly that less of it depends on what was seen."""
    model = random_model("kv", n_vocab=64, hidden=128)
    text = random.Random(1).choices(range(64), k=60)
    wide, narrow = (perplexity(model, kv_type, text) for kv_type in ("f16", "q8_0"))
    assert 0 < abs(narrow / wide - 1) < 0.001


def test_a_device_that_broke_in_the_loop_is_found_when_decode_mode_is_left() -> None:
    """E-2."""
    driver = open_loop()
    driver.admit(0, PROMPT, most=3)
    driver.run()

    def health() -> None:
        raise EngineDead("the GPU no longer answers; the process must be restarted")

    driver.runner.start.health = health  # type: ignore[method-assign]  # a CPU has no such thing
    with pytest.raises(EngineDead, match="must be restarted"):
        driver.runner.decode_mode.exit()
    with pytest.raises(EngineDead, match="must be restarted"):
        driver.runner.decode_mode.enter()
    driver.runner.close()


def test_tokens_leave_no_memory_behind() -> None:
    """E-29, of the nodes in torch; what torch takes for a moment is its own."""
    driver = open_loop(mode="eager", context=512, n_pages=80)
    driver.admit(0, PROMPT, most=20)
    driver.run()
    before = n_tensors()
    driver.admit(0, PROMPT, most=400)
    driver.run()
    assert n_tensors() == before
    driver.runner.plan.check()
    driver.runner.close()


def test_long_and_short_prompts_in_turns_leave_no_memory_behind() -> None:
    """E-30, in torch."""
    one = sampling(max_tokens=2)
    with open_engine(mode="eager", context=256) as engine:

        def ask(number: int) -> None:
            assert len(ids(engine.submit(prompt(number, 200 if number % 2 else 4), one))) == 2
            until(lambda: engine.stats().pages_leased == 0, "it has left")

        for number in range(2):
            ask(number)
        before = n_tensors()
        for number in range(2, 22):
            ask(number)
        assert n_tensors() <= before + 2  # a thread may still hold what it had in hand
        engine.runner.plan.check()


IN_ANOTHER_PROCESS = """
import ctypes, json, sys
from ostinato.backends.native.library import cpu_library
from tests.engine.rig import open_loop

driver = open_loop(context=1024, n_pages=80)
name = cpu_library()._name
maps = [line.split()[0].split("-") for line in open("/proc/self/maps") if name in line]
watched = ctypes.CDLL(None)
ends = [int(end, 16) for pair in maps for end in pair]
watched.allocations_of(ctypes.c_void_p(min(ends)), ctypes.c_void_p(max(ends)))
counts = []
for n_prompt, most in [(3, 1000), (600, 20), (4, 20), (600, 20)]:
    driver.admit(0, [i % 128 for i in range(n_prompt)], most=most, pages=range(64))
    driver.run()
    counts.append(watched.allocations())
n_allocations = watched.allocations()
driver.runner.close()
other = open_loop()  # opening asks for memory: calls are seen
other.runner.close()
seen = watched.allocations() > n_allocations
print(json.dumps({"tokens": len(driver.entries), "plan": driver.runner.plan.text, "counts": counts, "seen": seen}))
"""


@pytest.fixture(scope="module")
def another_process() -> dict[str, Any]:
    """What a native loop in a process of its own has made, and how often it asked for memory meanwhile."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("calls of the allocator are counted on systems with glibc")
    source = Path(__file__).with_name("allocations.cpp").read_text()
    preload = shared_object(source, "allocations.cpp", flags=("-std=c++17", "-O1"))
    more = {"PYTHONHASHSEED": "77", "LD_PRELOAD": str(preload)}
    ran = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        cwd=ROOT,
        env=os.environ | more,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    return {**json.loads(lines[-1]), "said": [*lines[:-1], *ran.stderr.splitlines()]}


def test_the_native_loop_asks_for_no_memory_while_it_decodes_or_takes_in_prompts(
    another_process: dict[str, Any],
) -> None:
    """E-29, E-30: a thousand tokens, and prompts of 600 and of 4 tokens in turns."""
    assert another_process["seen"]
    assert another_process["counts"] == [0, 0, 0, 0]


def test_a_thousand_tokens_say_nothing_and_a_plan_is_the_same_in_another_process(
    another_process: dict[str, Any],
) -> None:
    """E-13, E-66."""
    driver = open_loop(context=1024, n_pages=80)
    driver.runner.close()
    assert another_process["said"] == []
    assert another_process["tokens"] == 1060
    assert another_process["plan"] == driver.runner.plan.text


def test_one_launch_of_one_executable_makes_512_tokens() -> None:
    """E-25. E-54."""
    driver = open_loop(context=1024, n_pages=80)
    driver.admit(0, PROMPT, most=512)
    driver.run()
    assert len(driver.entries) == 512
    assert (driver.runner.start.n_launches, driver.runner.start.n_instantiations) == (1, 1)
    driver.runner.close()


def test_requests_one_after_the_other_share_one_executable() -> None:
    """E-65."""
    with open_engine(n_slots=2) as engine:
        for number in range(60):
            assert len(ids(engine.submit(prompt(number, 5), sampling(max_tokens=2, temperature=0.5, seed=number)))) == 2
        assert engine.stats().instantiations == 1


@pytest.mark.parametrize("n_sequences", [1, 8])
def test_one_read_of_the_outbox_returns_the_tokens_of_all_sequences(
    n_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-69: two words and one piece of the ring, for any number of entries."""
    driver = open_loop(n_slots=8, n_pages=64)
    for slot in range(n_sequences):
        driver.admit(slot, [slot, 2, 3], most=5)
    driver.runner.decode_mode.enter()
    driver.runner.decode_mode.trigger()
    assert driver.runner.start.wait(DEADLINE_S)
    host, asked = driver.runner.host, list[Word]()
    word = host.word

    def counted(which: Word) -> int:
        asked.append(which)
        return word(which)

    monkeypatch.setattr(host, "word", counted)
    assert len(host.drain()) == 5 * n_sequences
    assert asked == [Word.OUTBOX_TAIL, Word.OUTBOX_HEAD]
    driver.runner.close()


def test_a_request_that_arrives_while_others_decode_joins_them_within_two_steps() -> None:
    """E-72."""
    driver = open_loop(n_slots=8, context=4096, n_pages=1400)
    for slot in range(7):
        driver.admit(slot, [slot, 2, 3], most=3000)
    generation = driver.admit(7, [9, 8, 7], most=3, admit=False)
    driver.runner.decode_mode.enter()
    driver.runner.decode_mode.trigger()
    asked: list[int] = []

    def ask() -> None:
        assert driver.runner.host.admit(7, generation)
        asked.append(driver.word(Word.STEPS))

    driver.runner.beside(ask).result(DEADLINE_S)
    driver.wait()
    first = next(number for number, entry in enumerate(driver.entries) if entry.generation == generation)
    steps = sum(entry.slot == 0 for entry in driver.entries[:first]) - 1  # the first token was the prompt's
    assert steps - asked[0] <= 2
    assert driver.runner.decode_mode.n_triggers == 1
    driver.runner.plan.check()
    driver.runner.close()


def test_the_host_writes_nothing_of_what_a_step_advances() -> None:
    """E-64: a loop is held at a step boundary while its engine cancels, admits and listens; the slot table
    stays."""
    with open_engine(n_slots=3, context=LONG) as engine:
        running = [decoding(engine, seed) for seed in (1, 2)]
        host, table = engine.runner.host, engine.runner.tables.table.memory
        with held(engine.runner):
            before, said = table.copy(), host.word(Word.INBOX_HEAD)
            running[0].cancel()
            waiting = engine.submit(prompt(3, 40), sampling(max_tokens=3))
            until(lambda: waiting.prefill_began is not None, "the third has a slot")
            until(lambda: host.word(Word.INBOX_HEAD) > said, "the loop was told of the cancellation")
            until(lambda: not host.waiting, "what the loop had said was heard")
            assert np.array_equal(table, before)
        assert len(ids(waiting)) == 3
        assert not np.array_equal(table, before)
        running[1].cancel()


def test_an_answer_may_fill_the_context_and_touches_nothing_beyond_it() -> None:
    """E-41."""
    model = random_model("kv")
    driver = open_loop(model=model, context=48)
    halves = [half for layer in driver.runner.memory.layers.values() for half in (layer.keys, layer.values)]
    others = [page for page in range(64) if page not in (7, 2, 11)]
    for half in halves:
        half[others] = np.nan
    generation = driver.admit(0, PROMPT, most=48 - len(PROMPT), pages=[7, 2, 11])
    driver.run()
    last = driver.entries[-1]
    assert (last.position, last.finish, len(driver.tokens(generation))) == (47, Finish.LENGTH, 43)
    assert all(np.isnan(half[others]).all() for half in halves)
    following = driver.admit(0, [4, 5, 6], most=8, pages=[7, 2])
    driver.run()
    driver.runner.close()
    assert driver.tokens(following) == alone([4, 5, 6], model=model)


def test_a_first_token_costs_its_prompt_and_one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-85."""
    rows: list[int] = []
    logits = Model.logits

    def counted(model: Model, x: Tensor) -> Tensor:
        rows.append(len(x))
        return logits(model, x)

    monkeypatch.setattr(Model, "logits", counted)
    driver = open_loop(mode="twin")
    driver.admit(0, list(range(100)), most=1)
    driver.run()
    assert (rows, len(driver.entries), driver.word(Word.STEPS)) == ([1], 1, 0)
    driver.runner.close()
