"""Decode mode and its ten invariants: each is attacked, the attack is refused, and those who run finish as if alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from ostinato.errors import DecodeInvariantError, EngineDead, HardwareCannot, PlanStale
from ostinato.loop.host import Admission
from ostinato.loop.layout import MAX_STOP_IDS, End, Fault, Finish, Word
from tests.engine.rig import DEADLINE_S, GREEDY, Driver, held, open_loop

PROMPT = [5, 9, 2, 77, 31]


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = open_loop()
    yield made
    made.runner.guard.unlock()
    made.runner.start.wait(DEADLINE_S)
    made.runner.start.close()


def undisturbed() -> list[int]:
    alone = open_loop()
    generation = alone.admit(0, PROMPT, most=24)
    alone.run()
    alone.runner.close()
    return alone.tokens(generation)


ATTACKS: dict[str, tuple[str, Callable[[Driver], object]]] = {
    "the step is built again": ("I-1", lambda d: d.runner.start.build()),
    "a token is submitted by a second trigger": ("I-2", lambda d: d.runner.decode_mode.trigger()),
    "a step is submitted to the start": ("I-2", lambda d: d.runner.start.step()),
    "the executable is destroyed": ("I-3", lambda d: d.runner.start.close()),
    "placement is evaluated again": ("I-7", lambda d: d.runner.decode_mode.replace(d.runner.plan, d.runner.start)),
    "the host takes part in a step": ("I-8", lambda d: d.runner.decode_mode.step()),
    "decode mode is entered twice": ("I-9", lambda d: d.runner.decode_mode.enter()),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_by_name_and_the_running_request_finishes_as_if_alone(driver: Driver, attack: str) -> None:
    invariant, strike = ATTACKS[attack]
    generation = driver.admit(0, PROMPT, most=24)
    driver.runner.decode_mode.enter()
    before = driver.runner.plan.hash, driver.runner.start.executable

    # The loop waits at its first step boundary: it surely runs while the attack is made.
    with ThreadPoolExecutor(1) as other, held(driver.runner):
        driver.runner.decode_mode.trigger()
        with pytest.raises(DecodeInvariantError) as refused:
            other.submit(strike, driver).result(5)  # one that is let through may wait for the loop
        assert refused.value.invariant == invariant
    driver.wait()
    driver.runner.decode_mode.exit()
    assert (driver.runner.plan.hash, driver.runner.start.executable) == before
    assert driver.tokens(generation) == undisturbed()


HOT = replace(GREEDY, temperature=2.0, seed=7, logit_bias={3: 50.0})
STALE = 99  # a generation that never sat anywhere
ORDERS: dict[str, Callable[[Driver], object]] = {
    "another position, other pages, other parameters": lambda d: d.runner.host.stage(
        0, Admission(STALE, [1, 2], 3, [[40, 41]], 32, HOT, stop_ids=range(MAX_STOP_IDS))
    ),
    "the end of another sequence": lambda d: d.runner.host.cancel(0, STALE),
    "pages of another sequence": lambda d: d.runner.host.grant(0, STALE, 0, [50, 51]),
    "a mask of another sequence": lambda d: d.runner.host.mask(0, STALE, np.zeros(4, np.int32)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_host_can_give_a_running_slot_no_number_of_its_own(driver: Driver, order: str) -> None:
    """I-4, I-5: what it says lies in admissions and rings, and the loop takes none of it for whoever runs."""
    generation = driver.admit(0, PROMPT, most=24, granted=16)
    driver.run()  # until it waits for its second page
    with held(driver.runner):
        driver.runner.decode_mode.trigger()
        table = driver.runner.tables.table.memory
        before = table.copy()
        ORDERS[order](driver)
        assert driver.runner.host.grant(0, generation, 1, [1])
        assert np.array_equal(table, before)
    driver.wait()
    assert driver.runner.host.all_taken
    assert driver.tokens(generation) == undisturbed()


def test_a_plan_cannot_be_edited(driver: Driver) -> None:
    with pytest.raises(FrozenInstanceError):
        driver.runner.plan.nodes = ()  # type: ignore[misc]


def test_one_build_serves_every_trigger_and_entry(driver: Driver) -> None:
    for round_number in range(3):
        generation = driver.admit(0, PROMPT, most=4)
        driver.run()
        assert len(driver.tokens(generation)) == 4
        if round_number == 0:
            built = driver.runner.start.executable
        driver.runner.decode_mode.exit()
    assert driver.runner.start.executable == built


def test_a_trigger_needs_decode_mode(driver: Driver) -> None:
    with pytest.raises(DecodeInvariantError, match="enter it first"):
        driver.runner.decode_mode.trigger()


def test_outside_decode_mode_the_step_may_be_built_again_and_makes_the_same_tokens(driver: Driver) -> None:
    built = driver.runner.start.executable
    driver.runner.decode_mode.enter()
    driver.runner.decode_mode.exit()
    driver.runner.start.build()
    assert driver.runner.start.executable != built
    generation = driver.admit(0, PROMPT, most=24)
    driver.run()
    assert driver.tokens(generation) == undisturbed()


def moved(driver: Driver, name: str = "logits") -> None:
    array = driver.runner.plan.buffer(name).tensor
    array.__setstate__(np.zeros_like(array).__reduce__()[2])  # the same object over other memory


def test_a_buffer_that_was_reallocated_is_found_at_the_next_trigger_and_is_fatal(driver: Driver) -> None:
    driver.admit(0, PROMPT)
    driver.runner.decode_mode.enter()
    moved(driver)
    with pytest.raises(PlanStale, match="the buffer logits"):
        driver.runner.decode_mode.trigger()
    with pytest.raises(EngineDead, match="restarted"):
        driver.runner.decode_mode.trigger()


def test_a_buffer_that_was_reallocated_while_the_loop_ran_is_found_at_exit_and_is_fatal(driver: Driver) -> None:
    driver.admit(0, PROMPT)
    driver.runner.decode_mode.enter()
    with held(driver.runner):
        driver.runner.decode_mode.trigger()
        kept = driver.runner.plan.buffer("logits").tensor[:]  # where the loop still writes
        moved(driver)
    with pytest.raises(PlanStale, match="the buffer logits"):
        driver.runner.decode_mode.exit()
    with pytest.raises(EngineDead, match="restarted"):
        driver.runner.decode_mode.enter()
    del kept


def test_an_executable_that_was_exchanged_is_found_at_exit_and_is_fatal(driver: Driver) -> None:
    driver.runner.decode_mode.enter()
    driver.runner.start.executable += 1
    with pytest.raises(PlanStale, match="executable"):
        driver.runner.decode_mode.exit()
    with pytest.raises(EngineDead):
        driver.runner.decode_mode.enter()


@pytest.mark.parametrize(("word", "fault"), [("plan_hash", Fault.PLAN), ("epoch", Fault.EPOCH)])
def test_drift_planted_while_the_loop_runs_is_found_at_the_next_step(driver: Driver, word: str, fault: Fault) -> None:
    driver.admit(0, PROMPT, most=100, granted=128)
    driver.runner.decode_mode.enter()
    with held(driver.runner):  # as above
        driver.runner.decode_mode.trigger()
        driver.runner.tables.table[word][0] += 1
    assert driver.runner.start.wait(DEADLINE_S)
    assert driver.word(Word.FAULT) == fault
    assert driver.word(Word.WHY) == End.FAULT
    assert driver.runner.decode_mode.fault() is not None
    driver.entries += driver.runner.host.drain()
    assert all(entry.finish is Finish.NONE for entry in driver.entries), "a drifted loop finishes nobody"
    with pytest.raises(EngineDead):
        driver.runner.decode_mode.trigger()


def test_the_hash_of_a_plan_is_the_same_in_every_process_and_another_for_another_plan() -> None:
    one, same, other = open_loop(), open_loop(), open_loop(n_slots=5)
    assert one.runner.plan.hash == same.runner.plan.hash != other.runner.plan.hash
    assert replace(one.runner.plan, nodes=one.runner.plan.nodes[:-1]).hash != one.runner.plan.hash
    for driver in (one, same, other):
        driver.runner.close()


@pytest.mark.parametrize("mode", ["graph", "persistent"])
def test_a_mode_that_cannot_run_here_is_refused_with_the_reason(mode: str) -> None:
    with pytest.raises(HardwareCannot, match=mode):
        open_loop(mode=mode)


def test_auto_takes_the_highest_mode_that_can_run_and_says_why_not_a_higher_one_of_the_device() -> None:
    driver = open_loop(mode="auto")
    assert (driver.runner.settled.mode, driver.runner.why_not) == ("loop", ())
    driver.runner.close()
    driver = open_loop(mode="eager")
    assert [reason.partition(":")[0] for reason in driver.runner.why_not] == ["loop"]
    driver.runner.close()
