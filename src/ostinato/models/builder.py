"""The vocabulary in which a family file lists its blocks: each method names one block's tensors.

A family says `b.attention(layer)`, `b.gated_mlp(layer)`, `b.mixer(layer)`; names and shapes of the tensors are here,
once. Nothing is read: blocks are made over references (`tensors.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Literal, Protocol, TypeAlias

from ostinato.errors import InternalError
from ostinato.models.blocks import (
    MLP,
    AnyAttention,
    AnyLayer,
    Attention,
    Conv,
    Decay,
    DeltaDecay,
    DeltaMixer,
    Experts,
    GatedMLP,
    LatentAttention,
    Layer,
    Linear,
    Mamba2Mixer,
    MambaMixer,
    Mixer,
    ModelBlocks,
    Norm,
    PerLayerEmbedding,
    PerLayerInput,
    PlainMLP,
    RankingHead,
    ShortConvMixer,
)
from ostinato.models.shape import (
    AttentionShape,
    DeltaShape,
    ExpertShape,
    LatentShape,
    Mamba2Shape,
    MambaShape,
    Shape,
    ShortConvShape,
)
from ostinato.models.tensors import (
    Constant,
    ExpertBiases,
    ExpertMatrices,
    HeadMatrices,
    Matrices,
    Sizes,
    StackedTensors,
)

NormBias: TypeAlias = bool | Literal["zero"]  # with "zero", a layer norm without a bias
# Read with the shape, where a file has them.
ROPE_FACTORS = frozenset({"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"})


class Names(Protocol):
    """What a family may ask of a file: neither format states everything."""

    def has(self, name: str) -> bool: ...

    def rows(self, name: str) -> int:
        """The outermost size of a tensor."""


class Builder:
    """Makes the blocks of one model."""

    def __init__(self, shape: Shape, names: Names) -> None:
        self.shape, self.names = shape, names

    def tensor(self, name: str, *sizes: int, exact: bool = False) -> StackedTensors:
        """One tensor of the file as it is. `exact`: few numbers, used in float32, whatever the model's dtype."""
        return StackedTensors((name,), (sizes,), exact)

    def norm(self, name: str, width: int | None = None, *, bias: NormBias = False, eps: float | None = None) -> Norm:
        """An RMS norm, or with `bias` a layer norm, over `width` (the hidden size unless said)."""
        size, eps = width or self.shape.hidden, eps or self.shape.norm_eps
        weight = self.tensor(f"{name}.weight", size, exact=True)
        if bias == "zero":
            return Norm(weight, Constant((size,), (0.0,), exact=True), eps)
        shift = self.tensor(f"{name}.bias", size, exact=True) if bias else None
        return Norm(weight, shift, eps)

    def unit_norm(self, width: int) -> Norm:
        """An RMS norm without weights."""
        return Norm(Constant((width,), (1.0,), exact=True), None, self.shape.norm_eps)

    def linear(
        self,
        names: str | Sequence[str],
        outs: int | Sequence[int],
        width: int,
        *,
        bias: bool,
        scale: Constant | float | None = None,
        halves: bool = False,
        unbiased: str | None = None,
    ) -> Linear:
        """One product; several names are stacked into one matrix, in order. `unbiased`: the one that has no bias."""
        names = (names,) if isinstance(names, str) else tuple(names)
        outs = (outs,) if isinstance(outs, int) else tuple(outs)
        shapes: tuple[Sizes, ...] = tuple((out, width) for out in outs)
        weight = Matrices(tuple(f"{n}.weight" for n in names), shapes, halves=halves)
        return Linear(weight, _biases(names, outs, unbiased) if bias else None, scale)

    def scale(self, sizes: Sequence[int], factors: Sequence[float]) -> Constant | float | None:
        """A factor on each part of what a product gives: none where all are 1, one number where they are alike."""
        if len(set(factors)) == 1:
            return None if factors[0] == 1 else factors[0]
        return Constant(tuple(sizes), tuple(factors))

    def layer(
        self,
        layer: int,
        *,
        mlp: "Callable[[Builder, int], MLP] | None" = None,
        norm_bias: NormBias = False,
        before: bool = True,
        sandwich: bool = False,
        one_norm: bool = False,
        **attention: bool,
    ) -> Layer:
        """The parts that the shape gives a layer: attention, a mixer, feed-forward, each half behind a norm; llama's
        unless said. `sandwich`: a norm after each half, too; without `before`, that one alone; `one_norm`: of a
        parallel layer, for both. Further words are those of `attention`."""
        s, at, own = self.shape, f"blk.{layer}.", self.shape.layers[layer]
        mixes, after_eps = own.attention is not None or own.recurrent is not None, s.after_norm_eps
        feeds = own.ff_width > 0 or (s.experts is not None and layer not in s.experts.dense_layers)
        return Layer(
            attention_norm=self.norm(at + "attn_norm", bias=norm_bias) if mixes and before else None,
            attention=self._any_attention(layer, own.attention, **attention),
            attention_in=s.multipliers.attention_in,
            mixer=None if own.recurrent is None else self.mixer(layer),
            mixer_in=s.multipliers.mixer_in,
            after_attention=self.norm(at + "post_attention_norm", eps=after_eps) if mixes and sandwich else None,
            mlp_norm=self.norm(at + "ffn_norm", bias=norm_bias) if feeds and before and not one_norm else None,
            mlp=(mlp or Builder.mlp)(self, layer) if feeds else None,
            parallel=s.parallel,
            after_mlp=self.norm(at + "post_ffw_norm", eps=after_eps) if feeds and sandwich else None,
        )

    def _any_attention(self, layer: int, own: AttentionShape | None, **words: bool) -> AnyAttention | None:
        if own is None:
            return None
        return self.attention(layer, **words) if own.latent is None else self.latent_attention(layer)

    def attention(
        self,
        layer: int,
        *,
        qk_norm: bool = False,
        fused: bool = False,
        out_bias: bool | None = None,
    ) -> Attention:
        """`fused`: the file keeps q, k and v as one tensor already. Biases, gates and norms of values as the shape
        says."""
        s, at, bias, own = self.shape, f"blk.{layer}.", self.shape.attention_bias, self.shape.layers[layer].attention
        assert own is not None
        into: tuple[int, ...] = own.qkv_widths
        if fused:
            qkv = self.linear(at + "attn_qkv", sum(into), s.hidden, bias=bias)
        else:
            names = ["attn_q", "attn_k", "attn_k" if own.values_from_keys else "attn_v"]
            if own.gates_apart:
                names = ["attn_q", "attn_gate", *names[1:]]
                into = (own.queries_width, into[0] - own.queries_width, *into[1:])
            if own.kv_from is not None:
                names, into = names[:-2], into[:-2]
            qkv = self.linear([at + name for name in names], into, s.hidden, bias=bias, unbiased=at + "attn_gate")
        out_bias = bias if out_bias is None else out_bias
        out_scale = self.scale([s.hidden], [s.multipliers.attention_out])
        out = self.linear(at + "attn_output", s.hidden, own.out_width, bias=out_bias, scale=out_scale)
        q_width, k_width = own.qkv_widths[:2] if own.qk_norm == "rows" else (own.head_width, own.head_width)
        q_norm = self.norm(at + "attn_q_norm", q_width) if qk_norm else None
        has_keys = own.kv_from is None
        k_norm = self.norm(at + "attn_k_norm", k_width) if qk_norm and has_keys else None
        v_norm = self.unit_norm(own.value_width) if own.value_norm and has_keys else None
        sinks = self.tensor(at + "attn_sinks.weight", own.n_heads, exact=True) if own.sinks else None
        return Attention(layer, own, qkv, out, q_norm, k_norm, sinks, v_norm)

    def latent_attention(self, layer: int) -> LatentAttention:
        """The matrices that expand compressed rows are two tensors, or one of both as in folders."""
        s, at, own = self.shape, f"blk.{layer}.", self.shape.layers[layer].attention
        assert own is not None
        latent, bias = own.latent, s.attention_bias
        assert latent is not None
        plain, values, rotated = latent.plain_width, latent.value_width, own.head_width - latent.kv_rank
        q_width = own.n_heads * (plain + rotated)
        k_b = HeadMatrices(at + "attn_k_b.weight", own.n_heads, (latent.kv_rank, plain))
        v_b = HeadMatrices(at + "attn_v_b.weight", own.n_heads, (values, latent.kv_rank))
        if not self.names.has(k_b.name):
            both, n = f"{at}attn_kv_b.weight", plain + values
            k_b = replace(k_b, name=both, rows=(0, plain, n), swapped=True)
            v_b = replace(v_b, name=both, rows=(plain, n, n))
        q_name = "attn_q_b" if latent.q_rank else "attn_q"
        return LatentAttention(
            layer,
            own,
            q_a=self.linear(at + "attn_q_a", latent.q_rank, s.hidden, bias=bias) if latent.q_rank else None,
            q_a_norm=self._latent_norm(at + "attn_q_a_norm", latent.q_rank, latent) if latent.q_rank else None,
            q_b=self.linear(at + q_name, q_width, latent.q_rank or s.hidden, bias=False),
            kv_a=self.linear(at + "attn_kv_a_mqa", own.head_width, s.hidden, bias=bias),
            kv_a_norm=self._latent_norm(at + "attn_kv_a_norm", latent.kv_rank, latent),
            k_b=k_b,
            v_b=v_b,
            out=self.linear(at + "attn_output", s.hidden, own.n_heads * values, bias=bias),
        )

    def _latent_norm(self, name: str, width: int, latent: LatentShape) -> Norm:
        return replace(self.norm(name, width), eps=latent.norm_eps)

    def mlp(self, layer: int) -> MLP:
        """Routed experts where the shape has them, else a gated block."""
        experts = self.shape.experts
        if experts is not None and layer not in experts.dense_layers:
            return self.experts(layer)
        return self.gated_mlp(layer)

    def gated_mlp(
        self, layer: int, *, fused: str | None = None, width: int | None = None, suffix: str = ""
    ) -> GatedMLP:
        """`fused`: the one tensor in which the file keeps gate and up. `width` and `suffix`: of a block other than the
        layer's only one."""
        s, at, m, bias = self.shape, f"blk.{layer}.", self.shape.multipliers, self.shape.mlp_bias
        ff = width or s.layers[layer].ff_width
        scale = self.scale([ff, ff], [m.ff_gate, 1.0])
        if fused is not None:
            gate_up = self.linear(at + fused, 2 * ff, s.hidden, bias=bias, scale=scale, halves=True)
        else:
            both = [at + "ffn_gate" + suffix, at + "ffn_up" + suffix]
            gate_up = self.linear(both, [ff, ff], s.hidden, bias=bias, scale=scale)
        down_scale = self.scale([s.hidden], [m.ff_down])
        down = self.linear(at + "ffn_down" + suffix, s.hidden, ff, bias=bias, scale=down_scale)
        return GatedMLP(gate_up, down, s.activation)

    def plain_mlp(self, layer: int, *, width: int | None = None, suffix: str = "") -> PlainMLP:
        s, at, ff = self.shape, f"blk.{layer}.", width or self.shape.layers[layer].ff_width
        up = self.linear(at + "ffn_up" + suffix, ff, s.hidden, bias=s.mlp_bias)
        down = self.linear(at + "ffn_down" + suffix, s.hidden, ff, bias=s.mlp_bias)
        return PlainMLP(up, down, s.activation)

    def experts(self, layer: int, *, shared_suffix: str = "_shexp") -> Experts:
        """All that the shape says of experts, the shared block included, whose tensors' names end so."""
        s, at, e = self.shape, f"blk.{layer}.", self.shape.experts
        assert e is not None
        n, width, parts = e.n_experts, e.latent_width or s.hidden, ("gate", "up") if e.gated else ("up",)
        latent = e.latent_width is not None
        router = ["ffn_gate_inp", *(["ffn_gate_inp_shexp"] if e.shared_gate else [])]
        return Experts(
            gate_up=self._inner_matrices(at, parts, n, (e.ff_width, width)),
            down=ExpertMatrices((self._expert_names(at + "ffn_down", n),), n, (width, e.ff_width)),
            router=self.linear([at + name for name in router], [n, 1][: len(router)], s.hidden, bias=e.bias),
            experts=e,
            activation=s.activation,
            choice_bias=self.tensor(at + "exp_probs_b.bias", n, exact=True) if e.choice_bias else None,
            gate_up_bias=self._inner_biases(at, parts, n, e.ff_width) if e.bias else None,
            down_bias=ExpertBiases((at + "ffn_down_exps.bias",), n, width) if e.bias else None,
            into_latent=self.linear(at + "ffn_latent_down", width, s.hidden, bias=False) if latent else None,
            out_of_latent=self.linear(at + "ffn_latent_up", s.hidden, width, bias=False) if latent else None,
            shared=self._shared(layer, e, shared_suffix),
            share_scales=self.tensor(at + "ffn_down_exps.scale", n, exact=True) if e.share_scales else None,
        )

    def _shared(self, layer: int, experts: ExpertShape, suffix: str) -> GatedMLP | PlainMLP | None:
        if not experts.shared_width:
            return None
        if not experts.gated:
            return self.plain_mlp(layer, width=experts.shared_width, suffix=suffix)
        fused = "ffn_gate_up_shexp" if self.names.has(f"blk.{layer}.ffn_gate_up_shexp.weight") else None
        return self.gated_mlp(layer, fused=fused, width=experts.shared_width, suffix=suffix)

    def _inner_matrices(self, at: str, parts: Sequence[str], n: int, size: tuple[int, int]) -> ExpertMatrices:
        """What leads into all experts: gate and up apart, or in one tensor."""
        fused = f"{at}ffn_gate_up_exps.weight"
        if self.names.has(fused):
            return ExpertMatrices(((fused,),), n, (len(parts) * size[0], size[1]), halves=True)
        return ExpertMatrices(tuple(self._expert_names(f"{at}ffn_{part}", n) for part in parts), n, size)

    def _inner_biases(self, at: str, parts: Sequence[str], n: int, width: int) -> ExpertBiases:
        fused = f"{at}ffn_gate_up_exps.bias"
        if self.names.has(fused):
            return ExpertBiases((fused,), n, len(parts) * width)
        return ExpertBiases(tuple(f"{at}ffn_{part}_exps.bias" for part in parts), n, width)

    def _expert_names(self, name: str, n: int) -> tuple[str, ...]:
        """One tensor for all experts, or one for each, as the file has it; of those that it lacks, the first alone: a
        file may state any number of them. Of a file with neither, the one tensor is what is missing."""
        whole = f"{name}_exps.weight"
        if self.names.has(whole):
            return (whole,)
        each = (f"{name}.{expert}.weight" for expert in range(n))
        names = tuple(takewhile(self.names.has, each))
        if not names and not self.names.has(f"{name}.1.weight"):
            return (whole,)
        return names if len(names) == n else (*names, f"{name}.{len(names)}.weight")

    def mixer(self, layer: int) -> Mixer:
        """Of the kind that the shape gives this layer."""
        match self.shape.layers[layer].recurrent:
            case MambaShape() as shape:
                return self.mamba(layer, shape)
            case Mamba2Shape() as shape:
                return self.mamba2(layer, shape)
            case ShortConvShape() as shape:
                return self.short_conv(layer, shape)
            case DeltaShape() as shape:
                return self.delta_net(layer, shape)
            case None:
                raise InternalError(f"layer {layer} of {self.shape.family} has no mixer")

    def mamba(self, layer: int, m: MambaShape) -> MambaMixer:
        s, at = self.shape, f"blk.{layer}."
        widths = m.dt_rank, m.state, m.state
        ones = (Constant((width,), (1.0,), exact=True) for width in widths)  # the norms have no weights
        return MambaMixer(
            layer,
            m,
            into=self.linear(at + "ssm_in", 2 * m.inner, s.hidden, bias=m.bias),
            conv=self._conv(at + "ssm_conv1d", m.inner, m.kernel, bias=m.conv_bias),
            select=self.linear(at + "ssm_x", m.dt_rank + 2 * m.state, m.inner, bias=False),
            step=self.linear(at + "ssm_dt", m.inner, m.dt_rank, bias=False),
            decay=self._decay(at, (m.inner, m.state), m.inner),
            norms=None if m.norm_eps is None else tuple(Norm(one, None, m.norm_eps) for one in ones),
            out=self.linear(at + "ssm_out", s.hidden, m.inner, bias=m.bias),
        )

    def mamba2(self, layer: int, m: Mamba2Shape) -> Mamba2Mixer:
        s, at = self.shape, f"blk.{layer}."
        parts = [m.inner, m.inner, m.n_groups * m.state, m.n_groups * m.state, m.n_heads]
        in_scale = self.scale(parts, s.multipliers.mixer_parts)
        out_scale = self.scale([s.hidden], [s.multipliers.mixer_out])
        norm_size = (m.n_groups, m.inner // m.n_groups)
        return Mamba2Mixer(
            layer,
            m,
            into=self.linear(at + "ssm_in", sum(parts), s.hidden, bias=m.in_bias, scale=in_scale),
            conv=self._conv(at + "ssm_conv1d", m.conv_width, m.kernel, bias=m.conv_bias),
            decay=self._decay(at, (m.n_heads,), m.n_heads),
            norm=self.tensor(at + "ssm_norm.weight", *norm_size, exact=True) if m.gated_norm else None,
            norm_eps=s.norm_eps,
            out=self.linear(at + "ssm_out", s.hidden, m.inner, bias=m.out_bias, scale=out_scale),
        )

    def short_conv(self, layer: int, m: ShortConvShape) -> ShortConvMixer:
        s, at = self.shape, f"blk.{layer}.shortconv."
        return ShortConvMixer(
            layer,
            m,
            into=self.linear(at + "in_proj", 3 * m.width, s.hidden, bias=m.bias),
            conv=self._conv(at + "conv", m.width, m.kernel, bias=m.bias),
            out=self.linear(at + "out_proj", s.hidden, m.width, bias=m.bias),
        )

    def delta_net(self, layer: int, m: DeltaShape) -> DeltaMixer:
        s, at = self.shape, f"blk.{layer}."
        # Query, key, value and gate; beta and alpha. A file has them apart, or each of the two in one tensor.
        parts = {"attn_qkv": sum(m.conv_parts), "attn_gate": m.inner}
        if self.names.has(at + "ssm_in.weight"):
            parts = {"ssm_in": sum(m.conv_parts) + m.inner}
        own = {"ssm_ba": 2 * m.n_heads} if self.names.has(at + "ssm_ba.weight") else {}
        parts |= own or {"ssm_beta": m.n_heads, "ssm_alpha": m.n_heads}
        return DeltaMixer(
            layer,
            m,
            into=self.linear([at + name for name in parts], list(parts.values()), s.hidden, bias=False),
            conv=self._conv(at + "ssm_conv1d", sum(m.conv_parts), m.kernel, bias=False),
            decay=DeltaDecay(*(self.tensor(at + name, m.n_heads, exact=True) for name in ("ssm_a", "ssm_dt.bias"))),
            norm=self.norm(at + "ssm_norm", m.value_width),
            out=self.linear(at + "ssm_out", s.hidden, m.inner, bias=False),
        )

    def _conv(self, name: str, channels: int, kernel: int, *, bias: bool) -> Conv:
        weight = self.tensor(f"{name}.weight", channels, kernel, exact=True)
        return Conv(weight, self.tensor(f"{name}.bias", channels, exact=True) if bias else None)

    def _decay(self, at: str, a_size: Sizes, channels: int) -> Decay:
        a = self.tensor(at + "ssm_a", *a_size, exact=True)
        d = self.tensor(at + "ssm_d", channels, exact=True)
        return Decay(a, d, self.tensor(at + "ssm_dt.bias", channels, exact=True))

    def ranking(self, n_classes: int) -> RankingHead:
        """The layers of a ranking head that the file has, `cls` and `cls.output`."""
        hidden, has = self.shape.hidden, self.names.has
        has_dense, has_out = (has(f"{name}.weight") for name in ("cls", "cls.output"))
        width = hidden if has_out else n_classes
        dense = self.linear("cls", width, hidden, bias=has("cls.bias")) if has_dense else None
        out = self.linear("cls.output", n_classes, hidden, bias=has("cls.output.bias")) if has_out else None
        norm = self.norm("cls.norm", bias=has("cls.norm.bias") or "zero") if has("cls.norm.weight") else None
        return RankingHead(dense, out, "gelu" if has("cls.norm.weight") else "tanh", norm)

    def projections(self) -> tuple[Linear, ...]:
        """What a pooled row goes through: `dense_2`, `dense_3` and on, as the model and the pooling come before."""
        widths, made = (self.shape.hidden, *self.shape.projections), []
        for number, (width, out) in enumerate(pairwise(widths), 2):
            made.append(self.linear(f"dense_{number}", out, width, bias=self.names.has(f"dense_{number}.bias")))
        return tuple(made)

    def model(
        self,
        layers: Sequence[AnyLayer],
        *,
        norm_bias: NormBias = False,
        learned_positions: bool = False,
        head_bias: bool | None = None,
    ) -> ModelBlocks:
        """A decoder: the embedding, the layers, the last norm, and a head: its own, or the embedding again.
        `head_bias`: unless said, the file has one or not."""
        s, norm = self.shape, self.norm("output_norm", bias=norm_bias)
        positions = self.positions() if learned_positions else None
        embedding = Matrices(("token_embd.weight",), ((s.vocab, s.hidden),))
        scale = self.scale([s.vocab], [s.multipliers.head])
        bias = self.names.has("output.bias") if head_bias is None else head_bias
        if s.tied_head:
            head = Linear(embedding, self.tensor("output.bias", s.vocab) if bias else None, scale)
            spare = ROPE_FACTORS | {"output.weight"}  # some files repeat the embedding under this name
        else:
            head, spare = self.linear("output", s.vocab, s.hidden, bias=bias, scale=scale), ROPE_FACTORS
        own_norm = self.unit_norm(s.hidden) if s.embedding_norm else None
        return ModelBlocks(s, embedding, positions, layers, norm, head, embedding_norm=own_norm, spare=spare)

    def per_layer_embedding(self) -> PerLayerEmbedding:
        s, width = self.shape, self.shape.per_layer_width
        return PerLayerEmbedding(
            Matrices(("per_layer_token_embd.weight",), ((s.vocab, s.n_layers * width),)),
            width**0.5,
            self.linear("per_layer_model_proj", s.n_layers * width, s.hidden, bias=False, scale=s.hidden**-0.5),
            self.norm("per_layer_proj_norm", width),
        )

    def per_layer_input(self, layer: int) -> PerLayerInput:
        s, at, width = self.shape, f"blk.{layer}.", self.shape.per_layer_width
        gate = self.linear(at + "inp_gate", width, s.hidden, bias=False)
        out = self.linear(at + "proj", s.hidden, width, bias=False)
        return PerLayerInput(layer, gate, out, self.norm(at + "post_norm"), s.activation)

    def positions(self) -> StackedTensors:
        return self.tensor("position_embd.weight", self.shape.context, self.shape.hidden)

    def encoder(
        self,
        layers: Sequence[AnyLayer],
        *,
        learned_positions: bool = False,
        first_norm: NormBias | None = True,
        last_norm: NormBias | None = None,
    ) -> ModelBlocks:
        """An encoder: embeddings of token, text and place, their norm, the layers, a last norm; a head where it is made
        to rank."""
        s, types = self.shape, "token_types.weight"
        return ModelBlocks(
            s,
            Matrices(("token_embd.weight",), ((s.vocab, s.hidden),)),
            self.positions() if learned_positions else None,
            layers,
            norm=None if last_norm is None else self.norm("output_norm", bias=last_norm),
            head=None,
            type_embedding=self.tensor(types, self.names.rows(types), s.hidden) if self.names.has(types) else None,
            embedding_norm=None if first_norm is None else self.norm("token_embd_norm", bias=first_norm),
            ranking=None if s.n_classes is None else self.ranking(s.n_classes),
            # A folder's pooler, without a head: trained for the next sentence, no part of a row.
            spare=frozenset({"cls.weight", "cls.bias", "cls.norm.weight"}) if s.n_classes is None else frozenset(),
        )


def _biases(names: Sequence[str], outs: Sequence[int], unbiased: str | None) -> StackedTensors:
    """The biases of stacked matrices, zeros where one has none."""
    named = tuple(f"{name}.bias" for name in names if name != unbiased)
    shapes = tuple((out,) for name, out in zip(names, outs, strict=True) if name != unbiased)
    if unbiased not in names:
        return StackedTensors(named, shapes)
    place = names.index(unbiased)
    return StackedTensors(named, shapes, zeros=(sum(outs[:place]), sum(outs[: place + 1])))
