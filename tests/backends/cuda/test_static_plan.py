"""The step over all rows at once against the model's own row by row: same tokens, and nobody else's memory touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.backends.cuda.backend import SPARE_STATES
from ostinato.backends.cuda.static_plan import StaticStep
from ostinato.backends.torch.chunks import TorchChunks
from ostinato.backends.torch.kernels import Kernels, twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.start import CpuLoop
from ostinato.errors import InternalError
from ostinato.loop.layout import Word
from ostinato.loop.mode import DecodeMode
from ostinato.loop.plan import Node
from ostinato.models.mamba import MAMBA, without_attention
from ostinato.models.shape import MambaShape
from ostinato.options import Sampling
from tests.backends.families import family_model
from tests.engine.rig import GREEDY, Driver, open_loop
from tests.random_model import MemoryKind, RandomWeights, random_model, shape_of

pytestmark = pytest.mark.slow

KINDS: tuple[MemoryKind, ...] = ("recurrent", "hybrid", "kv", "swa", "all swa")
RECURRENT: tuple[MemoryKind, ...] = ("recurrent", "hybrid")
N_SLOTS = 6
WARM = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.0, repetition_penalty=1.1, seed=11)
PROMPTS = ([5, 9, 2, 77, 31], list(range(1, 40)), [100], [64, 3] * 35, [8, 8, 8])

Logits = dict[tuple[int, int], Tensor]  # by generation and position


def static_driver(model: Model, kernels: Kernels | None = None, *, kv_type: str = "f32") -> Driver:
    """A driver whose step is the static plan; prompts go through the model's blocks as ever."""
    kernels = kernels or twin_kernels()
    driver = open_loop(model=model, mode="twin", n_slots=N_SLOTS, n_pages=96, kv_type=kv_type)  # type: ignore[arg-type]
    runner = driver.runner
    runner.start.close()
    runner.memory = PagedMemory.of(
        model,
        runner.groups,
        n_slots=N_SLOTS + SPARE_STATES,
        kv_type=kv_type,  # type: ignore[arg-type]
        page_tokens=runner.page_tokens,
    )
    runner.chunks = TorchChunks(model, runner.memory, runner.tables, model.shape.vocab, kernels)
    runner.plan = StaticStep(model, runner.memory, runner.tables, model.shape.vocab, kernels).plan()
    runner.start = CpuLoop(runner.plan, runner.tables, runner.guard, runner.changed.set)
    runner.decode_mode = DecodeMode(runner.plan, runner.start, runner.tables, runner.guard)
    return driver


def row_by_row(model: Model, *, kv_type: str = "f32") -> Driver:
    return open_loop(model=model, mode="twin", n_slots=N_SLOTS, n_pages=96, kv_type=kv_type)  # type: ignore[arg-type]


def with_nodes(driver: Driver, *more: Node, before: str = "sample") -> None:
    """Put nodes of the test's own before the first of that name."""
    runner, nodes = driver.runner, list(driver.runner.plan.nodes)
    at = next(number for number, node in enumerate(nodes) if node.name.startswith(before))
    runner.plan = replace(runner.plan, nodes=(*nodes[:at], *more, *nodes[at:]))
    start = CpuLoop(runner.plan, runner.tables, runner.guard, runner.changed.set)
    runner.decode_mode.replace(runner.plan, start)
    runner.start = start


def recorded(driver: Driver) -> Logits:
    """What will hold the logits of every row of every step."""
    table, found = driver.runner.tables.table, Logits()
    logits = driver.runner.plan.buffer("logits").tensor

    def record() -> None:
        for row in range(int(table["n_rows"])):
            slot = int(table["row_slot"][row])
            found[int(table["generation"][slot]), int(table["position"][slot])] = logits[row].clone()

    with_nodes(driver, Node("record", "test", record, ("logits", "table"), ()))
    return found


def played(driver: Driver, slots: Sequence[int], *, sampling: Sampling = GREEDY) -> tuple[list[list[int]], Logits]:
    """Sequences of different lengths in these slots, to the end: their tokens, and all logits on the way."""
    logits = recorded(driver)
    generations = [
        driver.admit(slot, PROMPTS[number], most=4 + 2 * number, sampling=sampling) for number, slot in enumerate(slots)
    ]
    driver.run()
    driver.runner.close()
    return [driver.tokens(generation) for generation in generations], logits


def mamba_model() -> Model:
    mamba = MambaShape(inner=96, state=8, kernel=4, dt_rank=4, bias=False, conv_bias=True, norm_eps=None)
    shape = without_attention("mamba", mamba, 2, hidden=64, vocab=128, norm_eps=1e-5)
    return RandomWeights(3).model(MAMBA, shape)


def narrow_model(kind: MemoryKind) -> Model:
    family, shape = shape_of(kind, 128, 64, 1024)
    return RandomWeights(0, torch.bfloat16).model(family, shape)


# Tokens and logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [[4], [5, 0, 2], [1, 3, 0, 5, 2]], ids=lambda slots: f"{len(slots)} live")
def test_it_decodes_what_the_model_does_row_by_row(kind: MemoryKind, slots: list[int]) -> None:
    model = random_model(kind)
    tokens, logits = played(row_by_row(model), slots)
    static_tokens, static_logits = played(static_driver(model), slots)
    assert static_tokens == tokens
    assert static_logits.keys() == logits.keys()
    for where, expected in logits.items():
        torch.testing.assert_close(static_logits[where], expected, rtol=1e-4, atol=1e-4)


def test_it_decodes_mamba_as_the_model_does_row_by_row() -> None:
    model = mamba_model()
    expected, found = played(row_by_row(model), [5, 0, 2]), played(static_driver(model), [5, 0, 2])
    assert found[0] == expected[0]
    for where, logits in expected[1].items():
        torch.testing.assert_close(found[1][where], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "qwen3", "phi3-long"])
def test_scaled_and_placed_embeddings_norms_and_ropes_are_those_of_the_model(family: str) -> None:
    model = family_model(family)
    expected, found = played(row_by_row(model), [3, 0]), played(static_driver(model), [3, 0])
    assert found[0] == expected[0]
    for where, logits in expected[1].items():
        torch.testing.assert_close(found[1][where], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_model_in_bfloat16_gives_about_the_logits_that_it_does_row_by_row(kind: MemoryKind) -> None:
    model = narrow_model(kind)
    driver = static_driver(model)
    assert driver.runner.plan.buffer("x").tensor.dtype == (torch.float32 if kind == "recurrent" else torch.bfloat16)
    expected, found = played(row_by_row(model), [1, 4]), played(driver, [1, 4])
    for number, tokens in enumerate(expected[0]):
        # The first step of each: later ones may have taken in another token.
        where = number + 1, len(PROMPTS[number])
        assert found[0][number][0] == tokens[0]
        torch.testing.assert_close(found[1][where], expected[1][where], rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("kv_type", ["bf16", "f16"])
def test_narrow_keys_and_values_are_stored_as_row_by_row(kv_type: str) -> None:
    model = random_model("hybrid")
    expected, found = (
        played(row_by_row(model, kv_type=kv_type), [1, 4]),
        played(static_driver(model, kv_type=kv_type), [1, 4]),
    )
    for where, logits in expected[1].items():
        torch.testing.assert_close(found[1][where], logits, rtol=3e-2, atol=3e-2)


def interpreted() -> Kernels:
    """Triton's attention and sampler, which are all that a static step takes of it."""
    from ostinato.backends.cuda.triton.attend import attend_workspace, bind_attend
    from ostinato.backends.cuda.triton.sample import bind_sample, sample_workspace

    sample: Any = bind_sample
    return replace(
        twin_kernels(),
        attend=partial(bind_attend, programs=3),
        attend_workspace=attend_workspace,
        sample=sample,
        sample_workspace=sample_workspace,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECURRENT)
def test_with_triton_kernels_it_decodes_what_the_model_does_row_by_row(kind: MemoryKind) -> None:
    model = random_model(kind)
    expected, found = played(row_by_row(model), [3, 0]), played(static_driver(model, interpreted()), [3, 0])
    assert found[0] == expected[0]
    for where, logits in expected[1].items():
        torch.testing.assert_close(found[1][where], logits, rtol=2e-3, atol=2e-3)


# Company


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_are_the_same_in_any_slot_and_row_and_company(kind: MemoryKind) -> None:
    model = random_model(kind)
    alone = [Logits() for _ in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        driver = static_driver(model)
        logits = recorded(driver)
        driver.admit(0, prompt, most=4 + 2 * number, sampling=WARM)
        driver.run()
        driver.runner.close()
        alone[number] = logits
    for slots in ([5, 4, 3, 2, 1], [2, 0, 5, 1, 4]):
        _, together = played(static_driver(model), slots, sampling=WARM)
        assert len(together) == sum(map(len, alone))
        for number, expected in enumerate(alone):
            for (_, position), row in expected.items():
                assert torch.equal(together[number + 1, position], row), (number, position)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_sequence_may_come_into_a_slot_that_another_left_while_others_go_on(kind: MemoryKind) -> None:
    model = random_model(kind)

    def one_after_another(driver: Driver) -> list[list[int]]:
        first = [driver.admit(slot, PROMPTS[slot], most=6 + 20 * (slot == 1)) for slot in range(3)]
        driver.runner.decode_mode.enter()
        driver.runner.host.set_yield(True)
        for _ in range(2):
            driver.runner.decode_mode.trigger()  # ends at its first step boundary, having admitted
            driver.wait()
        driver.runner.host.set_yield(False)
        driver.runner.decode_mode.exit()
        for _ in range(8):  # the two short ones end, the long one goes on
            driver.runner.decode_mode.step()
        late = [driver.admit(slot, PROMPTS[3 + slot // 2], most=5) for slot in (0, 2)]
        driver.run()
        driver.runner.close()
        return [driver.tokens(generation) for generation in (*first, *late)]

    expected = one_after_another(row_by_row(model))
    assert [len(tokens) for tokens in expected] == [6, 26, 6, 5, 5]
    assert one_after_another(static_driver(model)) == expected


# Memory of others


def kept_states(driver: Driver) -> list[Tensor]:
    states = driver.runner.memory.states
    return [] if states is None else [state for layer in states.layers.values() for state in layer]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slot", [0, 3])
def test_what_other_slots_and_pages_hold_is_neither_read_nor_written(kind: MemoryKind, slot: int) -> None:
    model = random_model(kind)
    untouched = static_driver(model)
    expected = untouched.admit(slot, PROMPTS[0], most=20)
    untouched.run()
    untouched.runner.close()

    driver = static_driver(model)
    generation = driver.admit(slot, PROMPTS[0], most=20, pages=[7, 2])
    memory = driver.runner.memory
    others = [other for other in range(N_SLOTS + SPARE_STATES) if other != slot]
    for state in kept_states(driver):
        state[others] = float("nan")
    elsewhere = torch.ones(driver.runner.settled.n_pages * memory.page_tokens, dtype=torch.bool)
    for page in (7, 2):
        elsewhere[page * memory.page_tokens : (page + 1) * memory.page_tokens] = False
    halves = [] if memory.kv is None else memory.kv.halves
    for half in halves:
        half.values[0, elsewhere] = float("nan")
    driver.run()
    driver.runner.close()
    assert driver.tokens(generation) == untouched.tokens(expected)
    for state in kept_states(driver):
        assert bool(state[[other for other in others if other < N_SLOTS]].isnan().all())
        assert not bool(state[slot].isnan().any())
    assert all(bool(half.values[0, elsewhere].isnan().all()) for half in halves)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_serve_nobody_begin_with_nothing_at_every_step(kind: MemoryKind) -> None:
    driver = static_driver(random_model(kind))
    driver.admit(1, PROMPTS[0], most=4)
    driver.admit(2, PROMPTS[1], most=20)
    driver.run()
    driver.runner.close()
    assert not any(bool(state[N_SLOTS].any()) for state in kept_states(driver))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_nobody_in_it_changes_no_memory(kind: MemoryKind) -> None:
    driver = static_driver(random_model(kind))
    driver.admit(0, PROMPTS[0], most=4)
    runner = driver.runner
    runner.tables.table["n_rows"].zero_()
    runner.tables.table["row_slot"].fill_(N_SLOTS - 1)  # whatever a step before left there
    halves = [] if runner.memory.kv is None else runner.memory.kv.halves
    before = [state[:N_SLOTS].clone() for state in kept_states(driver)], [half.values.clone() for half in halves]
    for node in runner.plan.nodes:
        node.run()
    after = [state[:N_SLOTS] for state in kept_states(driver)], [half.values for half in halves]
    assert all(map(torch.equal, before[0] + before[1], after[0] + after[1]))
    runner.close()


def test_rows_that_serve_nobody_stand_at_a_token_and_a_position_that_exist() -> None:
    model = family_model("gpt2")  # looks its positions up in a table
    driver = static_driver(model)
    table = driver.runner.tables.table
    generation = driver.admit(1, PROMPTS[0], most=4)
    table["token"][[0, 2, 3, 4, 5]] = 1 << 30
    table["position"][[0, 2, 3, 4, 5]] = 1 << 30
    driver.run()
    assert len(driver.tokens(generation)) == 4
    driver.runner.close()


# What makes it a graph


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """Notes every op of torch and the shape that it gives."""

    seen: list[tuple[str, Any]]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen.append((func.overloadpacket.__name__, out.shape if isinstance(out, Tensor) else None))
        return out


def ops_of(driver: Driver, n_rows: int) -> list[tuple[str, Any]]:
    """What torch does in a step with so many rows, sampling apart."""
    driver.runner.tables.table["n_rows"].fill_(n_rows)
    watch = Watch()  # type: ignore[no-untyped-call]
    watch.seen = []
    for node in driver.runner.plan.nodes:
        if node.kind != "sample":
            with watch:
                node.run()
    return watch.seen


# To look at a value, to carry one to the device, and shapes that follow from values: what would end a capture.
REFUSED = {"_local_scalar_dense", "item", "lift_fresh", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}


@pytest.mark.parametrize("kind", KINDS)
def test_no_node_asks_the_device_anything_or_knows_who_lives(kind: MemoryKind) -> None:
    def attend(qkv: Tensor, seen: Tensor, *_: object) -> Any:
        return lambda: seen.copy_(qkv[:, : seen.shape[1]])

    model = random_model(kind)
    model = replace(model, shape=replace(model.shape, embedding_scale=3.0))
    driver = static_driver(model, replace(twin_kernels(), attend=attend))
    nobody, one, five = (ops_of(driver, n_rows) for n_rows in (0, 1, 5))
    assert not {name for name, _ in nobody} & REFUSED
    assert nobody == one == five
    driver.runner.plan.check()
    driver.runner.close()


def test_a_plan_has_a_node_for_each_layer_and_names_all_it_holds() -> None:
    driver = static_driver(random_model("hybrid"))
    plan = driver.runner.plan
    assert [node.name for node in plan.nodes] == ["embed", "layer.0", "layer.1", "head", "sample.choose"]
    names = {buffer.name for buffer in plan.buffers}
    assert {"table", "x", "logits", "from_row", "to_row", "turns.0.0", "qkv", "attended", "memory.0.keys"} <= names
    assert {"memory.1.state.0", "memory.1.state.1"} <= set(plan.nodes[2].writes)
    weights = {t.data_ptr(): t.numel() * 4 for name, t in ((b.name, b.tensor) for b in plan.buffers) if "model" in name}
    assert 0 < plan.weight_bytes <= sum(weights.values())
    driver.runner.close()


def test_it_counts_its_steps_and_ends_by_itself() -> None:
    driver = static_driver(random_model("recurrent"))
    driver.admit(2, PROMPTS[0], most=3)
    driver.run()
    assert driver.word(Word.STEPS) == 2
    driver.runner.close()


# What it refuses


def test_states_without_spare_rows_are_refused() -> None:
    model = random_model("recurrent")
    driver = open_loop(model=model, mode="twin")
    with pytest.raises(InternalError, match="a static step of 4 slots needs 2 more"):
        StaticStep(model, driver.runner.memory, driver.runner.tables, 128, twin_kernels())
    driver.runner.close()
