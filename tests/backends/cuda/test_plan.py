"""The fused step against the model's own blocks, for every family: with the twins, and interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu_models import moved
from ostinato.backends.cuda.chunks import FusedChunks
from ostinato.backends.cuda.kernels import triton_kernels
from ostinato.backends.cuda.plan import ALL_FUSIONS, FusedPlan, Fusions
from ostinato.backends.machine import TUNED
from ostinato.backends.torch.kernels import Kernels, twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.plan import memory_tensors, tensors_of
from ostinato.backends.torch.start import CpuLoop
from ostinato.engine.verify import twin_logits
from ostinato.loop.mode import DecodeMode
from ostinato.loop.plan import Plan
from tests.backends.families import FAMILIES, LATENT, RECURRENT, family_model
from tests.engine.rig import Driver, open_loop

PROMPTS = ([5, 9, 2, 77, 31], list(range(1, 40)))


def fused_driver(
    model: Model,
    kernels: Kernels,
    *,
    n_slots: int = 3,
    kv_type: str = "f32",
    fusions: Fusions = ALL_FUSIONS,
    grammar_bytes: int = 0,
) -> Driver:
    """A driver whose step is the fused plan; prompts still go through the model's blocks."""
    sizes: dict[str, Any] = {"n_slots": n_slots, "kv_type": kv_type, "grammar_bytes": grammar_bytes}
    driver = open_loop(model=model, mode="twin", **sizes)
    runner = driver.runner
    runner.start.close()
    runner.plan = FusedPlan(model, runner.memory, runner.tables, model.shape.vocab, kernels, fusions).plan()
    runner.start = CpuLoop(runner.plan, runner.tables, runner.guard)
    runner.decode_mode = DecodeMode(runner.plan, runner.start, runner.tables, runner.guard)
    return driver


def logits_of(driver: Driver, most: int) -> tuple[list[list[int]], torch.Tensor]:
    generations = [driver.admit(slot, prompt, most=most) for slot, prompt in enumerate(PROMPTS)]
    driver.run()
    driver.runner.close()
    return [driver.tokens(g) for g in generations], driver.runner.plan.buffer("logits").tensor[: len(PROMPTS)].clone()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES + RECURRENT + LATENT)
def test_a_fused_step_of_twins_gives_the_logits_of_the_models_own_blocks(family: str) -> None:
    model = family_model(family)
    tokens, logits = logits_of(open_loop(model=model, mode="twin", n_slots=3), 6)
    fused_tokens, fused_logits = logits_of(fused_driver(model, twin_kernels()), 6)
    assert fused_tokens == tokens
    torch.testing.assert_close(fused_logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES + RECURRENT + LATENT)
def test_a_fused_step_of_triton_kernels_gives_the_logits_of_the_models_own_blocks(family: str) -> None:
    model = family_model(family)
    tokens, logits = logits_of(open_loop(model=model, mode="twin", n_slots=3), 2)
    fused_tokens, fused_logits = logits_of(fused_driver(model, triton_kernels(TUNED)), 2)
    assert fused_tokens == tokens
    torch.testing.assert_close(fused_logits, logits, rtol=2e-3, atol=2e-3)


def near_own_blocks_in_bfloat16(family: str, kernels: Kernels) -> None:
    """Both round the same exact logits, so they are about as far from each other as from those of the same weights in
    float32, which differs much between families."""
    model = family_model(family, dtype=torch.bfloat16)
    tokens, logits = logits_of(open_loop(model=model, mode="twin", n_slots=3, kv_type="bf16"), 2)
    _, fused_logits = logits_of(fused_driver(model, kernels, kv_type="bf16"), 2)
    wide = moved(model, torch.device("cpu"), torch.float32)
    exact = [twin_logits(wide, [*prompt, own[0]], "f32", 64)[1] for prompt, own in zip(PROMPTS, tokens, strict=True)]
    rounded = (logits - torch.tensor(np.stack(exact))).norm(dim=-1)
    assert bool(((fused_logits - logits).norm(dim=-1) < 3 * rounded).all())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES + RECURRENT + LATENT)
def test_a_fused_step_of_twins_in_bfloat16_is_as_near_to_the_models_own_blocks_as_rounding_lets_it(family: str) -> None:
    near_own_blocks_in_bfloat16(family, twin_kernels())


@pytest.mark.slow
@pytest.mark.parametrize("family", RECURRENT)
def test_a_fused_step_of_triton_kernels_in_bfloat16_is_too(family: str) -> None:
    near_own_blocks_in_bfloat16(family, triton_kernels(TUNED))


def first_tokens(driver: Driver) -> list[int]:
    for slot, prompt in enumerate(PROMPTS):
        driver.admit(slot, prompt, most=1)
    driver.run()
    driver.runner.close()
    return [entry.token for entry in driver.entries if entry.token is not None]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES + RECURRENT + LATENT)
def test_a_fused_prompt_of_twins_fills_memory_as_the_models_own_blocks_do(family: str) -> None:
    model = family_model(family)
    plain, fused = open_loop(model=model, mode="twin", n_slots=3), open_loop(model=model, mode="twin", n_slots=3)
    runner = fused.runner
    runner.chunks = FusedChunks(
        model, runner.memory, runner.tables, model.shape.vocab, twin_kernels(), buckets=(16, 32)
    )
    assert first_tokens(fused) == first_tokens(plain)
    kept, expected = (dict(memory_tensors(each.memory)) for each in (runner, plain.runner))
    assert kept
    for name, tensor in kept.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4)


def nodes_a_layer(plan: Plan) -> int:
    return sum(node.name.startswith("layer.0.") for node in plan.nodes)


@pytest.mark.parametrize(
    ("family", "most"),
    [
        *(("llama", 5), ("qwen2", 5), ("qwen3", 5), ("phi3", 5), ("gemma2", 7), ("mamba2", 5), ("mamba", 7)),
        *(("deepseek2", 10), ("deepseek2-lite", 9)),
    ],
)
def test_a_layer_has_few_nodes(family: str, most: int) -> None:
    driver = fused_driver(family_model(family), twin_kernels())
    assert nodes_a_layer(driver.runner.plan) == most
    driver.runner.close()


@pytest.mark.parametrize("family", ["llama", "deepseek2"])
def test_rows_beyond_the_living_are_not_touched(family: str) -> None:
    """E-70."""
    driver = fused_driver(family_model(family), twin_kernels())
    latent = ("latent.heads", "latent.row", "latent.expanded", "latent.low") if family in LATENT else ()
    names = ("x", "qkv", "attended", "act", "logits", *latent)
    for name in names:
        driver.runner.plan.buffer(name)._memory[1:] = float("nan")
    generation = driver.admit(0, PROMPTS[0], most=4)
    driver.run()
    assert len(driver.tokens(generation)) == 4
    assert all(bool(driver.runner.plan.buffer(name).tensor[1:].isnan().all()) for name in names)
    driver.runner.close()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "mixtral", "falcon-h1", "deepseek2"])
def test_a_plan_lists_everything_that_its_launches_use(family: str) -> None:
    """So that whatever is moved is found (I-6, E-31)."""
    driver = fused_driver(family_model(family), twin_kernels())
    plan, model = driver.runner.plan, driver.runner.model
    listed = {buffer.address for buffer in plan.buffers}
    assert all(tensor.data_ptr() in listed for _, tensor in tensors_of(model, "model"))
    driver.runner.close()
