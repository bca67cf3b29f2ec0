"""Recurrent blocks: the mixers of mamba and mamba2, and the layers around them.

A mixer takes its rows as `memory.n_seqs` runs of equal length, starts each from the states that memory gives, and
gives back the newest. Two states: the last inputs of the convolution, and what the scan remembers; both float32.
The scans themselves are in `backends/torch/ops/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ostinato.backends.torch.table import Ops
from ostinato.models.blocks import Angles, Attention, ForwardState, Linear, Norm
from ostinato.models.shape import Mamba2Shape, MambaShape


class Mixer(Protocol):
    """Rows [rows, hidden] to rows, with the past in memory."""

    def __call__(self, x: Tensor, memory: ForwardState) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Conv:
    """A causal convolution of each channel, and silu."""

    ops: Ops
    weight: Tensor  # [channels, kernel], float32
    bias: Tensor | None

    def __call__(self, x: Tensor, state: Tensor, n_planes: int) -> tuple[Tensor, Tensor]:
        y, planes = self.ops.causal_conv(x, state, self.weight, self.bias, n_planes)
        return self.ops.activate(y, "silu"), planes


@dataclass(frozen=True, slots=True)
class Decay:
    """What the scan itself holds, float32: how fast each state fades, what skips it, and the bias of its steps."""

    a: Tensor  # negative; [channels, state] in mamba, [heads] in mamba2
    d: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, slots=True)
class MambaMixer:
    """in, convolution, selective scan, gate, out; step, b and c are products of the convolved input."""

    ops: Ops
    layer: int
    shape: MambaShape
    into: Linear  # [2 * inner, hidden]: what is scanned, and its gate
    conv: Conv
    select: Linear  # [dt_rank + 2 * state, inner]
    step: Linear  # [inner, dt_rank]
    decay: Decay
    norms: tuple[Norm, ...] | None  # of step, b and c, in falcon-mamba
    out: Linear

    def __call__(self, x: Tensor, memory: ForwardState) -> Tensor:
        s, n_planes = self.shape, memory.n_planes
        conv_state, scan_state = memory.states(self.layer)
        u, gate = self.into(x.to(self.into.dtype)).view(memory.n_seqs, -1, 2 * s.inner).chunk(2, -1)
        u, conv_planes = self.conv(u, conv_state, n_planes)
        parts = torch.split(self.select(u), [s.dt_rank, s.state, s.state], -1)
        if self.norms is not None:
            parts = tuple(norm(part) for norm, part in zip(self.norms, parts, strict=True))
        dt, b, c = parts
        decay = self.decay
        y, scan_planes = self.ops.selective_scan(
            u, self.step(dt), b, c, a=decay.a, d=decay.d, dt_bias=decay.dt_bias, state=scan_state, n_planes=n_planes
        )
        memory.keep(self.layer, (conv_planes, scan_planes))
        return self.out((y * self.ops.activate(gate, "silu")).flatten(0, 1))


@dataclass(frozen=True, slots=True)
class Mamba2Mixer:
    """in, convolution, scan by heads, gate with or without a norm, out; the step, b and c come with the input."""

    ops: Ops
    layer: int
    shape: Mamba2Shape
    into: Linear  # [inner + conv_width + heads, hidden]: the gate; what is scanned, b and c; the step
    conv: Conv
    decay: Decay
    norm: Tensor | None  # [groups, inner / groups]
    norm_eps: float
    out: Linear

    def __call__(self, x: Tensor, memory: ForwardState) -> Tensor:
        s, n_planes = self.shape, memory.n_planes
        conv_state, scan_state = memory.states(self.layer)
        runs = self.into(x.to(self.into.dtype)).view(memory.n_seqs, -1, s.inner + s.conv_width + s.n_heads)
        gate, u, dt = torch.split(runs, [s.inner, s.conv_width, s.n_heads], -1)
        u, conv_planes = self.conv(u, conv_state, n_planes)
        u, b, c = torch.split(u, [s.inner, s.n_groups * s.state, s.n_groups * s.state], -1)
        n, t = len(u), u.shape[1]
        decay = self.decay
        y, scan_planes = self.ops.ssd_scan(
            u.view(n, t, s.n_heads, -1),
            dt,
            b.view(n, t, s.n_groups, -1),
            c.view(n, t, s.n_groups, -1),
            a=decay.a,
            d=decay.d,
            dt_bias=decay.dt_bias,
            dt_limit=s.dt_limit,
            state=scan_state,
            n_planes=n_planes,
        )
        memory.keep(self.layer, (conv_planes, scan_planes))
        return self.out(self._gated(y.flatten(-2), gate).flatten(0, 1))

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        if self.norm is None:
            return y * self.ops.activate(gate, "silu")
        return self.ops.gated_norm(y, gate, self.norm, self.norm_eps, self.shape.norm_first)


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """x + mixer(norm(x)); x may be wider than the weights (`Shape.wide_residual`), which a mixer allows for."""

    norm: Norm
    mixer: Mixer

    def __call__(self, x: Tensor, angles: Angles, memory: ForwardState) -> Tensor:
        return x + self.mixer(self.norm(x), memory)


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """Attention and a mixer side by side on the same norm, each with a factor on its input; then feed-forward."""

    norm: Norm
    attention: Attention
    attention_in: float
    mixer: Mixer
    mixer_in: float
    mlp_norm: Norm
    mlp: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, angles: Angles, memory: ForwardState) -> Tensor:
        normed = self.norm(x)
        mixed = self.mixer(normed * self.mixer_in, memory)
        x = x + (mixed + self.attention(normed * self.attention_in, angles, memory))
        return x + self.mlp(self.mlp_norm(x))
