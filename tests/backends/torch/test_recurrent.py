"""The ops of recurrent layers against obvious loops, and cut anywhere: what is carried over makes up for the cut."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from ostinato.backends.torch.ops.activation import activate_torch
from ostinato.backends.torch.ops.causal_conv import causal_conv_torch
from ostinato.backends.torch.ops.delta_rule import delta_rule_torch
from ostinato.backends.torch.ops.gated_norm import gated_norm_torch
from ostinato.backends.torch.ops.selective_scan import selective_scan_torch
from ostinato.backends.torch.ops.ssd_scan import ssd_scan_torch
from ostinato.models.blocks import Decay, DeltaDecay

SEQS, ROWS = 2, 9


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def softplus(x: Tensor) -> float:
    return math.log1p(math.exp(float(x)))


class Convolution:
    """A convolution of five channels over four inputs."""

    x, weight, bias = noise(SEQS, ROWS, 5), noise(5, 4, seed=1), noise(5, seed=2)
    start = noise(SEQS, 5, 3, seed=3)

    @classmethod
    def run(cls, rows: slice, state: Tensor, n_planes: int) -> tuple[Tensor, Tensor]:
        return causal_conv_torch(cls.x[:, rows], state, cls.weight, cls.bias, n_planes)


class Selective:
    """A selective scan of four channels with three numbers each."""

    x, dt = noise(SEQS, ROWS, 4), noise(SEQS, ROWS, 4, seed=1)
    b, c = noise(SEQS, ROWS, 3, seed=2), noise(SEQS, ROWS, 3, seed=3)
    a, d, dt_bias = -noise(4, 3, seed=4).exp(), noise(4, seed=5), noise(4, seed=6)
    start = noise(SEQS, 4, 3, seed=7)

    @classmethod
    def run(cls, rows: slice, state: Tensor, n_planes: int) -> tuple[Tensor, Tensor]:
        varying = (v[:, rows] for v in (cls.x, cls.dt, cls.b, cls.c))
        return selective_scan_torch(*varying, decay=Decay(cls.a, cls.d, cls.dt_bias), state=state, n_planes=n_planes)


class Heads:
    """The scan of mamba2: four heads of three channels in two groups, five numbers for each channel."""

    x, dt = noise(SEQS, ROWS, 4, 3), noise(SEQS, ROWS, 4, seed=1)
    b, c = noise(SEQS, ROWS, 2, 5, seed=2), noise(SEQS, ROWS, 2, 5, seed=3)
    a, d, dt_bias = -noise(4, seed=4).exp(), noise(4, seed=5), noise(4, seed=6)
    limit = (0.2, 1.5)
    start = noise(SEQS, 4, 3, 5, seed=7)

    @classmethod
    def run(cls, rows: slice, state: Tensor, n_planes: int) -> tuple[Tensor, Tensor]:
        varying = (v[:, rows] for v in (cls.x, cls.dt, cls.b, cls.c))
        decay = Decay(cls.a, cls.d, cls.dt_bias)
        return ssd_scan_torch(*varying, decay=decay, dt_limit=cls.limit, state=state, n_planes=n_planes)


class Delta:
    """The gated delta rule: four value heads of three channels with two key heads, five wide."""

    q, k = noise(SEQS, ROWS, 2, 5), noise(SEQS, ROWS, 2, 5, seed=1)
    x = noise(SEQS, ROWS, 4, 3, seed=2)
    dt, beta = noise(SEQS, ROWS, 4, seed=3), noise(SEQS, ROWS, 4, seed=4)
    a, dt_bias = -noise(4, seed=5).exp(), noise(4, seed=6)
    start = noise(SEQS, 4, 3, 5, seed=7)
    tiled = False

    @classmethod
    def run(cls, rows: slice, state: Tensor, n_planes: int) -> tuple[Tensor, Tensor]:
        varying = (v[:, rows] for v in (cls.q, cls.k, cls.x, cls.dt, cls.beta))
        decay = DeltaDecay(cls.a, cls.dt_bias)
        return delta_rule_torch(*varying, decay=decay, tiled=cls.tiled, state=state, n_planes=n_planes)


class TiledDelta(Delta):
    """The same with value heads that share a key head two apart."""

    tiled = True


ALL = pytest.mark.parametrize("op", [Convolution, Selective, Heads, Delta])


def test_a_convolution_weighs_each_channels_last_inputs() -> None:
    op = Convolution
    y, _ = op.run(slice(None), op.start, 1)
    for seq in range(SEQS):
        for channel in range(5):
            line = [*op.start[seq, channel].tolist(), *op.x[seq, :, channel].tolist()]
            for i in range(ROWS):
                taps = zip(op.weight[channel].tolist(), line[i : i + 4], strict=True)
                wanted = float(op.bias[channel]) + sum(w * v for w, v in taps)
                assert float(y[seq, i, channel]) == pytest.approx(wanted, abs=1e-5)


def test_a_convolution_without_a_bias_adds_none() -> None:
    op = Convolution
    zero = torch.zeros(5)
    without = causal_conv_torch(op.x, op.start, op.weight, None, 1)[0]
    assert torch.equal(without, causal_conv_torch(op.x, op.start, op.weight, zero, 1)[0])


def test_the_selective_scan_is_a_loop_over_time_for_every_number_it_remembers() -> None:
    op = Selective
    y, planes = op.run(slice(None), op.start, 1)
    for seq in range(SEQS):
        for channel in range(4):
            state = op.start[seq, channel].double()
            for i in range(ROWS):
                step, x = softplus(op.dt[seq, i, channel] + op.dt_bias[channel]), float(op.x[seq, i, channel])
                state = torch.exp(step * op.a[channel].double()) * state + step * x * op.b[seq, i].double()
                wanted = float(state @ op.c[seq, i].double()) + float(op.d[channel]) * x
                assert float(y[seq, i, channel]) == pytest.approx(wanted, abs=1e-5)
            assert_close(planes[seq, 0, channel].double(), state, atol=1e-5, rtol=0)


def test_the_scan_by_heads_is_a_loop_over_time_with_one_decay_for_a_head() -> None:
    op = Heads
    y, planes = op.run(slice(None), op.start, 1)
    for seq in range(SEQS):
        for head in range(4):
            state, group = op.start[seq, head].double(), head // 2
            for i in range(ROWS):
                step = min(max(softplus(op.dt[seq, i, head] + op.dt_bias[head]), 0.2), 1.5)
                x = op.x[seq, i, head].double()
                grown = torch.outer(step * x, op.b[seq, i, group].double())
                state = math.exp(step * float(op.a[head])) * state + grown
                wanted = state @ op.c[seq, i, group].double() + float(op.d[head]) * x
                assert_close(y[seq, i, head].double(), wanted, atol=1e-5, rtol=0)
            assert_close(planes[seq, 0, head].double(), state, atol=1e-5, rtol=0)


@pytest.mark.parametrize("op", [Delta, TiledDelta])
def test_the_delta_rule_replaces_what_the_state_has_under_a_key(op: type[Delta]) -> None:
    y, planes = op.run(slice(None), op.start, 1)
    for seq in range(SEQS):
        for head in range(4):
            state, shared = op.start[seq, head].double(), head % 2 if op.tiled else head // 2
            for i in range(ROWS):
                q, k = op.q[seq, i, shared].double(), op.k[seq, i, shared].double()
                q, k = q / math.sqrt(float(q @ q) * 5), k / math.sqrt(float(k @ k))
                rate = softplus(op.dt[seq, i, head] + op.dt_bias[head]) * float(op.a[head])
                state = state * math.exp(rate)
                share = 1 / (1 + math.exp(-float(op.beta[seq, i, head])))
                state = state + share * torch.outer(op.x[seq, i, head].double() - state @ k, k)
                assert_close(y[seq, i, head].double(), state @ q, atol=1e-5, rtol=0)
            assert_close(planes[seq, 0, head].double(), state, atol=1e-5, rtol=0)


@ALL
@given(cuts=st.sets(st.integers(1, ROWS - 1)))
@settings(max_examples=25, derandomize=True)
def test_a_sequence_may_be_cut_anywhere(op: Any, cuts: set[int]) -> None:
    whole, planes = op.run(slice(None), op.start, 1)
    state, rows = op.start, []
    edges = [0, *sorted(cuts), ROWS]
    for start, stop in pairwise(edges):
        given_out, kept = op.run(slice(start, stop), state, 1)
        state = kept[:, 0]
        rows.append(given_out)
    assert_close(torch.cat(rows, 1), whole, atol=1e-5, rtol=0)
    assert_close(state, planes[:, 0], atol=1e-5, rtol=0)


@ALL
@pytest.mark.parametrize(("n_rows", "n_planes"), [(9, 1), (9, 4), (2, 4), (1, 4), (4, 4)])
def test_planes_are_the_states_after_the_last_rows_newest_first(op: Any, n_rows: int, n_planes: int) -> None:
    _, planes = op.run(slice(0, n_rows), op.start, n_planes)
    assert planes.shape == (SEQS, min(n_rows, n_planes), *op.start.shape[1:])
    states, state = [], op.start
    for i in range(n_rows):
        state = op.run(slice(i, i + 1), state, 1)[1][:, 0]
        states.append(state)
    for back in range(planes.shape[1]):
        assert_close(planes[:, back], states[-1 - back], atol=1e-5, rtol=0)


@ALL
def test_what_is_given_in_stays_as_it_was(op: Any) -> None:
    before = op.start.clone()
    op.run(slice(None), op.start, 2)
    assert torch.equal(op.start, before)


@ALL
def test_a_run_does_not_depend_on_its_neighbours(op: Any) -> None:
    x, start = op.x, op.start
    together, _ = op.run(slice(None), start, 1)
    alone: Any = type(
        "Alone",
        (op,),
        {name: getattr(op, name)[1:] for name in ("x", "q", "k", "dt", "beta", "b", "c") if hasattr(op, name)},
    )
    assert_close(alone.run(slice(None), start[1:], 1)[0], together[1:], atol=1e-6, rtol=0)
    assert op.x is x


def test_states_are_float32_and_rows_keep_their_dtype() -> None:
    op = Heads
    narrow = (v.bfloat16() for v in (op.x, op.dt, op.b, op.c))
    decay = Decay(op.a, op.d, op.dt_bias)
    y, planes = ssd_scan_torch(*narrow, decay=decay, dt_limit=op.limit, state=op.start, n_planes=2)
    assert (y.dtype, planes.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_gated_norm_norms_each_group_alone(norm_first: bool) -> None:
    x, gate, weight = noise(3, 8), noise(3, 8, seed=1), noise(2, 4, seed=2)
    out = gated_norm_torch(x, gate, weight, 1e-5, norm_first)
    opened = gate.double() * torch.sigmoid(gate.double())
    for row in range(3):
        for group in range(2):
            part = slice(4 * group, 4 * group + 4)
            inside = x[row, part].double() if norm_first else x[row, part].double() * opened[row, part]
            normed = inside / math.sqrt(float(inside.square().mean()) + 1e-5) * weight[group]
            wanted = normed * opened[row, part] if norm_first else normed
            assert_close(out[row, part].double(), wanted, atol=1e-6, rtol=1e-5)


def test_gelu_is_x_times_the_share_of_a_normal_below_it() -> None:
    x = noise(50) * 3
    wanted = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()]
    assert_close(activate_torch(x, "gelu"), torch.tensor(wanted), atol=1e-6, rtol=1e-5)
    assert not torch.equal(activate_torch(x, "gelu"), activate_torch(x, "gelu_tanh"))
