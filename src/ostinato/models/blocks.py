"""What models are made of: norms, linears, attention, feed-forward blocks, mixers, layers, and the model over them.

Blocks are data. A leaf is what has a shape: a family makes its blocks over references to tensors of the file
(`tensors.py`), and a backend makes them once more over what it loaded (`with_leaves`). Shapes: x is [rows, hidden],
one row per token; q is [rows, heads, head_width], k [rows, kv_heads, head_width], v [rows, kv_heads, value_width].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias, TypeVar

from ostinato.models.rope import Rope
from ostinato.models.shape import (
    Activation,
    AttentionShape,
    DeltaShape,
    ExpertShape,
    Mamba2Shape,
    MambaShape,
    Shape,
    ShortConvShape,
)

Leaf: TypeAlias = Any  # a reference, or what a backend has in its place


@dataclass(frozen=True, slots=True)
class Block:
    """The base of all blocks, by which a walk recognises one."""


@dataclass(frozen=True, slots=True)
class Norm(Block):
    """RMS norm, or layer norm where there is a bias."""

    weight: Leaf
    bias: Leaf | None
    eps: float


@dataclass(frozen=True, slots=True)
class Linear(Block):
    """y = (x W^T + bias) * scale."""

    weight: Leaf  # [out, in]
    bias: Leaf | None
    scale: Leaf | float | None = None  # of what comes out, [out] or one for all


@dataclass(frozen=True, slots=True)
class Attention(Block):
    """q, k and v in one product; QK norm and rotary positions where the shape has them; output projection.

    With `AttentionShape.gated` the product gives a gate behind each query head, or all behind all of them; its sigmoid
    or softplus multiplies the head's output."""

    layer: int
    shape: AttentionShape
    qkv: Linear
    out: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: Leaf | None = None  # [n_heads], float32
    v_norm: Norm | None = None  # of each head

    @property
    def kv_layer(self) -> int:
        """The layer whose keys and values it reads: its own, or an earlier one's."""
        return self.layer if self.shape.kv_from is None else self.shape.kv_from


@dataclass(frozen=True, slots=True)
class LatentAttention(Block):
    """Multi-head latent attention (`LatentShape`) over compressed keys and values, absorbed.

    A query head is its plain part times `k_b`, behind its rotated part; what it has seen of the compressed rows is
    expanded by `v_b`."""

    layer: int
    shape: AttentionShape
    q_a: Linear | None
    q_a_norm: Norm | None
    q_b: Linear  # of each head the plain part, then the rotated one
    kv_a: Linear  # the compressed row, then the rotated part of its key
    kv_a_norm: Norm
    k_b: Leaf  # [heads, kv_rank, plain_width]; a backend may have one for each
    v_b: Leaf  # [heads, value_width, kv_rank]
    out: Linear
    sinks: Leaf | None = None  # [heads]

    @property
    def kv_layer(self) -> int:
        return self.layer


AnyAttention: TypeAlias = Attention | LatentAttention


@dataclass(frozen=True, slots=True)
class GatedMLP(Block):
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    gate_up: Linear
    down: Linear
    activation: Activation


@dataclass(frozen=True, slots=True)
class PlainMLP(Block):
    """down(act(up(x)))."""

    up: Linear
    down: Linear
    activation: Activation


@dataclass(frozen=True, slots=True)
class ExpertNorms(Block):
    """Norms of experts that stand beside a dense block: of what the router and the experts take in, each in place of
    the layer's, which is the dense block's alone; and of what each side gives, before both are added."""

    router: Norm
    experts: Norm
    after_experts: Norm
    after_shared: Norm


@dataclass(frozen=True, slots=True)
class Experts(Block):
    """A router and the experts it chooses from, each a feed-forward block with or without a gate; and beside them a
    block that every row goes through, where there is one. `ExpertShape` says how experts are chosen."""

    gate_up: Leaf  # [experts, 2 * ff_width, width]; a backend may have them on top of each other, or one for each
    down: Leaf  # [experts, width, ff_width]
    router: Linear  # [n_scores, hidden]
    experts: ExpertShape
    activation: Activation
    choice_bias: Leaf | None = None  # [experts], float32
    gate_up_bias: Leaf | None = None  # [experts, 2 * ff_width], float32
    down_bias: Leaf | None = None  # [experts, width], float32
    into_latent: Linear | None = None
    out_of_latent: Linear | None = None
    shared: GatedMLP | PlainMLP | None = None
    share_scales: Leaf | None = None  # [experts], float32
    norms: ExpertNorms | None = None  # with them there is a shared block


MLP: TypeAlias = GatedMLP | PlainMLP | Experts


@dataclass(frozen=True, slots=True)
class Conv(Block):
    """A causal convolution of each channel."""

    weight: Leaf  # [channels, kernel], float32
    bias: Leaf | None


@dataclass(frozen=True, slots=True)
class Decay(Block):
    """What the scan itself holds, float32: the decay of each state, the skip factor, and the bias of its steps."""

    a: Leaf  # negative; [channels, state] in mamba, [heads] in mamba2
    d: Leaf
    dt_bias: Leaf


@dataclass(frozen=True, slots=True)
class DeltaDecay(Block):
    """The decay of each head of a gated delta net, float32: its rate, negative, and the bias of its steps."""

    a: Leaf
    dt_bias: Leaf


@dataclass(frozen=True, slots=True)
class MambaMixer(Block):
    """in, convolution, selective scan, gate, out; step, b and c are products of the convolved input.

    Like any mixer it takes its rows as runs of equal length, and remembers two states, float32: the last inputs of the
    convolution, and what the scan carries."""

    layer: int
    shape: MambaShape
    into: Linear  # [2 * inner, hidden]: what is scanned, and its gate
    conv: Conv
    select: Linear  # [dt_rank + 2 * state, inner]
    step: Linear  # [inner, dt_rank]
    decay: Decay
    norms: tuple[Norm, ...] | None  # of step, b and c, in falcon-mamba
    out: Linear


@dataclass(frozen=True, slots=True)
class Mamba2Mixer(Block):
    """in, convolution, scan by heads, gate with or without a norm, out; the step, b and c come with the input."""

    layer: int
    shape: Mamba2Shape
    into: Linear  # [inner + conv_width + heads, hidden]: the gate; what is scanned, b and c; the step
    conv: Conv
    decay: Decay
    norm: Leaf | None  # [groups, inner / groups]
    norm_eps: float
    out: Linear


@dataclass(frozen=True, slots=True)
class ShortConvMixer(Block):
    """in, a gate, convolution, a second gate, out; no activation function."""

    layer: int
    shape: ShortConvShape
    into: Linear  # [3 * width, hidden]: the gate before the convolution, the one after it, what is convolved
    conv: Conv
    out: Linear


@dataclass(frozen=True, slots=True)
class DeltaMixer(Block):
    """in, convolution of query, key and value with silu, gated delta rule, norm of each head, gate by silu, out."""

    layer: int
    shape: DeltaShape
    into: Linear  # [conv_parts + inner + 2 * heads, hidden]: query, key, value; the gate; beta; alpha
    conv: Conv
    decay: DeltaDecay
    norm: Norm  # [value_width], of every head
    out: Linear


Mixer: TypeAlias = MambaMixer | Mamba2Mixer | ShortConvMixer | DeltaMixer


@dataclass(frozen=True, slots=True)
class PerLayerInput(Block):
    """What a layer adds of its own part of the tokens' second embedding: norm(out(act(gate(x)) * part))."""

    layer: int
    gate: Linear  # [per_layer_width, hidden]
    out: Linear  # [hidden, per_layer_width]
    norm: Norm
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Block):
    """Attention, a mixer, or both side by side, added to what came in; then a feed-forward block, added likewise.

    Either half may be absent. Norms stand before each half, after it, or both, as a family has them. Where they are
    `parallel`, both halves take in what came to the layer; without a norm of its own, the feed-forward block takes
    attention's. What came in may be wider than the weights (`Shape.wide_residual`), which a mixer allows for. In the
    end a per-layer input is added, and all is multiplied by a factor, where a family has them."""

    attention_norm: Norm | None = None  # of attention and mixer alike
    attention: AnyAttention | None = None
    attention_in: float = 1.0  # a factor on what attention takes in
    mixer: Mixer | None = None
    mixer_in: float = 1.0
    after_attention: Norm | None = None
    mlp_norm: Norm | None = None
    mlp: MLP | None = None
    after_mlp: Norm | None = None
    parallel: bool = False
    per_layer: PerLayerInput | None = None
    out_scale: Leaf | None = None  # [1], float32


@dataclass(frozen=True, slots=True)
class PostNormLayer(Block):
    """Attention and feed-forward as encoders have them: each added to what came in, and the sum normed."""

    attention: Attention
    attention_norm: Norm
    mlp: MLP
    mlp_norm: Norm


AnyLayer: TypeAlias = Layer | PostNormLayer


@dataclass(frozen=True, slots=True)
class RankingHead(Block):
    """From a pooled row to scores: an activation function of dense(x), its norm, then out; a file may lack any."""

    dense: Linear | None
    out: Linear | None
    activation: Literal["tanh", "gelu"] = "tanh"
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding(Block):
    """A second embedding, of which every layer takes a part: embedding * scale, and a product of the first one with a
    norm over each part; both added and multiplied by sqrt(1/2)."""

    embedding: Leaf  # [vocab, n_layers * per_layer_width]
    scale: float
    project: Linear  # [n_layers * per_layer_width, hidden]
    norm: Norm  # [per_layer_width]


@dataclass(frozen=True, slots=True)
class ModelBlocks(Block):
    """Tokens in, hidden rows out. A decoder's head turns the rows one asks for into logits; an encoder has none, and
    its ranking head, where there is one, turns pooled rows into scores."""

    shape: Shape
    embedding: Leaf  # [vocab, hidden]
    position_embedding: Leaf | None  # [positions, hidden], of families without rotary positions
    layers: Sequence[AnyLayer]
    norm: Norm | None
    head: Linear | None
    type_embedding: Leaf | None = None  # [types, hidden]: which of two texts a token is of
    embedding_norm: Norm | None = None
    per_layer: PerLayerEmbedding | None = None
    ranking: RankingHead | None = None
    projections: tuple[Linear, ...] = ()  # of a pooled row, one after the other
    spare: frozenset[str] = frozenset()  # tensors that a file may have besides: read elsewhere, or of no use here
    frequencies: Mapping[Rope, Leaf] = field(default_factory=dict)  # [rope sets, width / 2], once a backend has them


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(ModelBlocks):
    """Blocks whose leaves are weights: arrays, tensors, or matrices in the layout of a backend."""

    dtype: Any  # of rows between layers, as the backend names it
    device: Any

    @classmethod
    def over(cls, blocks: ModelBlocks, **more: Any) -> Self:
        """The model over loaded blocks."""
        return cls(**{field.name: getattr(blocks, field.name) for field in fields(ModelBlocks)} | more)


B = TypeVar("B", bound=Block)


def with_leaves(block: B, change: Callable[[Leaf], Leaf]) -> B:
    """The same blocks around `change` of every leaf."""
    return replace(block, **{f.name: _changed(getattr(block, f.name), change) for f in fields(block)})


def _changed(part: Any, change: Callable[[Leaf], Leaf]) -> Any:
    if isinstance(part, Block):
        return with_leaves(part, change)
    if isinstance(part, list | tuple):
        return type(part)(_changed(one, change) for one in part)
    if isinstance(part, Mapping):
        return {key: _changed(value, change) for key, value in part.items()}
    return change(part) if hasattr(part, "shape") else part


def leaves_of(part: Any) -> Iterator[Leaf]:
    """Every leaf of blocks, in order; one that stands twice comes twice."""
    if isinstance(part, Block):
        for f in fields(part):
            yield from leaves_of(getattr(part, f.name))
    elif isinstance(part, list | tuple):
        for one in part:
            yield from leaves_of(one)
    elif hasattr(part, "shape"):
        yield part
