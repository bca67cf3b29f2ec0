"""Each twin against a slower, more obvious definition of the same thing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.backends.torch.ops.activation import gated_torch
from ostinato.backends.torch.ops.attention import attention_torch
from ostinato.backends.torch.ops.experts import experts_torch, route_torch
from ostinato.backends.torch.ops.layer_norm import layer_norm_torch
from ostinato.backends.torch.ops.q8_0 import dequantize_q8_0_torch, quantize_q8_0_torch
from ostinato.backends.torch.ops.rms_norm import rms_norm_torch
from ostinato.backends.torch.ops.rope import rope_torch
from ostinato.models.shape import ExpertShape


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_scales_each_row_to_unit_rms_and_then_by_the_weight() -> None:
    x, weight = noise(3, 8), noise(8, seed=1)
    for row, out in zip(x.double(), rms_norm_torch(x, weight, 1e-6), strict=True):
        rms = math.sqrt(sum(float(v) ** 2 for v in row) / 8 + 1e-6)
        torch.testing.assert_close(out, (row / rms * weight).float())


def test_rms_norm_of_bfloat16_is_computed_wide_and_given_back_narrow() -> None:
    x = (noise(2, 64) * 100).bfloat16()
    weight = torch.ones(64).bfloat16()
    out = rms_norm_torch(x, weight, 1e-6)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, rms_norm_torch(x.float(), weight.float(), 1e-6).bfloat16())


def test_layer_norm_takes_off_the_mean() -> None:
    x, weight, bias = noise(2, 6), noise(6, seed=1), noise(6, seed=2)
    wide = x.double()
    expected = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(layer_norm_torch(x, weight, bias, 1e-5), (expected * weight + bias).float())


def test_both_pairings_of_rope_are_one_rotation_with_rows_permuted() -> None:
    x = noise(5, 2, 8)
    angles = noise(5, 4, seed=3)
    halves_to_neighbours = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    by_halves = rope_torch(x, angles.cos(), angles.sin(), "halves")
    by_neighbours = rope_torch(x[..., halves_to_neighbours], angles.cos(), angles.sin(), "neighbours")
    assert torch.equal(by_halves[..., halves_to_neighbours], by_neighbours)


def test_rope_turns_each_pair_as_a_complex_number_and_leaves_the_rest() -> None:
    x, angles = noise(3, 1, 6), noise(3, 2, seed=3)
    out = rope_torch(x, angles.cos(), angles.sin(), "neighbours")
    rotated = (
        torch.view_as_complex(x[..., :4].reshape(3, 1, 2, 2)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    torch.testing.assert_close(out[..., :4], torch.view_as_real(rotated).flatten(-2))
    assert torch.equal(out[..., 4:], x[..., 4:])


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -30.0, 2.0, 40.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_is_a_weighted_mean_of_the_cells_a_row_may_see(softcap: float | None, sinks: Tensor | None) -> None:
    rows, cells, heads, kv_heads, width = 3, 7, 4, 2, 8
    q, k, v = noise(rows, heads, width), noise(cells, kv_heads, width, seed=1), noise(cells, kv_heads, width, seed=2)
    mask = torch.rand((rows, cells), generator=torch.Generator().manual_seed(5)) < 0.6
    mask[:, 0] = True
    out = attention_torch(q, k, v, mask, scale=0.3, softcap=softcap, sinks=sinks)
    for row in range(rows):
        for head in range(heads):
            shared = head // (heads // kv_heads)
            score = (k[:, shared].double() @ q[row, head].double()) * 0.3
            if softcap is not None:
                score = (score / softcap).tanh() * softcap
            score = score.masked_fill(~mask[row], -math.inf)
            if sinks is not None:
                score = torch.cat((score, sinks[head : head + 1].double()))
            weight = score.softmax(0)[:cells]
            torch.testing.assert_close(out[row, head], (weight @ v[:, shared].double()).float(), atol=1e-5, rtol=1e-5)


def test_without_a_mask_every_row_sees_every_cell() -> None:
    q, k, v = noise(1, 2, 8), noise(5, 1, 8, seed=1), noise(5, 1, 8, seed=2)
    everything = torch.ones((1, 5), dtype=torch.bool)
    torch.testing.assert_close(
        attention_torch(q, k, v, None, scale=1.0, softcap=None),
        attention_torch(q, k, v, everything, scale=1.0, softcap=None),
    )


def test_a_row_goes_through_its_experts_and_no_others() -> None:
    rows, hidden, ff, n_experts, n_used = 6, 8, 4, 5, 2
    x, gate_up, down = (
        noise(rows, hidden),
        noise(n_experts, 2 * ff, hidden, seed=1),
        noise(n_experts, hidden, ff, seed=2),
    )
    weights, chosen = route_torch(noise(rows, n_experts, seed=3), ExpertShape(n_experts, n_used, ff, renormalise=True))
    out = experts_torch(x, gate_up, down, weights, chosen, "silu")
    for row in range(rows):
        expected = torch.zeros(hidden)
        for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
            expected += weight * (down[expert] @ gated_torch((gate_up[expert] @ x[row])[None], "silu")[0])
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)


def test_experts_give_a_row_the_same_bits_whatever_its_neighbours() -> None:
    x, gate_up, down = noise(4, 8), noise(3, 8, 8, seed=1), noise(3, 8, 4, seed=2)
    weights, chosen = route_torch(noise(4, 3, seed=3), ExpertShape(3, 2, 4, renormalise=True))
    order = torch.tensor([2, 0, 3, 1])
    together = experts_torch(x, gate_up, down, weights, chosen, "silu")
    shuffled = experts_torch(x[order], gate_up, down, weights[order], chosen[order], "silu")
    torch.testing.assert_close(shuffled, together[order], atol=1e-6, rtol=1e-5)


def test_router_weights_sum_to_one_only_where_the_model_says_so() -> None:
    scores = noise(4, 6)
    n = scores.shape[1]
    kept, _ = route_torch(scores, ExpertShape(n, 2, 4, renormalise=False))
    again, _ = route_torch(scores, ExpertShape(n, 2, 4, renormalise=True))
    torch.testing.assert_close(again.sum(-1), torch.ones(4))
    assert (kept.sum(-1) < 1).all()


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32))
@settings(max_examples=100, derandomize=True)
def test_q8_0_is_off_by_no_more_than_half_a_step(values: list[float]) -> None:
    x = torch.tensor([values])
    quants, scales = quantize_q8_0_torch(x)
    back = dequantize_q8_0_torch(quants, scales, torch.float32)
    step = float(scales[0, 0])
    # the scale itself is rounded to float16, which can cost a little over the whole range of 127 steps
    assert float((back - x).abs().max()) <= step * 0.5 + 127 * step * 2**-11 + 127 * 2**-25
