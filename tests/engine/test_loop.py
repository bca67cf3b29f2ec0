"""The loop through its rings: who is admitted is decoded, whatever runs beside; nothing is lost, nothing idles."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from ostinato.backends.torch.model import Model
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.decoder import Decoder
from ostinato.loop.layout import End, Finish, SlotState, Word
from ostinato.options import Sampling
from tests.engine.rig import DEADLINE_S, GREEDY, Driver, open_loop
from tests.random_model import MemoryKind, random_model

KINDS: tuple[MemoryKind, ...] = ("kv", "swa", "all swa", "recurrent", "hybrid")


def alone(
    prompt: list[int], *, model: Model, most: int = 8, sampling: Sampling = GREEDY, mode: str = "loop"
) -> list[int]:
    driver = open_loop(model=model, mode=mode)
    generation = driver.admit(0, prompt, most=most, sampling=sampling)
    driver.run()
    driver.runner.close()
    return driver.tokens(generation)


def by_full_forwards(model: Model, prompt: list[int], most: int) -> list[int]:
    """The oracle: the whole sequence again for every token, through the decoder's own flow."""
    ids = list(prompt)
    for _ in range(most):
        decoder = Decoder(model, n_ctx=256, n_batch=256, n_ubatch=256)
        decoder.decode(Batch(token=ids))
        logits = decoder.logits(-1)
        assert logits is not None
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["eager", "loop"])
def test_every_memory_decodes_what_full_forwards_give(kind: MemoryKind, mode: str) -> None:
    model = random_model(kind)
    prompt = [3, 14, 15, 92, 65]
    assert alone(prompt, model=model, mode=mode) == by_full_forwards(model, prompt, 8)


def test_a_prompt_longer_than_a_chunk_decodes_what_full_forwards_give() -> None:
    model = random_model("kv")
    prompt = [(7 * i) % 128 for i in range(100)]
    assert alone(prompt, model=model) == by_full_forwards(model, prompt, 8)


def test_eager_and_the_twin_of_the_loop_leave_the_same_bytes_everywhere() -> None:
    """E-55."""
    drivers = []
    for mode in ("eager", "twin"):
        driver = open_loop(model=random_model("kv"), mode=mode)
        for slot, prompt in enumerate(([1, 2, 3], [40, 50], [99] * 30)):
            driver.admit(slot, prompt, most=4 + slot)
        driver.run()
        drivers.append(driver)
    one, other = drivers
    for buffer in one.runner.plan.buffers:
        if buffer.name in ("table", "rings"):
            continue  # hold times and epochs; compared by meaning below
        twin = other.runner.plan.buffer(buffer.name).tensor
        assert torch.equal(buffer.tensor, twin), buffer.name
    timeless = [[e._replace(time_ns=0) for e in driver.entries] for driver in drivers]
    assert timeless[0] == timeless[1]
    for driver in drivers:
        driver.runner.close()


@pytest.mark.slow
def test_a_request_decodes_the_same_in_any_slot_and_among_any_neighbours() -> None:
    """E-45, E-70."""
    model = random_model("kv")
    chance = random.Random(7)
    prompts = {n: [chance.randrange(128) for _ in range(chance.randrange(1, 70))] for n in range(12)}
    warm = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.0, repetition_penalty=1.1, seed=11)
    expected = {n: alone(p, model=model, most=6 + n, sampling=warm) for n, p in prompts.items()}
    driver = open_loop(model=model, n_slots=12, n_pages=256)
    slots = list(range(12))
    chance.shuffle(slots)
    generations = {n: driver.admit(slot, prompts[n], most=6 + n, sampling=warm) for n, slot in enumerate(slots)}
    driver.run()
    driver.runner.close()
    assert {n: driver.tokens(generation) for n, generation in generations.items()} == expected


def test_a_request_is_admitted_at_a_step_boundary_while_the_loop_runs() -> None:
    model = random_model("kv")
    driver = open_loop(model=model, context=8192, n_pages=520)
    first = driver.admit(0, [1, 2, 3], most=4000)
    driver.runner.decode_mode.enter()
    driver.runner.decode_mode.trigger()
    second = driver.admit(1, [9, 8, 7], most=5)
    driver.wait()
    driver.runner.close()
    assert driver.runner.decode_mode.n_triggers == 1
    assert len(driver.tokens(first)) == 4000
    assert driver.tokens(second) == alone([9, 8, 7], model=model, most=5)


def test_cancel_ends_one_sequence_with_one_entry_and_leaves_the_others() -> None:
    model = random_model("kv")
    driver = open_loop(model=model, context=1024, n_pages=160)
    doomed = driver.admit(0, [1, 2, 3], most=1000)
    other = driver.admit(1, [4, 5], most=40)
    driver.runner.host.cancel(0, doomed)
    driver.run()
    driver.runner.close()
    ends = [e.finish for e in driver.entries if e.generation == doomed and e.finish is not Finish.NONE]
    assert ends == [Finish.CANCELLED]
    assert len(driver.tokens(doomed)) == 1  # the token of the prompt came before the cancellation was read
    assert driver.tokens(other) == alone([4, 5], model=model, most=40)


def test_a_slot_without_pages_pauses_and_goes_on_when_they_are_granted() -> None:
    model = random_model("kv")
    driver = open_loop(model=model)
    prompt = [1, 2, 3]
    generation = driver.admit(0, prompt, most=40, granted=16, pages=[0])
    driver.run()
    assert driver.word(Word.WHY) == End.IDLE
    assert driver.runner.tables.table["state"][0] == SlotState.PAUSED
    # The token at position 16 is made; its own keys have no place yet.
    assert len(driver.tokens(generation)) == 16 - len(prompt) + 1
    assert driver.runner.host.grant(0, generation, 1, [5, 3]) == 2
    driver.run()
    driver.runner.close()
    assert driver.tokens(generation) == alone(prompt, model=model, most=40)


def test_a_full_outbox_pauses_the_loop_and_loses_nothing() -> None:
    model = random_model("kv")
    driver = open_loop(model=model, outbox_entries=16)
    generations = [driver.admit(slot, [slot + 1, 2], most=30) for slot in range(3)]
    pauses = 0
    driver.run()
    while driver.word(Word.WHY) == End.OUTBOX_FULL:
        pauses += 1
        driver.run()
    driver.runner.close()
    assert pauses > 3
    for slot, generation in enumerate(generations):
        assert driver.tokens(generation) == alone([slot + 1, 2], model=model, most=30)


def test_a_yield_ends_the_loop_at_a_boundary_and_a_trigger_resumes_it() -> None:
    model = random_model("kv")
    driver = open_loop(model=model)
    generation = driver.admit(0, [1, 2, 3], most=60)
    driver.runner.host.set_yield(True)
    driver.run()
    assert driver.word(Word.WHY) == End.YIELD
    assert len(driver.tokens(generation)) == 1
    driver.runner.host.set_yield(False)
    driver.run()
    driver.runner.close()
    assert driver.tokens(generation) == alone([1, 2, 3], model=model, most=60)


def test_the_loop_ends_when_no_sequence_is_live_and_then_nothing_runs() -> None:
    before = threading.active_count()
    driver = open_loop()
    driver.admit(0, [1, 2], most=3)
    driver.run()
    assert not driver.runner.start.running
    assert driver.word(Word.GO) == 0
    steps = driver.word(Word.STEPS)
    assert steps == 2  # three tokens, the first of which the prompt gave
    driver.runner.close()
    assert threading.active_count() <= before


def test_a_stop_id_ends_a_sequence_and_is_its_last_token() -> None:
    model = random_model("kv")
    free = alone([1, 2, 3], model=model, most=12)
    stop = free[5]
    driver = open_loop(model=model)
    generation = driver.admit(0, [1, 2, 3], most=12, stop_ids=[stop])
    driver.run()
    driver.runner.close()
    assert driver.tokens(generation) == free[: free.index(stop) + 1]
    assert driver.entries[-1].finish is Finish.STOP


def test_a_recycled_slot_shows_nothing_of_who_sat_there_before() -> None:
    model = random_model("kv")
    driver = open_loop(model=model, n_slots=1, n_pages=256)
    for number in range(8):
        prompt = [number * 3 % 128, 17, number]
        generation = driver.admit(0, prompt, most=5)
        driver.run()
        assert driver.tokens(generation) == alone(prompt, model=model, most=5)
    driver.runner.close()


def test_the_cells_of_other_sequences_are_neither_read_nor_written() -> None:
    """E-44."""
    model = random_model("kv")
    driver = open_loop(model=model)
    generation = driver.admit(0, [1, 2, 3], most=20, pages=[7, 2])
    halves = [half for layer in driver.runner.memory.layers.values() for half in (layer.keys, layer.values)]
    others = [page for page in range(len(halves[0])) if page not in (7, 2)]
    for half in halves:
        half[others] = np.nan
    driver.run()
    assert driver.tokens(generation) == alone([1, 2, 3], model=model, most=20)
    assert all(np.isnan(half[others]).all() and not np.isnan(half[[7, 2]]).any() for half in halves)
    driver.runner.close()


@pytest.mark.parametrize("kv_type", ["bf16", "f16"])
def test_narrow_keys_and_values_decode_alike_in_both_modes(kv_type: str) -> None:
    model = random_model("kv")
    tokens = []
    for mode in ("eager", "loop"):
        driver = open_loop(model=model, mode=mode, kv_type=kv_type)  # type: ignore[arg-type]
        generation = driver.admit(0, [1, 2, 3], most=20)
        driver.run()
        tokens.append(driver.tokens(generation))
        driver.runner.close()
    assert tokens[0] == tokens[1]


def test_64_slots_decode_in_one_executable() -> None:
    """E-55."""
    model = random_model("kv")
    driver = open_loop(model=model, n_slots=64, n_pages=256)
    generations = [driver.admit(slot, [slot, slot + 1], most=4) for slot in range(64)]
    driver.run()
    for slot in (0, 31, 63):
        assert driver.tokens(generations[slot]) == alone([slot, slot + 1], model=model, most=4)
    assert driver.runner.decode_mode.n_triggers == 1
    driver.runner.close()


@pytest.mark.slow
def test_jobs_beside_a_running_loop_have_their_turn_at_its_boundaries() -> None:
    driver: Driver = open_loop(context=8192, n_pages=512)
    driver.admit(0, [1, 2, 3], most=8000)
    driver.runner.decode_mode.enter()
    driver.runner.decode_mode.trigger()
    seen = []
    for _ in range(3):
        driver.runner.beside(lambda: seen.append(driver.word(Word.STEPS))).result(DEADLINE_S)
    driver.wait()
    driver.runner.close()
    assert seen == sorted(seen)
    assert seen[-1] < 7999, "jobs waited for the end of the loop"
