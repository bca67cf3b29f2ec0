"""The whole kernel, played by the emulator: the logits of torch, bits of its own, and the manners of every loop."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.backends.tape.plan import TapeStep
from ostinato.backends.tape.start import tape_headers, tape_source
from ostinato.backends.torch.backend import TWIN
from ostinato.backends.torch.model import Model
from ostinato.engine.choose import settle_model
from ostinato.engine.engine import Engine
from ostinato.errors import EngineDead
from ostinato.loop.host import Admission
from ostinato.loop.layout import End, Fault, Finish, SlotState, Word, bits_of
from ostinato.models.rope import Rope
from ostinato.options import KVType, Sampling
from tests.backends.tape.emulator import compiled
from tests.backends.tape.loop import CONTEXT, N_PAGES, OUTBOX, EmulatedLoop, tape_driver, widened
from tests.backends.tape.models import EMULATED, gemma3, shape_of, small
from tests.engine.rig import GREEDY, Driver, stray
from tests.models.plain_memory import logits as forward

pytestmark = pytest.mark.slow

# Activations are bfloat16 between products, 8 bits of mantissa: a few roundings of one part in 256 in each layer.
TOLERANCE = 0.02
WARM = Sampling(temperature=0.9, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5)
LLAMA = shape_of()


def finish(driver: Driver) -> None:
    """To the end, through every pause for a full outbox."""
    driver.run()
    while driver.word(Word.WHY) == End.OUTBOX_FULL:
        driver.run()


def alone(model: Model, prompt: Sequence[int], most: int, sampling: Sampling = GREEDY, seed: int = 0) -> list[int]:
    with closing(tape_driver(model, seed=seed)) as driver:
        generation = driver.admit(0, prompt, most=most, sampling=sampling)
        finish(driver)
        return driver.tokens(generation)


def by_steps(driver: Driver, prompt: Sequence[int], most: int) -> tuple[list[int], Tensor]:
    """Greedy tokens, and the logits that the steps chose them from."""
    generation = driver.admit(0, prompt, most=most)
    logits = []
    while driver.step():
        logits.append(driver.runner.plan.buffer("logits").tensor[0].clone())
    logits.append(driver.runner.plan.buffer("logits").tensor[0].clone())
    return driver.tokens(generation), torch.stack(logits[1:])  # the first step has no live sequence


def check_near_torch(model: Model, *, most: int = 12, tolerance: float = TOLERANCE, **how: Any) -> None:
    """Step by step the logits of one forward by torch over the same tokens; and its arg-max, unless its first two are
    closer than the tolerance."""
    prompt = [5, 9, 33, 7, 8, 120]
    with closing(tape_driver(model, **how)) as tape:
        tokens, logits = by_steps(tape, prompt, most)
    whole = [*prompt, *tokens[:-1]]
    expected = forward(widened(model).for_length(len(whole)), whole)[len(prompt) :]
    assert len(logits) == len(expected) == most - 1
    errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < tolerance
    first, second = expected.topk(2).values.unbind(1)
    clear = first - second > tolerance * expected.abs().amax(1)
    assert torch.equal(logits.argmax(1)[clear], expected.argmax(1)[clear])
    assert clear.any()


# --- what it computes ---


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_every_family_has_the_logits_of_torch(family: str) -> None:
    check_near_torch(small(shape_of(family)))


@pytest.mark.parametrize("family", EMULATED)
def test_families_that_ran_on_no_card_have_the_logits_of_torch(family: str) -> None:
    check_near_torch(small(EMULATED[family]()))


@pytest.mark.parametrize("most", [5, 12])
def test_sequences_on_both_sides_of_longropes_border_have_the_logits_of_torch(most: int) -> None:
    long = tuple(1.0 + i / 4 for i in range(32))
    rope = Rope(10_000.0, 64, "halves", (1.0,) * 32, 1.1, long, original_context=10)
    check_near_torch(small(shape_of("phi3").with_attention(rope=rope)), most=most)


def test_windows_of_a_mistral_are_seen() -> None:
    model = small(shape_of(windows=(5, None)))
    check_near_torch(model)
    with closing(tape_driver(small(LLAMA))) as other:
        assert by_steps(other, [5, 9, 33, 7, 8, 120], 12)[0] != alone(model, [5, 9, 33, 7, 8, 120], 12)


@pytest.mark.parametrize(
    "sizes",
    [
        # Nine heads in groups of three over 192 columns: SmolLM2 in small, and as many compute warps as a card has.
        {"hidden": 192, "n_heads": 9, "n_kv_heads": 3, "ff_width": 320, "vocab": 177, "tied_head": True},
        {"hidden": 64, "n_heads": 8, "n_kv_heads": 1, "ff_width": 128, "vocab": 140},
        {"hidden": 128, "n_heads": 2, "n_kv_heads": 2, "head_width": 96, "ff_width": 192},
        {"hidden": 256, "n_heads": 2, "n_kv_heads": 1, "head_width": 256, "ff_width": 256},
    ],
    ids=["smollm", "groups of eight", "width 96", "width 256"],
)
def test_odd_shapes_have_the_logits_of_torch(sizes: dict[str, Any]) -> None:
    check_near_torch(small(shape_of("llama", **sizes)), most=6, n_compute_warps=8 if sizes["hidden"] == 192 else 2)


@pytest.mark.parametrize("mix", ["q4_k_m", "q5_k", "q8_0"])  # every kind; each type: test_pack.py, test_product.py
def test_packed_weights_have_the_logits_of_the_same_numbers(mix: str) -> None:
    shape = shape_of(hidden=256, ff_width=256, n_heads=4, n_kv_heads=2)
    check_near_torch(small(shape, mix=mix), most=6)


@pytest.mark.parametrize("mix", [None, "q4_k_m"])
def test_int8_activations_are_near_too_and_other_bits(mix: str | None) -> None:
    """E-75."""
    model = small(shape_of(hidden=256, ff_width=256), mix=mix)
    check_near_torch(model, most=6, tolerance=0.06, activations="int8")


def test_float16_weights_are_multiplied_as_float16() -> None:
    check_near_torch(small(LLAMA, dtype=torch.float16), tolerance=0.003)


@pytest.mark.parametrize("kv_type", ["bf16", "q8_0"])
def test_narrow_keys_and_values_are_near(kv_type: KVType) -> None:
    check_near_torch(small(LLAMA), kv_type=kv_type)


# --- bits ---


def test_a_request_decodes_the_same_in_any_slot_company_and_order_of_events() -> None:
    model, chance = small(LLAMA), random.Random(7)
    prompts = [[chance.randrange(203) for _ in range(chance.randrange(1, 40))] for _ in range(4)]
    expected = [alone(model, prompt, 8 + n, WARM) for n, prompt in enumerate(prompts)]
    for seed in (100, 200):
        slots = chance.sample(range(4), 4)
        with closing(tape_driver(model, seed=seed)) as driver:
            asked = [
                driver.admit(s, p, most=8 + n, sampling=WARM)
                for n, (s, p) in enumerate(zip(slots, prompts, strict=True))
            ]
            finish(driver)
            assert [driver.tokens(generation) for generation in asked] == expected


@pytest.mark.parametrize(
    ("family", "kv_type"), [("llama", "f32"), ("llama", "q8_0"), *((family, "f32") for family in EMULATED)]
)
def test_logits_have_the_same_bits_alone_and_among_neighbours(family: str, kv_type: KVType) -> None:
    model = small(EMULATED[family]() if family in EMULATED else LLAMA)
    with closing(tape_driver(model, seed=1, kv_type=kv_type)) as driver:
        _, expected = by_steps(driver, [1, 2, 3, 4], 6)
    with closing(tape_driver(model, seed=2, kv_type=kv_type)) as driver:
        for slot in (1, 2, 3):
            driver.admit(slot, [slot] * 20, most=6)
        assert torch.equal(by_steps(driver, [1, 2, 3, 4], 6)[1], expected)


def test_the_number_of_blocks_changes_no_bit_of_norms_after_a_block() -> None:
    model = small(gemma3())
    found = []
    for n_blocks in (3, 10):  # of ten, two have no tile of x in some products
        with closing(tape_driver(model, n_blocks=n_blocks)) as driver:
            found.append(by_steps(driver, [1, 2, 3, 4], 5)[1])
    assert torch.equal(*found)


def test_the_number_of_slots_that_a_kernel_is_compiled_for_changes_no_bit() -> None:
    model = small(LLAMA)
    with closing(tape_driver(model)) as driver:
        _, expected = by_steps(driver, [1, 2, 3, 4], 6)
    with closing(tape_driver(model, n_slots=1)) as driver:
        assert torch.equal(by_steps(driver, [1, 2, 3, 4], 6)[1], expected)


# --- manners: those of every loop ---


def test_it_ends_when_no_sequence_is_live_after_one_launch() -> None:
    with closing(tape_driver(small(LLAMA))) as driver:
        driver.admit(0, [1, 2], most=9)
        driver.run()
        assert not driver.runner.start.running
        assert (driver.word(Word.STEPS), driver.word(Word.WHY)) == (8, End.IDLE)
        assert driver.runner.start.n_launches == 1
        driver.admit(1, [7, 2, 9], most=3)  # and goes on counting tags where it ended
        driver.run()
        assert driver.word(Word.STEPS) == 10


def test_a_sequence_that_is_cancelled_ends_with_one_entry_and_leaves_the_others() -> None:
    model = small(LLAMA)
    with closing(tape_driver(model)) as driver:
        doomed = driver.admit(0, [1, 2, 3], most=200)
        other = driver.admit(1, [4, 5], most=10)
        driver.runner.host.cancel(0, doomed)
        finish(driver)
        ends = [e.finish for e in driver.entries if e.generation == doomed and e.finish is not Finish.NONE]
        assert ends == [Finish.CANCELLED]
        assert driver.tokens(other) == alone(model, [4, 5], 10)


def test_a_slot_without_pages_pauses_and_goes_on_when_they_are_granted() -> None:
    model, prompt = small(LLAMA), [1, 2, 3]
    with closing(tape_driver(model)) as driver:
        generation = driver.admit(0, prompt, most=40, granted=16, pages=[0])
        driver.run()
        assert driver.runner.tables.table["state"][0] == SlotState.PAUSED
        assert len(driver.tokens(generation)) == 16 - len(prompt) + 1
        assert driver.runner.host.grant(0, generation, 1, [5, 3]) == 2
        finish(driver)
        assert driver.tokens(generation) == alone(model, prompt, 40)


def test_a_full_outbox_pauses_the_loop_and_loses_nothing() -> None:
    model = small(LLAMA)
    with closing(tape_driver(model)) as driver:
        asked = [driver.admit(slot, [slot + 1, 2], most=30) for slot in range(3)]
        driver.run()
        assert driver.word(Word.WHY) == End.OUTBOX_FULL
        finish(driver)
        for slot, generation in enumerate(asked):
            assert driver.tokens(generation) == alone(model, [slot + 1, 2], 30)


def test_a_yield_ends_the_loop_at_a_boundary_and_a_trigger_resumes_it() -> None:
    model = small(LLAMA)
    with closing(tape_driver(model)) as driver:
        generation = driver.admit(0, [1, 2, 3], most=20)
        driver.runner.host.set_yield(True)
        driver.run()
        assert driver.word(Word.WHY) == End.YIELD
        assert len(driver.tokens(generation)) == 1
        driver.runner.host.set_yield(False)
        driver.run()
        assert driver.tokens(generation) == alone(model, [1, 2, 3], 20)


def test_a_stop_id_ends_a_sequence_and_is_its_last_token() -> None:
    model = small(LLAMA)
    free = alone(model, [1, 2, 3], 12)
    with closing(tape_driver(model)) as driver:
        generation = driver.admit(0, [1, 2, 3], most=12, stop_ids=[free[5]])
        driver.run()
        assert driver.tokens(generation) == free[: free.index(free[5]) + 1]
        assert driver.entries[-1].finish is Finish.STOP


def test_a_masked_slot_waits_for_each_mask_and_chooses_within_it() -> None:
    model = small(LLAMA)
    allowed = [3, 77, 150, 202]
    bits = bits_of(allowed, -(-model.shape.vocab // 32))
    with closing(tape_driver(model)) as driver:
        other = driver.admit(1, [9, 9], most=6)
        generation = driver.admit(0, [1, 2, 3], most=4, pages=[20], granted=16, admit=False)
        driver.runner.host.stage(0, Admission(generation, [1, 2, 3], 4, [[20]], 16, GREEDY, stop_ids=(), mask=bits))
        driver.runner.beside(lambda: driver.runner.chunks.first(0)).result(60)
        assert driver.runner.host.admit(0, generation)
        driver.run()
        while driver.runner.tables.table["state"][0] == SlotState.PAUSED:
            assert driver.runner.host.mask(0, generation, bits)
            driver.run()
        assert len(driver.tokens(generation)) == 4
        assert set(driver.tokens(generation)) <= set(allowed)
        assert driver.tokens(other) == alone(model, [9, 9], 6)


def test_a_plan_that_drifted_is_fatal_and_nothing_of_the_step_is_told() -> None:
    with closing(tape_driver(small(LLAMA))) as driver:
        generation = driver.admit(0, [1, 2, 3], most=5)
        driver.runner.decode_mode.enter()
        stray(driver.runner.tables.table["epoch"])[0] += 1
        driver.runner.decode_mode.trigger()
        with pytest.raises(EngineDead, match="epoch"):
            driver.wait()
        assert driver.tokens(generation) == []


def test_a_block_that_waits_in_vain_ends_the_loop_with_a_fault_and_no_block_hangs() -> None:
    with closing(tape_driver(small(LLAMA), deadline_ns=200_000_000)) as driver:
        generation = driver.admit(0, [1, 2, 3], most=5)
        step = driver.runner.step  # type: ignore[attr-defined]
        assert isinstance(step, TapeStep)
        # The segment lists fewer tiles than there are, so some values never arrive.
        step.buffers["segments"][4, 1] -= 3
        with pytest.raises(EngineDead, match="stuck"):
            driver.run()
        assert driver.word(Word.FAULT) == Fault.STUCK
        assert len(driver.tokens(generation)) <= 1


# The step boundary alone, of a step whose marks the test has laid out.
BORDER = (
    tape_source().partition("KERNEL(")[0]
    + r"""
KERNEL(boundary_alone, Tape, given, N_COMPUTE_THREADS) {
    ComputeThread p = {};
    p.thread = thread();
    p.tag = 7;
    go_on(p, given, 2);
}
"""
)


def test_a_choice_that_never_comes_is_a_fault_though_all_others_came() -> None:
    with closing(tape_driver(small(LLAMA))) as driver:
        runner, step = driver.runner, driver.runner.step  # type: ignore[attr-defined]
        step.buffers["marks"][:-1] = 7 << 32
        step.buffers["marks"][step.sizes.grid.n_blocks + 1] = 6 << 32  # of the second row
        runner.tables.table["n_rows"][0] = 2
        runner.tables.table["row_slot"][:2] = torch.arange(2)
        headers = tape_headers(step.header, runner.tables.layout, runner.page_tokens)
        headers["shape.h"] += "#undef DEADLINE_NS\n#define DEADLINE_NS 50000000LL\n"
        program = compiled(BORDER, "boundary_alone.cpp", headers=headers)
        program.run("boundary_alone", step.argument, n_blocks=1, shared_bytes=step.sizes.shared_bytes)
        assert (driver.word(Word.FAULT), driver.word(Word.OUTBOX_HEAD)) == (Fault.STUCK, 0)


# --- the engine over it ---


def open_engine(monkeypatch: pytest.MonkeyPatch, model: Model) -> Engine:
    monkeypatch.setattr("ostinato.engine.engine.open_runner", EmulatedLoop)
    settled = settle_model(model, TWIN, context=CONTEXT, n_pages=N_PAGES, n_slots=4, kv_type="f32")
    return Engine(model, settled, outbox_entries=OUTBOX)


def test_prompts_are_taken_in_while_others_run_and_answers_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(LLAMA)
    sampling = replace(WARM, max_tokens=25, ignore_eos=True)
    prompts = [[n * 31 % 203, *range(n, n + 30)] for n in range(1, 9)]
    expected = [alone(model, prompt, 25, WARM) for prompt in prompts]
    with open_engine(monkeypatch, model) as engine:
        requests = [engine.submit(prompt, sampling) for prompt in prompts]  # twice as many as there are slots
        assert [[token.token for token in request] for request in requests] == expected
        assert engine.stats().launches > 1  # it left for the prompts, and came back
