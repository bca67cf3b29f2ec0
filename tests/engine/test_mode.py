"""Decode mode and its ten invariants: each is attacked, the attack is refused, and those who run finish as if alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.backends.cuda.chunks import FusedChunks
from ostinato.backends.cuda.kernels import triton_kernels
from ostinato.backends.machine import TUNED
from ostinato.backends.native.start import NativeLoop
from ostinato.backends.torch.kernels import twin_kernels
from ostinato.errors import DecodeInvariantError, EngineDead, HardwareCannot, InternalError, PlanStale
from ostinato.loop.guard import Guard, chain_of
from ostinato.loop.host import Admission
from ostinato.loop.layout import MAX_STOP_IDS, End, Fault, Finish, Word
from ostinato.loop.memory import address_of, memory_in
from ostinato.loop.mode import DecodeMode
from tests.backends.cuda.test_plan import fused_driver
from tests.backends.tape.loop import tape_driver
from tests.backends.tape.models import shape_of, small
from tests.engine.rig import DEADLINE_S, GREEDY, Driver, held, open_loop, stray
from tests.random_model import random_model

PROMPT = [5, 9, 2, 77, 31]


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = open_loop()
    yield made
    made.runner.guard.unlock()
    made.runner.start.wait(DEADLINE_S)
    made.runner.start.close()


def undisturbed(opened: Callable[[], Driver] = open_loop) -> list[int]:
    alone = opened()
    generation = alone.admit(0, PROMPT, most=24)
    alone.run()
    alone.runner.close()
    return alone.tokens(generation)


def second_mode(driver: Driver) -> DecodeMode:
    runner = driver.runner
    return DecodeMode(runner.plan, runner.start, runner.tables, runner.guard)


def second_start(driver: Driver) -> NativeLoop:
    """A second executable over the same plan and memory."""
    start = driver.runner.start
    assert isinstance(start, NativeLoop)
    return NativeLoop(driver.runner.plan, start._native, driver.runner.guard)


ATTACKS: dict[str, tuple[str, Callable[[Driver], object]]] = {
    "the step is built again": ("I-1", lambda d: d.runner.start.build()),
    "a token is submitted by a second trigger": ("I-2", lambda d: d.runner.decode_mode.trigger()),
    "a step is submitted to the start": ("I-2", lambda d: d.runner.start.step()),
    "the executable is launched without a trigger": ("I-2", lambda d: d.runner.start.launch()),
    "a second executable is built": ("I-1", lambda d: second_start(d).build()),
    "a second executable is launched": ("I-2", lambda d: second_start(d).launch()),
    "the executable is destroyed": ("I-3", lambda d: d.runner.start.close()),
    "the memory of keys and values is taken": ("I-5", lambda d: d.runner.memory),
    "placement is evaluated again": ("I-7", lambda d: d.runner.decode_mode.replace(d.runner.plan, d.runner.start)),
    "another plan is put in place": ("I-7", lambda d: setattr(d.runner, "plan", replace(d.runner.plan, constants="o"))),
    "the weights are exchanged": ("I-7", lambda d: setattr(d.runner, "model", replace(d.runner.model))),
    "the host takes part in a step": ("I-8", lambda d: d.runner.decode_mode.step()),
    "the host runs a node": ("I-8", lambda d: d.runner.plan.nodes[0].run()),
    "a buffer is zeroed": ("I-5", lambda d: d.runner.plan.buffer("logits").zero(d.runner.guard)),
    "decode mode is entered twice": ("I-9", lambda d: d.runner.decode_mode.enter()),
    "decode mode is entered by another lock": ("I-9", lambda d: second_mode(d).enter()),
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_by_name_and_the_running_request_finishes_as_if_alone(driver: Driver, attack: str) -> None:
    """E-42, E-67."""
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


def write(memory: Any) -> None:
    """As the host would: in the type that it was given."""
    memory.reshape(-1)[:1] = 1


def written_parts(driver: Driver) -> list[tuple[str, Any]]:
    """Everything that the host can see of what a step uses: tables, buffers of the plan, and the weights themselves."""
    runner = driver.runner
    arenas = [("table", runner.tables.table), ("admissions", runner.tables.admissions), ("rings", runner.tables.rings)]
    parts = [(f"{arena}.{name}", fields[name]) for arena, fields in arenas for name in fields.names]
    parts += [(arena, fields.memory) for arena, fields in arenas]
    parts += [] if runner.grammars is None else [("grammars", runner.grammars.words)]
    parts += [(f"plan.{buffer.name}", buffer.tensor) for buffer in runner.plan.buffers]
    return parts


def fused() -> Driver:
    """The plan of CUDA, over torch's references of its kernels."""
    return fused_driver(random_model("kv"), twin_kernels(), grammar_bytes=1 << 16)


OPENED: dict[str, Callable[[], Driver]] = {
    "native": lambda: open_loop(grammar_bytes=1 << 16),
    "torch": lambda: open_loop(mode="twin", grammar_bytes=1 << 16),
    "cuda by its references": fused,
    "tape emulated": lambda: tape_driver(small(shape_of()), n_slots=3),
}
OF_TORCH = ["torch", "cuda by its references", pytest.param("tape emulated", marks=pytest.mark.slow)]  # it is compiled


@pytest.mark.parametrize("opened", ["native", *OF_TORCH])
def test_between_enter_and_exit_nothing_that_the_host_sees_can_be_written(opened: str) -> None:
    """I-4, I-5, I-6: position, token and page tables among them. Outside, tables can be."""
    driver = OPENED[opened]()
    runner, given = driver.runner, driver.runner.tables
    before = [stray(part).copy() for _, part in written_parts(driver)]
    runner.decode_mode.enter()
    parts = written_parts(driver)
    names = {name for name, _ in parts}
    assert {
        "table.position",
        "table.token",
        "table.pages",
        "plan.logits",
        "rings.words",
        "admissions.pages",
        "grammars",
    } <= names
    for name, part in parts:
        with pytest.raises((ValueError, DecodeInvariantError), match=r"read-only|only reads"):
            write(part)
        assert not isinstance(part, np.ndarray) or not part.flags.writeable, name
    # plan_hash and epoch are written by `enter` itself
    after = [stray(part) for _, part in parts]
    changed = {name for (name, _), a, b in zip(parts, before, after, strict=True) if not np.array_equal(a, b)}
    assert changed <= {"table", "plan.table", "table.plan_hash", "table.epoch"}
    if opened == "native":  # views that were taken before are the same arrays
        for arena in given.arenas:
            for part in arena.parts:
                with pytest.raises(ValueError, match="read-only"):
                    write(part)
                with pytest.raises(ValueError, match="WRITEABLE"):
                    part.flags.writeable = True
    runner.decode_mode.exit()
    write(runner.tables.table["position"])
    runner.close()


@pytest.mark.parametrize("opened", ["native", *OF_TORCH])
def test_between_enter_and_exit_the_host_runs_no_node_and_zeroes_no_buffer(opened: str) -> None:
    """I-5, I-8: before the loop is triggered, too. Outside it may; weights are never zeroed (E-15)."""
    driver = OPENED[opened]()
    runner, nodes = driver.runner, len(driver.runner.plan.nodes)
    generation = driver.admit(0, PROMPT, most=24)
    runner.decode_mode.enter()
    plan = runner.plan
    assert len(plan.nodes) == nodes
    for node in plan.nodes:
        with pytest.raises(DecodeInvariantError, match="running the node") as refused:
            node.run()
        assert refused.value.invariant == "I-8"
    for buffer in plan.buffers:
        with pytest.raises(DecodeInvariantError, match="zeroing the buffer") as refused:
            buffer.zero(runner.guard)
        assert refused.value.invariant == "I-5"
    runner.decode_mode.trigger()
    driver.wait()
    runner.decode_mode.exit()
    assert driver.tokens(generation) == undisturbed(OPENED[opened])
    runner.plan.buffer("logits").zero(runner.guard)
    assert not np.any(stray(runner.plan.buffer("logits").tensor))
    for buffer in runner.plan.weights:
        with pytest.raises(InternalError, match="holds weights"):
            buffer.zero(runner.guard)
    runner.close()


def test_weights_in_tiles_are_read_only_from_the_start(driver: Driver) -> None:
    """E-15."""
    arrays = [one for one in memory_in(driver.runner.model, "model") if isinstance(one[1], np.ndarray) and one[1].size]
    assert len(arrays) > 10
    for name, array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            write(array)
        assert not array.flags.writeable, name


def test_the_launch_parameters_of_the_native_loop_are_buffers_of_the_plan_that_cannot_be_written(
    driver: Driver,
) -> None:
    """I-5, I-10: layers' scales and pointers, which C reads at every step."""
    start: Any = driver.runner.start
    structs = [one for one in start._native.arrays if one.dtype == np.uint8]
    listed = {buffer.address for buffer in driver.runner.plan.weights}
    assert len(structs) >= 2  # layers and ropes, at least
    assert all(address_of(one) in listed for one in structs)
    for one in structs:
        for array in chain_of(one):
            with pytest.raises(ValueError, match="read-only"):
                write(array)


def test_a_view_of_decode_mode_does_not_become_writable_again(driver: Driver) -> None:
    """I-4, I-5: also of weights, whose owner numpy would let a view write to again."""
    driver.runner.decode_mode.enter()
    for name, part in (*written_parts(driver), *memory_in(driver.runner.model, "model")):
        if isinstance(part, np.ndarray):
            with pytest.raises(ValueError, match="WRITEABLE"):
                part.flags.writeable = True
            assert not isinstance(part.base, np.ndarray), name


def test_a_weight_of_torchs_cannot_be_written_through_the_model_while_decode_mode_is_on() -> None:
    """I-5: of a model of torch's, the host has views that refuse, also by a way that no count would show."""
    driver = open_loop(mode="twin")
    runner = driver.runner
    outside = [address_of(one) for _, one in memory_in(runner.model, "model")]
    runner.decode_mode.enter()
    weights = [one for _, one in memory_in(runner.model, "model")]
    assert [address_of(one) for one in weights] == outside
    assert len(weights) > 10
    for weight in weights:
        for strike in (lambda one: one.mul_(1), lambda one: one.data.mul_(1), lambda one: torch.fill_(one, 1)):
            with pytest.raises(DecodeInvariantError, match="only reads"):
                strike(weight)
    runner.decode_mode.trigger()
    runner.decode_mode.exit()
    next(one for _, one in memory_in(runner.model, "model")).mul_(1)
    runner.close()


def test_a_weight_of_torchs_that_the_host_writes_to_is_found_at_the_next_trigger_and_is_fatal() -> None:
    """I-5: a caller that has the tensor from before can write to it; torch counts that, except through `data`."""
    driver = open_loop(mode="twin")
    name, weight = next((name, one) for name, one in memory_in(driver.runner.model, "model") if one.dim() == 2)
    driver.runner.decode_mode.enter()
    with torch.no_grad():
        weight[0].mul_(1)
    with pytest.raises(PlanStale, match=f"the host has written to {re.escape(name)}"):
        driver.runner.decode_mode.trigger()
    driver.runner.close()


@pytest.mark.parametrize("opened", OF_TORCH)
@pytest.mark.parametrize("name", ["table", "x", "logits", "memory.0.keys", "admissions"])
@pytest.mark.parametrize("swap", [lambda one: one.set_(torch.zeros_like(one)), lambda one: one.set_()])
def test_a_tensor_that_was_swapped_or_freed_is_found_at_the_next_trigger_and_is_fatal(
    swap: Callable[[torch.Tensor], object], name: str, opened: str
) -> None:
    """I-6: the real tensors; nothing runs on the memory that took their place."""
    driver = OPENED[opened]()
    driver.admit(0, PROMPT)
    driver.runner.decode_mode.enter()
    own = driver.runner.plan.buffer(name)._memory
    swap(own)
    with pytest.raises(PlanStale, match=f"the buffer {name} was at"):
        driver.runner.decode_mode.trigger()
    assert driver.runner.start.n_launches == 0
    driver.runner.close()


def test_memory_of_prompts_that_was_swapped_is_found_too() -> None:
    """I-6: what graphs of chunks are bound to is checked with the plan."""
    model = random_model("kv")
    driver = open_loop(mode="twin", model=model)
    runner = driver.runner
    chunks = FusedChunks(model, runner.memory, runner.tables, model.shape.vocab, triton_kernels(TUNED), buckets=(16,))
    assert len(chunks.captured) > 20
    runner.decode_mode = DecodeMode(runner.plan, runner.start, runner.tables, runner.guard, chunks.captured)
    runner.decode_mode.enter()
    runner.decode_mode.check()
    own = next(one for one in chunks.captured if one._memory.data_ptr() == chunks._qkv.data_ptr())
    own._memory.set_(torch.zeros_like(own._memory))
    with pytest.raises(PlanStale, match=f"the buffer {re.escape(own.name)} was at"):
        runner.decode_mode.trigger()
    runner.close()


def test_a_second_executable_under_a_lock_of_its_own_is_found_at_the_next_step(driver: Driver) -> None:
    """I-2, I-10: it takes the loop's place in native code, and the step boundary finds another epoch."""
    driver.admit(0, PROMPT, most=100, granted=128)
    driver.runner.decode_mode.enter()
    start = driver.runner.start
    assert isinstance(start, NativeLoop)
    with held(driver.runner):
        driver.runner.decode_mode.trigger()
        NativeLoop(driver.runner.plan, start._native, Guard()).build()
    assert start.wait(DEADLINE_S)
    assert driver.word(Word.FAULT) == Fault.EPOCH
    with pytest.raises(EngineDead):
        driver.runner.decode_mode.trigger()


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
    """I-4, I-5: the host writes to admissions and rings, and the loop takes none of it into a running slot."""
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
    """E-25."""
    with pytest.raises(FrozenInstanceError):
        driver.runner.plan.nodes = ()  # type: ignore[misc]


def test_one_build_serves_every_trigger_and_entry(driver: Driver) -> None:
    """E-65."""
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
    array = driver.runner.plan.buffer(name)._memory
    array.__setstate__(np.zeros_like(array).__reduce__()[2])  # the same object over other memory


def test_a_buffer_that_was_reallocated_is_found_at_the_next_trigger_and_is_fatal(driver: Driver) -> None:
    """E-31."""
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
        kept = driver.runner.plan.buffer("logits").tensor  # where the loop still writes
        moved(driver)
    with pytest.raises(PlanStale, match="the buffer logits"):
        driver.runner.decode_mode.exit()
    with pytest.raises(EngineDead, match="restarted"):
        driver.runner.decode_mode.enter()
    del kept


def test_exit_waits_for_a_loop_that_runs_steps_however_long_it_takes(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = driver.admit(0, PROMPT, most=24)
    decode_mode = driver.runner.decode_mode
    decode_mode.enter()
    decode_mode.trigger()
    wait, waited = driver.runner.start.wait, list[float]()

    def slow(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) == 4 and wait(DEADLINE_S)

    monkeypatch.setattr(driver.runner.start, "wait", slow)
    monkeypatch.setattr(decode_mode, "_n_steps", lambda: len(waited))  # one step more each time
    decode_mode.exit(3.0)
    assert waited == [3.0] * 4
    monkeypatch.undo()
    driver.wait()
    assert driver.tokens(generation) == undisturbed()


def test_an_executable_that_was_exchanged_is_found_at_exit_and_is_fatal(driver: Driver) -> None:
    driver.runner.decode_mode.enter()
    driver.runner.start.executable += 1
    with pytest.raises(PlanStale, match="executable"):
        driver.runner.decode_mode.exit()
    with pytest.raises(EngineDead):
        driver.runner.decode_mode.enter()


@pytest.mark.parametrize(("word", "fault"), [("plan_hash", Fault.PLAN), ("epoch", Fault.EPOCH)])
def test_drift_planted_while_the_loop_runs_is_found_at_the_next_step(driver: Driver, word: str, fault: Fault) -> None:
    """E-67."""
    driver.admit(0, PROMPT, most=100, granted=128)
    driver.runner.decode_mode.enter()
    with held(driver.runner):  # as above
        driver.runner.decode_mode.trigger()
        stray(driver.runner.tables.table[word])[0] += 1
    assert driver.runner.start.wait(DEADLINE_S)
    assert driver.word(Word.FAULT) == fault
    assert driver.word(Word.WHY) == End.FAULT
    assert driver.runner.decode_mode.fault() is not None
    driver.entries += driver.runner.host.drain()
    assert all(entry.finish is Finish.NONE for entry in driver.entries), "a drifted loop finishes no sequence"
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
