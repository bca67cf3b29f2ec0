"""The step (E): launches of fixed shape, no value between them that they did not write, and fusions that can be off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu_models import moved
from ostinato.backends.base import ChunkPart
from ostinato.backends.cuda.kernels import triton_kernels
from ostinato.backends.cuda.plan import Fusions
from ostinato.backends.machine import TUNED
from ostinato.backends.torch.kernels import twin_kernels
from ostinato.models.blocks import GatedMLP, Layer
from tests.backends.cuda.test_plan import fused_driver
from tests.backends.families import FAMILIES, LATENT, RECURRENT, family_model
from tests.engine.rig import open_loop, stray
from tests.engine.test_loop import alone, by_full_forwards
from tests.random_model import random_model

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PROMPT = [5, 9, 2, 77, 31]


class Launches:
    """Notes what kernels would be launched with, and launches none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self.seen: list[tuple[Any, ...]] = []

        def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **words: Any) -> None:
            given = [(a.data_ptr(), a.shape) if isinstance(a, Tensor) else a for a in (*args, *words.values())]
            self.seen.append((kernel.__name__, grid, given, [*words]))

        monkeypatch.setattr(InterpretedFunction, "run", note)


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """Notes the largest tensor that any op of torch gives with memory of its own."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        for one in given if isinstance(given, tuple | list) else (given,):
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, one.numel() * one.element_size())
        return given


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """Notes every op of torch."""

    seen: list[str]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES + LATENT)
def test_a_fused_step_is_launches_and_nothing_else_and_the_same_for_any_live_rows(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-46, E-52, E-61: no copy, no question to the device, no grid that follows from a length."""
    driver = fused_driver(family_model(family), triton_kernels(TUNED))
    table, launches = driver.runner.tables.table, Launches(monkeypatch)

    def recorded(n_rows: int, position: int) -> list[tuple[Any, ...]]:
        table["n_rows"].fill_(n_rows)
        table["position"].fill_(position)
        launches.seen = []
        watch = Watch()  # type: ignore[no-untyped-call]
        watch.seen = []
        for node in driver.runner.plan.nodes:
            if node.name == "masks":  # where Triton is interpreted, the twin finds them
                continue
            before = len(launches.seen)
            with watch:
                node.run()
            assert len(launches.seen) - before == node.n_launches, node.name
        assert watch.seen == []
        return launches.seen

    empty = recorded(0, 0)
    assert empty == recorded(1, 0) == recorded(3, 100)
    driver.runner.close()


def test_what_a_chunk_needs_beside_keys_and_values_does_not_grow_with_what_it_sees() -> None:
    """E-36, in torch: every op of a chunk after 200 positions, and after 4,000."""
    model, largest = random_model("kv", context=8192), []
    for start in (200, 4000):
        driver = open_loop(model=model, mode="eager", context=8192, n_pages=600)
        sizes = Sizes()  # type: ignore[no-untyped-call]
        with sizes:
            driver.runner.chunks.run([ChunkPart(list(range(64)), start, [list(range(300))], 0)], 64)
        largest.append(sizes.largest)
        driver.runner.close()
    assert largest[0] >= 64 * model.shape.hidden * 4  # its rows: the ops were seen
    assert largest[1] <= max(largest[0], 8 * (4000 + 64))  # a word for each position seen
    (_, keys, _) = model.shape.attention[0].qkv_widths
    assert largest[1] < 4000 * keys * 4


def test_what_the_native_loop_works_in_has_no_room_for_the_scores_of_a_chunk() -> None:
    """E-36: the same for 8,192 positions as for 1,024, but for less than one head's scores of a chunk."""
    driver, wide = (open_loop(context=context, n_pages=600) for context in (1024, 8192))
    rows = driver.runner.chunks.rows
    assert rows == wide.runner.chunks.rows
    small, large = (each.runner.plan.buffer("step.workspace").n_bytes for each in (driver, wide))
    assert small < large < small + rows * (8192 - 1024) * 4
    for each in (driver, wide):
        each.runner.close()


@pytest.mark.parametrize("family", ["llama", "deepseek2"])
def test_a_kernel_that_runs_twice_leaves_what_it_left_once_unless_it_adds(family: str) -> None:
    """E-37."""
    driver = fused_driver(family_model(family), triton_kernels(TUNED))
    driver.admit(1, PROMPT, most=2)
    driver.run()
    driver.runner.decode_mode.exit()
    plan = driver.runner.plan
    driver.runner.tables.table["n_rows"].fill_(1)
    added = []
    for node in plan.nodes:
        written = [plan.buffer(name).tensor for name in node.writes]
        node.run()
        if "x" in node.reads and "x" in node.writes:
            added.append(node.kind)
            continue
        once = [tensor.clone() for tensor in written]
        node.run()
        assert all(torch.equal(a, b) for a, b in zip(once, written, strict=True)), node.name
    assert set(added) == {"out", "down"}
    driver.runner.close()


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT, *LATENT])
def test_every_family_binds_its_kernels_in_bfloat16(family: str) -> None:
    """E-1: the gate of launches refuses an operand of another type than its kernel reads."""
    fused_driver(family_model(family, dtype=torch.bfloat16), triton_kernels(TUNED)).runner.close()


def test_a_node_that_adds_to_the_residual_stream_leaves_what_the_next_norm_needs() -> None:
    """E-75: nothing that a product takes in is older than the stream it was made of."""
    for family in FAMILIES + LATENT:
        driver, is_old = fused_driver(family_model(family), twin_kernels()), False
        for node in driver.runner.plan.nodes:
            assert not ("stats" in node.reads and is_old), f"{family} {node.name}"
            if "x" in node.writes:
                is_old = "stats" not in node.writes
        driver.runner.close()


@pytest.mark.parametrize("step", ["twin", "loop", "fused"])
def test_poison_in_every_buffer_between_nodes_is_not_seen(step: str) -> None:
    """E-61: a node that were missing would leave it there."""
    model = family_model("llama")
    fused = step == "fused"
    driver = fused_driver(model, twin_kernels(), n_slots=4) if fused else open_loop(model=model, mode=step)
    for name in {name for node in driver.runner.plan.nodes for name in node.writes}:
        if name != "table" and not name.startswith("memory."):
            stray(driver.runner.plan.buffer(name).tensor).view(np.uint8).fill(255)  # no number, of any width
    generation = driver.admit(2, PROMPT, most=6)
    driver.run()
    driver.runner.close()
    assert driver.tokens(generation) == alone(PROMPT, model=model, most=6)


@pytest.mark.parametrize("step", ["torch", "fused"])
def test_a_bias_of_the_head_is_added_before_a_token_is_chosen(step: str) -> None:
    """E-24."""
    plain = family_model("llama")
    assert plain.head is not None
    model = replace(plain, head=replace(plain.head, bias=3 * torch.randn(plain.shape.vocab)))
    driver = open_loop(model=model) if step == "torch" else fused_driver(model, twin_kernels())
    generation = driver.admit(0, PROMPT, most=6)
    driver.run()
    driver.runner.close()
    assert driver.tokens(generation) == by_full_forwards(model, PROMPT, 6) != alone(PROMPT, model=plain, most=6)


@pytest.mark.parametrize("fusions", [Fusions(gated=False), Fusions(ahead=False), Fusions(gated=False, ahead=False)])
def test_a_fusion_can_be_switched_off_and_the_tokens_are_the_same(fusions: Fusions) -> None:
    """E-81: of a model with biases and bfloat16 between its nodes."""
    plain = family_model("llama")
    layers = []
    for number, layer in enumerate(plain.layers):
        assert isinstance(layer, Layer)
        assert isinstance(layer.mlp, GatedMLP)
        rows = plain.shape.widest_ff * 2
        bias = torch.randn(rows, generator=torch.Generator().manual_seed(number)) / 4
        layers.append(replace(layer, mlp=replace(layer.mlp, gate_up=replace(layer.mlp.gate_up, bias=bias))))
    model = moved(replace(plain, layers=layers), CPU, torch.bfloat16)
    found = []
    for chosen in (Fusions(), fusions):
        driver = fused_driver(model, twin_kernels(), fusions=chosen)
        generation = driver.admit(0, PROMPT, most=8)
        driver.run()
        found.append((driver.tokens(generation), len(driver.runner.plan.nodes)))
        driver.runner.close()
    assert found[0][0] == found[1][0]
    assert found[1][1] - found[0][1] == (0 if fusions.gated else len(layers))
