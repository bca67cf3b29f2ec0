"""Blocks as torch computes them: one function for each kind, over the ops of `table.py`.

What a forward remembers goes through a `ForwardState`, so a block does not know how it is kept. Shapes as in
`models/blocks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ostinato.backends.torch.ops.attend import opened
from ostinato.backends.torch.table import Ops
from ostinato.backends.torch.weight import Weight, dense_of, dtype_of
from ostinato.models.blocks import (
    MLP,
    AnyAttention,
    AnyLayer,
    Attention,
    Conv,
    DeltaMixer,
    Experts,
    GatedMLP,
    LatentAttention,
    Layer,
    Linear,
    Mamba2Mixer,
    MambaMixer,
    Mixer,
    Norm,
    PerLayerInput,
    PlainMLP,
    PostNormLayer,
    RankingHead,
    ShortConvMixer,
)
from ostinato.models.shape import AttentionShape

# What positions make of a forward's rows: cosines and sines for each kind of rope, factors of queries [rows, 1, 1].
Angles: TypeAlias = Mapping[Any, tuple[Tensor, ...]]  # by `Rope` and `QueryTemperature`


class ForwardState(Protocol):
    """What one forward reads of its sequences and leaves for the next: keys and values, and recurrent states."""

    @property
    def n_seqs(self) -> int:
        """The rows are this many runs of equal length, one after the other: what recurrent layers go through."""

    @property
    def n_planes(self) -> int:
        """How many states of each run to keep: the newest and, for roll back, those before its last tokens."""

    def attend(self, block: AnyAttention, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Append k and v, where the layer has its own, then attend each row of q to what it may see; [rows, heads,
        value_width]."""

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """The states that the runs start from, each [n_seqs, ...] as the shape says; zeros for a new sequence."""

    def keep(self, layer: int, states: tuple[Tensor, ...]) -> None:
        """The states to remember, each tensor [n_seqs, planes, ...], the newest plane first; planes may be fewer than
        n_planes where a run was shorter."""


def normed(ops: Ops, norm: Norm | None, x: Tensor) -> Tensor:
    """The rows themselves where there is no norm."""
    if norm is None:
        return x
    if norm.bias is None:
        return ops.rms_norm(x, norm.weight, norm.eps)
    return ops.layer_norm(x, norm.weight, norm.bias, norm.eps)


def _queries_and_gates(s: AttentionShape, q: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows of queries and gates [rows, width] to [rows, heads, head width] and [rows, heads, gate width]."""
    if s.gates_apart:
        queries, gates = q[:, : s.queries_width], q[:, s.queries_width :]
        return queries.view(len(q), s.n_heads, -1), gates.view(len(q), s.n_heads, -1)
    q = q.view(len(q), s.n_heads, -1)
    return (q[..., : s.head_width], q[..., s.head_width :]) if s.gated else (q, None)


def _through_heads(ops: Ops, weight: Weight | tuple[Weight, ...], x: Tensor) -> Tensor:
    """x [rows, heads, in], each head times its own matrix, to [rows, heads, out]. The matrices are one tensor [heads,
    out, in], packed on top of each other, or one for each head."""
    if isinstance(weight, tuple):
        return torch.stack([ops.linear(x[:, head], own, None) for head, own in enumerate(weight)], 1)
    whole = weight.to(x.dtype) if isinstance(weight, Tensor) else dense_of(weight, x.dtype)
    return torch.einsum("rhi,hoi->rho", x, whole.view(x.shape[1], -1, x.shape[2]))


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def through_linear(ops: Ops, linear: Linear, x: Tensor) -> Tensor:
    y = ops.linear(x, linear.weight, linear.bias)
    return y if linear.scale is None else y * linear.scale


def through_mlp(ops: Ops, mlp: MLP, x: Tensor, came: Tensor | None = None) -> Tensor:
    """`came`: what came to the layer, before the norm that made x of it; experts may have norms of their own."""
    match mlp:
        case GatedMLP():
            return through_linear(ops, mlp.down, ops.gated(through_linear(ops, mlp.gate_up, x), mlp.activation))
        case PlainMLP():
            return through_linear(ops, mlp.down, ops.activate(through_linear(ops, mlp.up, x), mlp.activation))
        case Experts():
            return _through_experts(ops, mlp, x, came)


def _through_experts(ops: Ops, mlp: Experts, x: Tensor, came: Tensor | None) -> Tensor:
    shape, norms = mlp.experts, mlp.norms
    if norms is None:
        to_router = to_experts = x
    else:
        assert came is not None
        to_router, to_experts = normed(ops, norms.router, came), normed(ops, norms.experts, came)
    scores = through_linear(ops, mlp.router, to_router)
    shares, chosen = ops.route(scores, shape, mlp.choice_bias, mlp.share_scales)
    given = to_experts if mlp.into_latent is None else through_linear(ops, mlp.into_latent, to_experts)
    biases = {"gate_up_bias": mlp.gate_up_bias, "down_bias": mlp.down_bias}
    y = ops.experts(given, mlp.gate_up, mlp.down, shares, chosen, mlp.activation, gated=shape.gated, **biases)
    y = y if mlp.out_of_latent is None else through_linear(ops, mlp.out_of_latent, y)
    y = y if norms is None else normed(ops, norms.after_experts, y)
    if mlp.shared is None:
        return y
    beside = through_mlp(ops, mlp.shared, x)
    beside = beside if norms is None else normed(ops, norms.after_shared, beside)
    return y + (beside * scores[:, -1:].float().sigmoid().to(x.dtype) if shape.shared_gate else beside)


def ranked(ops: Ops, head: RankingHead, pooled: Tensor) -> Tensor:
    inside = pooled
    if head.dense is not None:
        inside = through_linear(ops, head.dense, pooled)
        inside = torch.tanh(inside) if head.activation == "tanh" else ops.activate(inside, head.activation)
    inside = inside if head.norm is None else normed(ops, head.norm, inside)
    return inside if head.out is None else through_linear(ops, head.out, inside)


@dataclass(frozen=True, slots=True)
class Forward:
    """The rows of one forward, passed from layer to layer."""

    ops: Ops
    angles: Angles
    memory: ForwardState
    per_layer: Tensor | None = None  # [rows, n_layers, per_layer_width], where layers have an input of their own

    def layer(self, layer: AnyLayer, x: Tensor) -> Tensor:
        """Rows [rows, hidden] to rows of the same shape."""
        ops = self.ops
        match layer:
            case Layer(mlp=mlp, parallel=True) if mlp is not None:
                inside = normed(ops, layer.attention_norm, x)
                thought = through_mlp(ops, mlp, normed(ops, layer.mlp_norm, x) if layer.mlp_norm else inside)
                return (x + self._mixed(layer, inside)) + thought
            case Layer():
                if layer.attention is not None or layer.mixer is not None:
                    x = x + normed(ops, layer.after_attention, self._mixed(layer, normed(ops, layer.attention_norm, x)))
                if layer.mlp is not None:
                    inner = through_mlp(ops, layer.mlp, normed(ops, layer.mlp_norm, x), x)
                    x = x + normed(ops, layer.after_mlp, inner)
                if layer.per_layer is not None:
                    x = x + self._per_layer(layer.per_layer, x)
                return x if layer.out_scale is None else x * layer.out_scale.to(x.dtype)
            case PostNormLayer():
                x = normed(ops, layer.attention_norm, x + self.attention(layer.attention, x))
                return normed(ops, layer.mlp_norm, x + through_mlp(ops, layer.mlp, x))

    def _per_layer(self, block: PerLayerInput, x: Tensor) -> Tensor:
        assert self.per_layer is not None
        gate = self.ops.activate(through_linear(self.ops, block.gate, x), block.activation)
        return normed(self.ops, block.norm, through_linear(self.ops, block.out, gate * self.per_layer[:, block.layer]))

    def _mixed(self, layer: Layer, x: Tensor) -> Tensor:
        """What attention, a mixer or both make of rows."""
        mixed = None if layer.mixer is None else self.mixer(layer.mixer, _scaled(x, layer.mixer_in))
        if layer.attention is None:
            assert mixed is not None
            return mixed
        given = _scaled(x, layer.attention_in)
        attention = layer.attention
        if isinstance(attention, LatentAttention):
            seen = self.latent_attention(attention, given)
        else:
            seen = self.attention(attention, given)
        return seen if mixed is None else mixed + seen

    def attention(self, block: Attention, x: Tensor) -> Tensor:
        s, ops = block.shape, self.ops
        queries, keys, values = s.qkv_widths
        q, k, v = torch.split(through_linear(ops, block.qkv, x), [queries, keys, values], -1)
        q, gate = _queries_and_gates(s, q)
        k, v = k.view(len(x), keys // s.head_width, s.head_width), v.view(len(x), keys // s.head_width, s.value_width)
        v = normed(ops, block.v_norm, v)
        if s.qk_norm != "after_rope":
            q, k = self._qk_normed(block, q, k)
        if s.rope is not None:
            q, k = (ops.rope(heads, *self.angles[s.rope], s.rope.pairing) for heads in (q, k))
        if s.qk_norm == "after_rope":
            q, k = self._qk_normed(block, q, k)
        if s.temperature is not None:
            (factor,) = self.angles[s.temperature]
            q = q * factor.to(q.dtype)
        seen = self.memory.attend(block, q, *((k, v) if s.kv_from is None else (None, None)))
        seen = seen if gate is None else seen * opened(gate, s.gate_activation)
        return through_linear(ops, block.out, seen.flatten(1))

    def latent_attention(self, block: LatentAttention, x: Tensor) -> Tensor:
        s, ops, n = block.shape, self.ops, len(x)
        latent = s.latent
        assert latent is not None
        inside = x if block.q_a is None else normed(ops, block.q_a_norm, through_linear(ops, block.q_a, x))
        q = through_linear(ops, block.q_b, inside).view(n, s.n_heads, -1)
        plain, turned = q[..., : latent.plain_width], q[..., latent.plain_width :]
        row, key = torch.split(through_linear(ops, block.kv_a, x), [latent.kv_rank, s.head_width - latent.kv_rank], -1)
        q = torch.cat((turned, _through_heads(ops, block.k_b, plain)), -1)
        k = torch.cat((key, normed(ops, block.kv_a_norm, row)), -1).unsqueeze(1)
        if s.rope is not None:
            q, k = (ops.rope(heads, *self.angles[s.rope], s.rope.pairing) for heads in (q, k))
        seen = self.memory.attend(block, q, k, k[..., -s.value_width :])
        expanded = _through_heads(ops, block.v_b, seen)
        return through_linear(ops, block.out, expanded.flatten(1))

    def _qk_normed(self, block: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Heads of queries and of keys [rows, heads, width], normed where the family does: each, or a row's as one."""
        if block.shape.qk_norm != "rows":
            return normed(self.ops, block.q_norm, q), normed(self.ops, block.k_norm, k)
        rows = normed(self.ops, block.q_norm, q.flatten(1)), normed(self.ops, block.k_norm, k.flatten(1))
        return rows[0].view(q.shape), rows[1].view(k.shape)

    def mixer(self, mixer: Mixer, x: Tensor) -> Tensor:
        """Rows [rows, hidden] to rows, with the past in memory."""
        rows = through_linear(self.ops, mixer.into, x.to(dtype_of(mixer.into.weight)))
        runs = rows.view(self.memory.n_seqs, -1, rows.shape[-1])
        match mixer:
            case MambaMixer():
                return self._mamba(mixer, runs)
            case Mamba2Mixer():
                return self._mamba2(mixer, runs)
            case ShortConvMixer():
                return self._short_conv(mixer, runs)
            case DeltaMixer():
                return self._delta_net(mixer, runs)

    def _mamba(self, mixer: MambaMixer, runs: Tensor) -> Tensor:
        s, ops, memory = mixer.shape, self.ops, self.memory
        conv_state, scan_state = memory.states(mixer.layer)
        u, gate = runs.chunk(2, -1)
        u, conv_planes = self._conv(mixer.conv, u, conv_state)
        parts = torch.split(through_linear(ops, mixer.select, u), [s.dt_rank, s.state, s.state], -1)
        if mixer.norms is not None:
            parts = tuple(normed(ops, norm, part) for norm, part in zip(mixer.norms, parts, strict=True))
        dt, b, c = parts
        step = through_linear(ops, mixer.step, dt)
        scan = {"decay": mixer.decay, "state": scan_state, "n_planes": memory.n_planes}
        y, scan_planes = ops.selective_scan(u, step, b, c, **scan)
        memory.keep(mixer.layer, (conv_planes, scan_planes))
        return through_linear(ops, mixer.out, (y * ops.activate(gate, "silu")).flatten(0, 1))

    def _mamba2(self, mixer: Mamba2Mixer, runs: Tensor) -> Tensor:
        s, ops, memory = mixer.shape, self.ops, self.memory
        conv_state, scan_state = memory.states(mixer.layer)
        gate, u, dt = torch.split(runs, [s.inner, s.conv_width, s.n_heads], -1)
        u, conv_planes = self._conv(mixer.conv, u, conv_state)
        u, b, c = torch.split(u, [s.inner, s.n_groups * s.state, s.n_groups * s.state], -1)
        u, b, c = (part.view(*u.shape[:2], n, -1) for part, n in ((u, s.n_heads), (b, s.n_groups), (c, s.n_groups)))
        scan = {"decay": mixer.decay, "dt_limit": s.dt_limit, "state": scan_state, "n_planes": memory.n_planes}
        y, scan_planes = ops.ssd_scan(u, dt, b, c, **scan)
        memory.keep(mixer.layer, (conv_planes, scan_planes))
        y = y.flatten(-2)
        if mixer.norm is None:
            y = y * ops.activate(gate, "silu")
        else:
            y = ops.gated_norm(y, gate, mixer.norm, mixer.norm_eps, s.norm_first)
        return through_linear(ops, mixer.out, y.flatten(0, 1))

    def _short_conv(self, mixer: ShortConvMixer, runs: Tensor) -> Tensor:
        conv, memory = mixer.conv, self.memory
        (state,) = memory.states(mixer.layer)
        before, after, u = runs.chunk(3, -1)
        y, planes = self.ops.causal_conv(before * u, state, conv.weight, conv.bias, memory.n_planes)
        memory.keep(mixer.layer, (planes,))
        return through_linear(self.ops, mixer.out, (after * y).flatten(0, 1))

    def _delta_net(self, mixer: DeltaMixer, runs: Tensor) -> Tensor:
        s, ops, memory = mixer.shape, self.ops, self.memory
        conv_state, delta_state = memory.states(mixer.layer)
        u, gate, beta, alpha = torch.split(runs, [sum(s.conv_parts), s.inner, s.n_heads, s.n_heads], -1)
        u, conv_planes = self._conv(mixer.conv, u, conv_state)
        parts = torch.split(u, list(s.conv_parts), -1)
        widths = (s.key_width, s.key_width, s.value_width)
        q, k, v = (part.view(*u.shape[:2], -1, n) for part, n in zip(parts, widths, strict=True))
        rule = {"decay": mixer.decay, "tiled": s.tiled, "state": delta_state, "n_planes": memory.n_planes}
        y, delta_planes = ops.delta_rule(q, k, v, alpha, beta, **rule)
        memory.keep(mixer.layer, (conv_planes, delta_planes))
        y = ops.gated_norm(y, gate.view(y.shape), mixer.norm.weight.unsqueeze(0), mixer.norm.eps, True)
        return through_linear(ops, mixer.out, y.flatten(2).flatten(0, 1))

    def _conv(self, conv: Conv, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, planes = self.ops.causal_conv(x, state, conv.weight, conv.bias, self.memory.n_planes)
        return self.ops.activate(y, "silu"), planes
