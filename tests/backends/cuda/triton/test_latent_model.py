"""A small model with latent attention through prompts and steps of kernels, beside the model's own blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ostinato.backends.cuda.chunks import FusedChunks
from ostinato.backends.cuda.kernels import triton_kernels
from ostinato.backends.cuda.packed import Packed
from ostinato.backends.machine import TUNED
from ostinato.backends.torch.kernels import Kernels, twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.models.blocks import LatentAttention
from ostinato.models.deepseek2 import DEEPSEEK2, latent_attention
from ostinato.models.rope import Rope
from ostinato.models.shape import LatentShape, LayerShape, Shape
from tests.backends.cuda.test_plan import fused_driver
from tests.backends.families import family_model
from tests.engine.rig import Driver, open_loop
from tests.named_model import random_model_of

PROMPTS = ([5, 9, 2, 77, 31], list(range(1, 13)), [8], [3, 1, 4])
STEPS = 2


def answered(driver: Driver, prompts: dict[int, list[int]]) -> tuple[list[list[int]], Tensor]:
    """The tokens of each prompt, by slot, and the logits of the last step."""
    generations = [driver.admit(slot, prompt, most=STEPS) for slot, prompt in prompts.items()]
    driver.run()
    driver.runner.close()
    tokens = [driver.tokens(generation) for generation in generations]
    return tokens, driver.runner.plan.buffer("logits").tensor[: len(prompts)].clone()


def with_kernels(model: Model, kernels: Kernels, rows: int, kv_type: str = "f32") -> Driver:
    """Steps and prompts of kernels; a chunk has so many rows."""
    driver = fused_driver(model, kernels, n_slots=4, kv_type=kv_type)
    runner = driver.runner
    vocab = model.shape.vocab
    runner.chunks = FusedChunks(model, runner.memory, runner.tables, vocab, kernels, buckets=(rows,))
    return driver


@pytest.mark.usefixtures("sums_in_order")
def test_prompts_and_steps_give_the_models_own_logits_and_the_same_bits_alone_and_in_pieces() -> None:
    model, kernels, all_four = family_model("deepseek2"), triton_kernels(TUNED), dict(enumerate(PROMPTS))
    tokens, logits = answered(open_loop(model=model, mode="twin"), all_four)
    found, together = answered(with_kernels(model, kernels, 16), all_four)
    assert found == tokens
    torch.testing.assert_close(together, logits, rtol=2e-3, atol=2e-3)
    # The second one in pieces of five rows and in another slot.
    own, alone = answered(with_kernels(model, kernels, 5), {2: PROMPTS[1]})
    assert own == [tokens[1]]
    assert torch.equal(alone[0], together[1])


def packed_model(mix: str) -> Model:
    """With widths that are whole blocks, so that all matrices stay packed."""
    shape: Shape = family_model("deepseek2").shape
    latent = LatentShape(kv_rank=64, q_rank=32, plain_width=32, value_width=32, norm_eps=1e-6)
    attention = latent_attention(2, Rope(10_000.0, 32, "neighbours", amplitude=1.2), latent, 1.1)
    layers = (LayerShape(attention, ff_width=64),)
    assert shape.experts is not None
    experts = replace(shape.experts, ff_width=32, shared_width=32, dense_layers=frozenset())
    shape = replace(shape, layers=layers, experts=experts)
    return random_model_of(DEEPSEEK2, shape, torch.float32, mix=mix, seed=3)


def test_packed_heads_are_multiplied_as_the_twins_do() -> None:
    model, prompts = packed_model("q4_0"), {0: PROMPTS[0], 1: PROMPTS[2]}
    for layer in model.layers:
        assert isinstance(layer.attention, LatentAttention)
        assert all(isinstance(heads, Packed) for heads in (layer.attention.k_b, layer.attention.v_b))
    _, own = answered(open_loop(model=model, mode="twin"), prompts)
    (_, twins), (_, kernels) = (
        answered(with_kernels(model, made, 8, "q8_0"), prompts) for made in (twin_kernels(), triton_kernels(TUNED))
    )
    # Rows are rounded to bfloat16 before products with packed weights, and keys to eight bits.
    assert (kernels - twins).norm() < 0.04 * own.norm()
    assert (twins - own).norm() < 0.04 * own.norm()
