"""A prompt's chunk as kernels: what it launches allocates nothing, and packed experts are multiplied as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ostinato.backends.base import ChunkPart, ChunkWant, Settled
from ostinato.backends.cuda.backend import CUDA
from ostinato.backends.cuda.chunks import BUCKETS, FusedChunks
from ostinato.backends.cuda.kernels import triton_kernels
from ostinato.backends.machine import TUNED
from ostinato.backends.memory_rows import OUTPUT_ROWS
from ostinato.backends.torch.kernels import twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.plan import tensors_of
from ostinato.backends.weights import Stack
from ostinato.lab.random_weights import random_blocks
from ostinato.models.blocks import Experts, Layer
from ostinato.models.mixtral import MIXTRAL
from ostinato.models.qwen3 import QWEN3_MOE
from ostinato.models.shape import ExpertShape
from tests.backends.cuda.packing import pack
from tests.backends.cuda.test_plan import PROMPTS, fused_driver, logits_of
from tests.backends.families import FAMILIES, LATENT, RECURRENT, family_model
from tests.engine.rig import Driver, open_loop
from tests.named_model import named_model, random_model_of

CPU = torch.device("cpu")


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """Notes every op of torch that gives back memory which was none of its inputs'."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if any(leaf.untyped_storage().data_ptr() not in given for leaf in made):
            self.seen.append(str(func))
        return out


def prefill_of(driver: Driver, *, triton: bool, buckets: tuple[int, ...] = (16, 64)) -> FusedChunks:
    runner = driver.runner
    kernels = triton_kernels(TUNED) if triton else twin_kernels()
    runner.chunks = FusedChunks(
        runner.model, runner.memory, runner.tables, runner.model.shape.vocab, kernels, buckets=buckets
    )
    return runner.chunks


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches of Triton are noted and not run: what is left is torch's."""
    from triton.runtime.interpreter import InterpretedFunction

    launched: list[str] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *args, **words: launched.append(kernel.__name__))
    return launched


PACKED = (("tiny", "q4_k_m"), ("tiny-mixtral", "q4_k_m"), ("tiny-qwen3moe", "q6_k"), ("tiny-deepseek2", "q4_k_m"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mix"), [*((family, None) for family in FAMILIES + RECURRENT + LATENT), *PACKED])
def test_no_launch_of_a_chunk_allocates(name: str, mix: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured chunk allocates would stay with its graph, once for every bucket."""
    model = family_model(name) if mix is None else named_model(name, torch.bfloat16, mix=mix)
    driver = open_loop(mode="twin", model=model, n_slots=2)
    prefill = prefill_of(driver, triton=True)
    launched = without_kernels(monkeypatch)
    for launches in prefill._launches.values():
        with Allocations() as watch:
            for launch in launches:
                launch()
        assert watch.seen == []
    assert len(launched) > 2 * len(model.layers) * 5
    driver.runner.close()


def test_memory_that_is_allocated_in_a_launch_is_noticed() -> None:
    x = torch.zeros(4)
    with Allocations() as watch:
        x.add_(1)
        x.view(2, 2)[0].copy_(torch.ones(2))
        x + 1
    assert watch.seen == ["aten.ones.default", "aten.add.Tensor"]


def test_all_buckets_share_the_memory_of_the_largest() -> None:
    driver = open_loop(mode="twin", model=named_model("tiny-mixtral", torch.bfloat16, mix="q4_0"), n_slots=2)
    one, four = (prefill_of(driver, triton=False, buckets=sizes) for sizes in ((64,), (8, 16, 32, 64)))

    def held(prefill: FusedChunks) -> int:
        own = [tensor for _, tensor in tensors_of([vars(prefill)[name] for name in sorted(vars(prefill))], "")]
        model = {tensor.data_ptr() for _, tensor in tensors_of(driver.runner.model, "")}
        return sum(t.numel() * t.element_size() for t in own if t.data_ptr() not in model)

    assert held(one) == held(four)
    driver.runner.close()


def test_outputs_have_their_room_from_their_first_use_on_and_as_much_as_is_said() -> None:
    model = named_model("tiny", torch.bfloat16)
    driver = open_loop(mode="twin", model=model, n_slots=2)
    prefill = prefill_of(driver, triton=False, buckets=BUCKETS)
    prefill._outputs.warm(prefill._x)
    part = ChunkPart([5, 6, 7], 0, [[0]], outputs=[2])
    prefill.run([replace(part, outputs=())], 64)
    assert prefill._outputs._room is None
    prefill.run([part], 64, ChunkWant("hidden"))
    room = prefill._outputs._room
    prefill.run([part], 64, ChunkWant("logits"))
    assert room is prefill._outputs._room
    held = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(room, ""))
    settled = Settled("cuda:0", "cuda", "loop", "bfloat16", "bf16", 64)
    counted = {row.name: row.n_bytes for row in CUDA.needs(model.shape, {}, settled)}
    assert held == counted[OUTPUT_ROWS]
    driver.runner.close()


# Packed experts


def small_experts(family: str, mix: str, dtype: torch.dtype) -> Model:
    """A model of odd widths with experts in that mix."""
    plain = family_model("mixtral").shape
    one_layer = replace(plain, layers=plain.layers[:1])
    shape = replace(one_layer, family=family, experts=ExpertShape(5, 2, 64, renormalise=True))
    made = MIXTRAL if family == "mixtral" else QWEN3_MOE
    return random_model_of(made, shape, dtype, mix=mix, seed=3)


def with_two_types(model: Model) -> Model:
    """Gate and up of every layer in two types: the up matrices dequantised, in float16."""
    layers, chance = [], torch.Generator().manual_seed(4)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        assert isinstance(layer.mlp, Experts)
        n, ff, hidden = layer.mlp.experts.n_experts, layer.mlp.experts.ff_width, model.shape.hidden
        blocks = random_blocks("Q5_1", n * ff, hidden, np.random.default_rng(4))
        gate = pack("Q5_1", torch.from_numpy(blocks), n * ff, hidden)
        up = (torch.randn(n * ff, hidden, generator=chance) * hidden**-0.5).half()
        layers.append(replace(layer, mlp=replace(layer.mlp, gate_up=Stack((gate, up)))))
    return replace(model, layers=layers)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mix"), [("mixtral", "q4_0"), ("qwen3moe", "q8_0")])
def test_a_step_of_kernels_multiplies_packed_experts_as_the_twins_do(family: str, mix: str) -> None:
    plain = small_experts(family, mix, torch.float32)
    for model in (plain, with_two_types(plain)):
        tokens, logits = logits_of(fused_driver(model, twin_kernels()), 2)
        fused_tokens, fused_logits = logits_of(fused_driver(model, triton_kernels(TUNED)), 2)
        assert fused_tokens == tokens
        torch.testing.assert_close(fused_logits, logits, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mix"), [("mixtral", "q5_0"), ("qwen3moe", "q4_1")])
def test_a_prompt_of_kernels_goes_through_packed_experts_as_one_of_twins_does(family: str, mix: str) -> None:
    model = small_experts(family, mix, torch.bfloat16)
    left = []
    for triton in (False, True):
        driver = open_loop(mode="twin", model=model, n_slots=3)
        prefill = prefill_of(driver, triton=triton, buckets=(8,))
        driver.admit(0, PROMPTS[0], most=1)
        driver.run()
        left.append(prefill._x[: len(PROMPTS[0])].clone())
        driver.runner.close()
    torch.testing.assert_close(left[1], left[0], rtol=3e-2, atol=3e-2 * float(left[0].abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("mix", ["q4_k_m", "q6_k", "q5_k", "q8_0"])
@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-qwen3moe", "tiny-deepseek2"])
def test_a_fused_step_of_twins_gives_nearly_the_logits_of_the_models_own_blocks(name: str, mix: str) -> None:
    """Nearly: before a product with packed weights, kernels round to bfloat16."""
    model = named_model(name, torch.float32, mix=mix)
    _, logits = logits_of(open_loop(mode="twin", model=model, n_slots=3), 2)
    _, fused_logits = logits_of(fused_driver(model, twin_kernels()), 2)
    assert bool(logits.any(-1).all())
    torch.testing.assert_close(fused_logits, logits, rtol=5e-2, atol=5e-2)
