"""The vocabulary in which a family file lists its blocks: each method takes one block's weights by name.

A family says `b.attention(layer)`, `b.gated_mlp(layer)`, `b.mamba(layer)`; names and shapes of the tensors are here,
once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ostinato.backends.cuda.packed import Packed, Stack
from ostinato.backends.tape.tape_weight import TapeWeight
from ostinato.backends.torch.table import Ops
from ostinato.models.blocks import AnyLayer, Attention, Experts, GatedMLP, Linear, Model, Norm, PlainMLP, RankingHead
from ostinato.models.recurrent import Conv, Decay, Mamba2Mixer, MambaMixer
from ostinato.models.rope import Rope
from ostinato.models.shape import ExpertShape, Mamba2Shape, MambaShape, Shape
from ostinato.models.weights import Weights


class Builder:
    """Takes the blocks of one model out of its weights."""

    def __init__(self, shape: Shape, weights: Weights, ops: Ops, context: int) -> None:
        self.shape, self.weights, self.ops, self.context = shape, weights, ops, context

    def norm(self, name: str, width: int | None = None, *, bias: bool = False) -> Norm:
        """An RMS norm, or with `bias` a layer norm, over `width` (the hidden size unless said)."""
        size = (width or self.shape.hidden,)
        # Few numbers, used in float32: they stay as exact as the file has them, whatever the model's dtype.
        weight = self.weights.take(f"{name}.weight", size, dtype=torch.float32)
        shift = self.weights.take(f"{name}.bias", size, dtype=torch.float32) if bias else None
        return Norm(self.ops, weight, shift, self.shape.norm_eps)

    def linear(
        self,
        names: str | list[str],
        outs: int | list[int],
        width: int,
        *,
        bias: bool,
        scale: Tensor | float | None = None,
    ) -> Linear:
        """One product; several names are stacked into one matrix, in order."""
        names = [names] if isinstance(names, str) else names
        outs = [outs] if isinstance(outs, int) else outs
        weight = self.weights.take_matrix([f"{n}.weight" for n in names], [(out, width) for out in outs])
        shift = self.weights.take_stacked([f"{n}.bias" for n in names], [(out,) for out in outs]) if bias else None
        return Linear(self.ops, weight, shift, scale)

    def scale(self, sizes: Sequence[int], factors: Sequence[float]) -> Tensor | float | None:
        """A factor on each part of what a product gives: none where all are 1, one number where they are alike."""
        if len(set(factors)) == 1:
            return None if factors[0] == 1 else factors[0]
        parts = [torch.full((size,), factor) for size, factor in zip(sizes, factors, strict=True)]
        return torch.cat(parts).to(device=self.weights.device, dtype=self.weights.dtype)

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
        out_bias = bias if out_bias is None else out_bias
        out_scale = self.scale([s.hidden], [s.multipliers.attention_out])
        out = self.linear(at + "attn_output", s.hidden, outs[0], bias=out_bias, scale=out_scale)
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
        s, at, m = self.shape, f"blk.{layer}.", self.shape.multipliers
        gate_scale = self.scale([s.ff_width, s.ff_width], [m.ff_gate, 1.0])
        if fused:
            weight = self.weights.take_halves(at + "ffn_up.weight", s.ff_width, s.hidden)
            bias = self.weights.take(at + "ffn_up.bias", (2 * s.ff_width,)) if s.mlp_bias else None
            gate_up = Linear(self.ops, weight, bias, gate_scale)
        else:
            both = [at + "ffn_gate", at + "ffn_up"]
            gate_up = self.linear(both, [s.ff_width, s.ff_width], s.hidden, bias=s.mlp_bias, scale=gate_scale)
        down_scale = self.scale([s.hidden], [m.ff_down])
        down = self.linear(at + "ffn_down", s.hidden, s.ff_width, bias=s.mlp_bias, scale=down_scale)
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
        if self.weights.in_tiles:
            return self._tiled_experts(at, s.experts)
        sizes = {"ffn_gate": (ff, s.hidden), "ffn_up": (ff, s.hidden), "ffn_down": (s.hidden, ff)}
        names = {part: self._expert_names(at + part, n) for part in sizes}
        for part, size in sizes.items():  # before memory is laid out: the file really holds experts of that size
            self.weights.check_experts(names[part], n, size)
        gate_up = self.weights.take_experts([names["ffn_gate"], names["ffn_up"]], n, (ff, s.hidden))
        down = self.weights.take_experts([names["ffn_down"]], n, (s.hidden, ff))
        assert isinstance(down, Tensor | Packed)  # it is one part
        router = self.linear(at + "ffn_gate_inp", n, s.hidden, bias=False)
        return Experts(self.ops, router, gate_up, down, s.experts, s.activation)

    def _tiled_experts(self, at: str, experts: ExpertShape) -> Experts:
        """Every expert by itself: the native loop multiplies with those that a row was sent to."""
        s, n, ff = self.shape, experts.n_experts, experts.ff_width
        sizes = {"ffn_gate": (ff, s.hidden), "ffn_up": (ff, s.hidden), "ffn_down": (s.hidden, ff)}
        gate, up, down = (
            self.weights.take_tiled_experts(self._expert_names(at + part, n), n, size) for part, size in sizes.items()
        )
        router = self.linear(at + "ffn_gate_inp", n, s.hidden, bias=False)
        gate_up = tuple(Stack(pair) for pair in zip(gate, up, strict=True))
        return Experts(self.ops, router, gate_up, down, experts, s.activation)

    def _expert_names(self, name: str, n: int) -> list[str]:
        """One tensor for all experts, or one for each, as the file has it."""
        whole = f"{name}_exps.weight"
        return [whole] if self.weights.has(whole) else [f"{name}.{expert}.weight" for expert in range(n)]

    def mamba(self, layer: int) -> MambaMixer:
        s, at, m = self.shape, f"blk.{layer}.", self.shape.recurrent
        assert isinstance(m, MambaShape)
        return MambaMixer(
            self.ops,
            layer,
            m,
            into=self.linear(at + "ssm_in", 2 * m.inner, s.hidden, bias=m.bias),
            conv=self._conv(at, m.inner, m.kernel, bias=m.conv_bias),
            select=self.linear(at + "ssm_x", m.dt_rank + 2 * m.state, m.inner, bias=False),
            step=self.linear(at + "ssm_dt", m.inner, m.dt_rank, bias=False),
            decay=self._decay(at, (m.inner, m.state), m.inner),
            norms=None if m.norm_eps is None else self._plain_norms([m.dt_rank, m.state, m.state], m.norm_eps),
            out=self.linear(at + "ssm_out", s.hidden, m.inner, bias=m.bias),
        )

    def mamba2(self, layer: int) -> Mamba2Mixer:
        s, at, m = self.shape, f"blk.{layer}.", self.shape.recurrent
        assert isinstance(m, Mamba2Shape)
        parts = [m.inner, m.inner, m.n_groups * m.state, m.n_groups * m.state, m.n_heads]
        in_scale = self.scale(parts, s.multipliers.mixer_parts)
        out_scale = self.scale([s.hidden], [s.multipliers.mixer_out])
        norm_size = (m.n_groups, m.inner // m.n_groups)
        return Mamba2Mixer(
            self.ops,
            layer,
            m,
            into=self.linear(at + "ssm_in", sum(parts), s.hidden, bias=m.in_bias, scale=in_scale),
            conv=self._conv(at, m.conv_width, m.kernel, bias=m.conv_bias),
            decay=self._decay(at, (m.n_heads,), m.n_heads),
            norm=self.weights.take(at + "ssm_norm.weight", norm_size, dtype=torch.float32) if m.gated_norm else None,
            norm_eps=s.norm_eps,
            out=self.linear(at + "ssm_out", s.hidden, m.inner, bias=m.out_bias, scale=out_scale),
        )

    def _conv(self, at: str, channels: int, kernel: int, *, bias: bool) -> Conv:
        weight = self.weights.take(at + "ssm_conv1d.weight", (channels, kernel), dtype=torch.float32)
        shift = self.weights.take(at + "ssm_conv1d.bias", (channels,), dtype=torch.float32) if bias else None
        return Conv(self.ops, weight, shift)

    def _decay(self, at: str, a_size: tuple[int, ...], channels: int) -> Decay:
        a = self.weights.take(at + "ssm_a", a_size, dtype=torch.float32)
        d = self.weights.take(at + "ssm_d", (channels,), dtype=torch.float32)
        return Decay(a, d, self.weights.take(at + "ssm_dt.bias", (channels,), dtype=torch.float32))

    def _plain_norms(self, widths: list[int], eps: float) -> tuple[Norm, ...]:
        """RMS norms that have no weight of their own."""
        return tuple(Norm(self.ops, self.weights.empty(width).fill_(1), None, eps) for width in widths)

    def ranking(self, n_classes: int) -> RankingHead:
        """The layers of a ranking head that the file has, `cls` and `cls.output`."""
        hidden = self.shape.hidden
        has_dense, has_out = (self.weights.has(f"{name}.weight") for name in ("cls", "cls.output"))
        biased = {name: self.weights.has(f"{name}.bias") for name in ("cls", "cls.output")}
        width = hidden if has_out else n_classes
        dense = self.linear("cls", width, hidden, bias=biased["cls"]) if has_dense else None
        out = self.linear("cls.output", n_classes, hidden, bias=biased["cls.output"]) if has_out else None
        return RankingHead(dense, out)

    def model(self, layers: Sequence[AnyLayer], norm: Norm, *, positions: Tensor | None = None) -> Model:
        """A decoder: the embedding, the layers, the last norm, and a head: its own, or the embedding again."""
        s, w = self.shape, self.weights
        embedding = w.take_matrix(["token_embd.weight"], [(s.vocab, s.hidden)])
        assert not isinstance(embedding, Stack | TapeWeight)  # it is one tensor of a file
        scale = self.scale([s.vocab], [s.multipliers.head])
        head_bias = w.has("output.bias")  # neither format states it: the file has one or not
        if s.tied_head:
            shift = w.take("output.bias", (s.vocab,)) if head_bias else None
            head = Linear(self.ops, embedding, shift, scale)
            w.pass_over("output.weight")  # some files repeat the embedding under this name
        else:
            head = self.linear("output", s.vocab, s.hidden, bias=head_bias, scale=scale)
        for factors in ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"):
            w.pass_over(factors)  # read with the shape
        return Model(s, self.ops, embedding, positions, layers, norm, head, self._frequencies(), dtype=w.dtype)

    def encoder(self, layers: Sequence[AnyLayer], *, positions: Tensor | None) -> Model:
        """An encoder: embeddings of token, text and place, their norm, the layers; a head where it is made to rank."""
        s, w = self.shape, self.weights
        embedding = w.take("token_embd.weight", (s.vocab, s.hidden))
        types = None
        if w.has("token_types.weight"):
            types = w.take("token_types.weight", (w.rows("token_types.weight"), s.hidden))
        ranking = None if s.n_classes is None else self.ranking(s.n_classes)
        return Model(
            s,
            self.ops,
            embedding,
            positions,
            layers,
            norm=None,
            head=None,
            frequencies=self._frequencies(),
            dtype=w.dtype,
            type_embedding=types,
            embedding_norm=self.norm("token_embd_norm", bias=True),
            ranking=ranking,
        )

    def _frequencies(self) -> dict[Rope, Tensor]:
        kinds = [rope for rope in dict.fromkeys(self.shape.ropes) if rope is not None]
        return {rope: rope.frequencies(self.context).to(self.weights.device) for rope in kinds}
