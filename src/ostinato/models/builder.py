"""The vocabulary in which a family file lists its blocks: each method takes one block's weights by name.

A family says `b.attention(layer)`, `b.gated_mlp(layer)`; names and shapes of the tensors are here, once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ostinato.kernels.table import Ops
from ostinato.models.blocks import Attention, Experts, GatedMLP, Layer, Linear, Model, Norm, PlainMLP
from ostinato.models.shape import Shape
from ostinato.models.weights import Weights


class Builder:
    """Takes the blocks of one model out of its weights."""

    def __init__(self, shape: Shape, weights: Weights, ops: Ops, context: int) -> None:
        self.shape, self.weights, self.ops, self.context = shape, weights, ops, context

    def norm(self, name: str, width: int | None = None, *, bias: bool = False) -> Norm:
        """An RMS norm, or with `bias` a layer norm, over `width` (the hidden size unless said)."""
        size = (width or self.shape.hidden,)
        # Few numbers, used in float32: they stay as exact as the file has them, whatever the model's dtype.
        weight = self.weights.take(f"{name}.weight", size, torch.float32)
        shift = self.weights.take(f"{name}.bias", size, torch.float32) if bias else None
        return Norm(self.ops, weight, shift, self.shape.norm_eps)

    def linear(self, names: str | list[str], outs: int | list[int], width: int, *, bias: bool) -> Linear:
        """One product; several names are stacked into one matrix, in order."""
        names = [names] if isinstance(names, str) else names
        outs = [outs] if isinstance(outs, int) else outs
        weight = self.weights.take_stacked([f"{n}.weight" for n in names], [(out, width) for out in outs])
        shift = self.weights.take_stacked([f"{n}.bias" for n in names], [(out,) for out in outs]) if bias else None
        return Linear(self.ops, weight, shift)

    def attention(
        self, layer: int, *, qk_norm: bool = False, fused: bool = False, out_bias: bool | None = None
    ) -> Attention:
        """`fused`: the file keeps q, k and v as one tensor already. Biases as the shape says."""
        s, at, bias = self.shape, f"blk.{layer}.", self.shape.attention_bias
        outs = [s.n_heads * s.head_width, s.n_kv_heads * s.head_width, s.n_kv_heads * s.head_width]
        if fused:
            qkv = self.linear(at + "attn_qkv", sum(outs), s.hidden, bias=bias)
        else:
            qkv = self.linear([at + "attn_q", at + "attn_k", at + "attn_v"], outs, s.hidden, bias=bias)
        out = self.linear(at + "attn_output", s.hidden, outs[0], bias=bias if out_bias is None else out_bias)
        q_norm = self.norm(at + "attn_q_norm", s.head_width) if qk_norm else None
        k_norm = self.norm(at + "attn_k_norm", s.head_width) if qk_norm else None
        return Attention(self.ops, layer, s, qkv, out, q_norm, k_norm)

    def mlp(self, layer: int) -> Callable[[Tensor], Tensor]:
        """Routed experts where the shape has them, else a gated block."""
        experts = self.shape.experts
        if experts is not None and layer not in experts.dense_layers:
            return self.experts(layer)
        return self.gated_mlp(layer)

    def gated_mlp(self, layer: int, *, fused: bool = False) -> GatedMLP:
        """`fused`: the file keeps gate and up as one tensor, under the name of up."""
        s, at = self.shape, f"blk.{layer}."
        names: str | list[str] = at + "ffn_up" if fused else [at + "ffn_gate", at + "ffn_up"]
        outs: int | list[int] = 2 * s.ff_width if fused else [s.ff_width, s.ff_width]
        gate_up = self.linear(names, outs, s.hidden, bias=s.mlp_bias)
        down = self.linear(at + "ffn_down", s.hidden, s.ff_width, bias=s.mlp_bias)
        return GatedMLP(self.ops, gate_up, down, s.activation)

    def plain_mlp(self, layer: int) -> PlainMLP:
        s, at = self.shape, f"blk.{layer}."
        up = self.linear(at + "ffn_up", s.ff_width, s.hidden, bias=s.mlp_bias)
        down = self.linear(at + "ffn_down", s.hidden, s.ff_width, bias=s.mlp_bias)
        return PlainMLP(self.ops, up, down, s.activation)

    def experts(self, layer: int) -> Experts:
        s, at = self.shape, f"blk.{layer}."
        assert s.experts is not None
        n, ff = s.experts.n_experts, s.experts.ff_width
        gate_up, down = self.weights.empty(n, 2 * ff, s.hidden), self.weights.empty(n, s.hidden, ff)
        self._expert_parts(at + "ffn_gate", [gate_up[e, :ff] for e in range(n)], gate_up[:, :ff])
        self._expert_parts(at + "ffn_up", [gate_up[e, ff:] for e in range(n)], gate_up[:, ff:])
        self._expert_parts(at + "ffn_down", [down[e] for e in range(n)], down)
        router = self.linear(at + "ffn_gate_inp", n, s.hidden, bias=False)
        return Experts(self.ops, router, gate_up, down, s.experts, s.activation)

    def _expert_parts(self, name: str, parts: list[Tensor], whole: Tensor) -> None:
        """One tensor for all experts, or one for each, as the file has it."""
        if self.weights.has(f"{name}_exps.weight"):
            self.weights.take_into(f"{name}_exps.weight", whole)
            return
        for expert, part in enumerate(parts):
            self.weights.take_into(f"{name}.{expert}.weight", part)

    def model(self, layers: list[Layer], norm: Norm, *, positions: Tensor | None = None) -> Model:
        """The embedding, the layers, the last norm, and a head: its own, or the embedding again."""
        s, w = self.shape, self.weights
        embedding = w.take("token_embd.weight", (s.vocab, s.hidden))
        if s.tied_head:
            head = Linear(self.ops, embedding, None)
            w.pass_over("output.weight")  # some files repeat the embedding under this name
        else:
            head = self.linear("output", s.vocab, s.hidden, bias=False)
        for factors in ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"):
            w.pass_over(factors)  # read with the shape
        kinds = [rope for rope in dict.fromkeys(s.ropes) if rope is not None]
        frequencies = {rope: rope.frequencies(self.context).to(embedding.device) for rope in kinds}
        return Model(s, self.ops, embedding, positions, layers, norm, head, frequencies)
