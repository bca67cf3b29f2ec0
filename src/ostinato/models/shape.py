"""What a model is, before any weight is read: sizes, windows, caps, rope, experts.

`read_shape` asks the checkpoint's family; `common_from_gguf` and `common_from_config` read what nearly every
family states alike, and a family changes by `replace` what it does differently. `docs/add-a-family.md` says how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from ostinato.errors import BadFile, Unsupported
from ostinato.files.unpack import Floats
from ostinato.models import rope as ropes
from ostinato.models.fields import Description, Fields, n_further_layers
from ostinato.models.rope import Pairing, Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu"]
ACTIVATIONS: Mapping[str, Activation] = {  # as config.json calls them
    **{"silu": "silu", "swish": "silu", "gelu": "gelu"},
    **{"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu2": "relu2"},
}
# What is normed of queries and keys: each head before its rotation, all heads of a row as one, each head after it.
QKNorm = Literal["heads", "rows", "after_rope"]
States = tuple[tuple[int, ...], ...]  # what a recurrent layer remembers of a sequence: float32 of each of these sizes


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Groups of equal size that follow each other: a row chooses only among the experts of its `n_used` best groups.
    A group is as good as its `n_best` highest scores together: 1 in DeepSeek V2, 2 in V3."""

    n_groups: int
    n_used: int
    n_best: int


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Routed experts of a layer: how many there are, how wide each is, how a row's are chosen, what stands beside them.

    A row's scores become probabilities, by softmax over all experts or by a sigmoid each. The `n_used` likeliest are
    chosen, the lower id first among equals, and a chosen expert's share is its probability. Where softmax keeps their
    order, scores are compared themselves (`by_score`): of two unlike ones the probabilities may both be 0."""

    n_experts: int
    n_used: int
    ff_width: int
    renormalise: bool  # shares of a row sum to 1; with softmax that is the softmax of the chosen scores alone
    dense_layers: frozenset[int] = frozenset()  # layers with a plain feed-forward block in their place
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    choice_bias: bool = False  # added to probabilities for the choice, not for the shares
    groups: ExpertGroups | None = None
    # What is added to the sum that renormalised shares are divided by, and how small what they are divided by may be:
    # sigmoids of very low scores are all 0.
    sum_epsilon: float = 0.0
    least_sum: float = 1e-20
    share_scale: float = 1.0  # routed scaling factor
    gated: bool = True  # false: down(act(up(x)))
    share_scales: bool = False  # each expert has a factor of its own, by which its shares are multiplied in the end
    bias: bool = False  # of the router and of the experts' products
    shared_width: int = 0  # of a feed-forward block that every row goes through besides; 0: none
    shared_gate: bool = False  # a row takes the shared block's output times the sigmoid of one more score
    latent_width: int | None = None  # experts work in a space of this width, between two products that all rows share

    @property
    def n_scores(self) -> int:
        """Rows of the router's matrix: one for each expert, and one for the shared block where that has a gate."""
        return self.n_experts + self.shared_gate

    @property
    def by_score(self) -> bool:
        return self.scoring == "softmax" and not self.choice_bias and (self.groups is None or self.groups.n_best == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape:
    """A mamba block: `inner` channels, each with `state` numbers of its own."""

    inner: int
    state: int
    kernel: int  # inputs that the convolution looks at
    dt_rank: int
    bias: bool = False  # of the products in and out
    conv_bias: bool = True
    norm_eps: float | None = None  # with it, step, b and c are normed (falcon-mamba)

    @property
    def states(self) -> States:
        return (self.inner, self.kernel - 1), (self.inner, self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    """A mamba2 block: `n_heads` heads of the `inner` channels, in groups that share b and c."""

    inner: int
    state: int
    kernel: int
    n_heads: int
    n_groups: int
    in_bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    gated_norm: bool = True  # false: a gate alone
    norm_first: bool = False  # before the gate
    dt_limit: tuple[float, float] = (0.0, math.inf)

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: what is scanned, b and c."""
        return self.inner + 2 * self.n_groups * self.state

    @property
    def states(self) -> States:
        return (self.conv_width, self.kernel - 1), (self.n_heads, self.inner // self.n_heads, self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvShape:
    """A gated short convolution over the `width` of the hidden rows."""

    width: int
    kernel: int
    bias: bool = False  # of the products in and out, and of the convolution

    @property
    def states(self) -> States:
        return ((self.width, self.kernel - 1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """A gated delta net: each of `n_heads` value heads has a matrix of states, and shares a key head with others.

    Value heads with the same key head stand side by side, or, `tiled`, `n_key_heads` apart: the same model with rows
    permuted, as each format stores them."""

    n_heads: int
    n_key_heads: int
    key_width: int
    value_width: int
    kernel: int
    tiled: bool = False

    @property
    def inner(self) -> int:
        """Channels of all value heads."""
        return self.n_heads * self.value_width

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """Channels of the convolution: query, key and value."""
        return self.n_key_heads * self.key_width, self.n_key_heads * self.key_width, self.inner

    @property
    def states(self) -> States:
        return (sum(self.conv_parts), self.kernel - 1), (self.n_heads, self.value_width, self.key_width)


RecurrentShape: TypeAlias = MambaShape | Mamba2Shape | ShortConvShape | DeltaShape


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """A query at position p is multiplied by 1 + scale * log(1 + p // span): sharper scores in long contexts."""

    scale: float
    span: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention: a position keeps one compressed row, of which keys and values of all heads come.

    The matrices that would expand it stand beside the queries and the output instead (they are absorbed), so all heads
    attend to one key: its rotated part, then the compressed row, which is the value too."""

    kv_rank: int  # of the compressed row
    q_rank: int | None  # queries are compressed too, and expanded at once; None: they are not
    plain_width: int  # of a query head: what is not rotated
    value_width: int  # of a head's values once expanded
    norm_eps: float  # of the norms of compressed rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """How a layer attends: heads, how wide they are, where it looks, and what becomes of its scores."""

    n_heads: int
    n_kv_heads: int
    head_width: int  # of a query and of a key
    value_width: int
    query_scale: float
    rope: Rope | None = None  # None: no rotary positions
    # Positions that it sees, the query's own included, in an encoder so many to each side; None: everything before it.
    window: int | None = None
    softcap: float | None = None
    qk_norm: QKNorm = "heads"  # where there are such norms
    temperature: QueryTemperature | None = None
    gated: bool = False  # beside each query head there is a gate on its output, as wide as the head unless said
    gates_apart: bool = False  # the gates of all heads stand behind all queries, else each behind its own
    one_gate: bool = False  # of gates apart: a head has one number for all of its output
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    sinks: bool = False  # each head has one more score in its softmax, a number of its own that stands for no value
    latent: LatentShape | None = None  # with it the last `value_width` numbers of a key are its value
    value_norm: bool = False  # each head of values is normed, without a weight
    values_from_keys: bool = False  # one matrix makes both, before norms and rotation
    kv_from: int | None = None  # it has queries only, and reads the keys and values of this earlier layer

    @property
    def group(self) -> int:
        """Query heads that share a key and value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Of all heads of a row: queries with their gates, keys, values."""
        queries, n_kv_heads = self.n_heads * (self.head_width + self.gate_width), self.n_own_kv_heads
        return queries, n_kv_heads * self.head_width, n_kv_heads * self.own_value_width

    @property
    def n_own_kv_heads(self) -> int:
        """0 where it reads another layer's."""
        return self.n_kv_heads if self.kv_from is None else 0

    @property
    def queries_width(self) -> int:
        """Of all query heads of a row, without their gates."""
        return self.n_heads * self.head_width

    @property
    def gate_width(self) -> int:
        """Of a head's gate; 0 where there is none."""
        return 0 if not self.gated else 1 if self.one_gate else self.head_width

    @property
    def own_value_width(self) -> int:
        """Of a value that is kept beside its key; 0 where it is a part of the key."""
        return self.value_width if self.latent is None else 0

    @property
    def qkv_width(self) -> int:
        return sum(self.qkv_widths)

    @property
    def out_width(self) -> int:
        """Of what all heads of a row have seen."""
        return self.n_heads * self.value_width


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer has: attention, a recurrent block, or both side by side; and a feed-forward block."""

    attention: AttentionShape | None = None
    recurrent: RecurrentShape | None = None
    ff_width: int = 0  # of a feed-forward block that is not made of experts; 0 where a layer has none


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Fixed factors on what goes into or comes out of a product (falcon-h1). GGUF has them in the weights already."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    mixer_in: float = 1.0
    mixer_out: float = 1.0
    # of a mixer's first product: gate, what is scanned, b, c, step
    mixer_parts: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    ff_gate: float = 1.0
    ff_down: float = 1.0
    head: float = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's sizes and settings; everything `blocks.py` needs besides the weights."""

    family: str
    hidden: int
    vocab: int
    context: int  # as trained
    norm_eps: float
    layers: tuple[LayerShape, ...]
    activation: Activation = "silu"
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    embedding_norm: bool = False  # embedded rows are normed, without weights
    after_norm_eps: float | None = None  # of norms behind blocks, where it is another one
    experts: ExpertShape | None = None
    attention_bias: bool = False
    parallel: bool = False  # attention and feed-forward take in the same row
    mlp_bias: bool = False
    tied_head: bool = False  # the head is the embedding
    causal: bool = True  # false: an encoder, every row sees every row of its sequence
    pooling: str | None = (
        None  # the model's own way to one vector: mean, cls, last, rank, none; None: no way of its own
    )
    rank_by: str = "cls"  # which row a ranking head takes
    projections: tuple[int, ...] = ()  # widths of the products that a pooled vector goes through
    normalise: bool = False  # its vectors have length 1
    n_classes: int | None = None  # a ranking head's outputs
    # Of a language model that ranks: the token whose logit is the score, and the one whose logit is subtracted from it.
    rank_tokens: tuple[int, ...] = ()
    multipliers: Multipliers = Multipliers()
    wide_residual: bool = False  # what the layers add to is float32 whatever the weights are
    per_layer_width: int = 0  # of what each layer takes in of a second embedding of the tokens; 0: there is none

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def vector_width(self) -> int:
        """Of a text's vector."""
        return self.projections[-1] if self.projections else self.hidden

    @property
    def attention(self) -> dict[int, AttentionShape]:
        """Of each layer that attends."""
        return {number: one.attention for number, one in enumerate(self.layers) if one.attention is not None}

    @property
    def kv_layers(self) -> dict[int, AttentionShape]:
        """Of each layer that keeps keys and values; the others that attend read those of one of these."""
        return {number: one for number, one in self.attention.items() if one.kv_from is None}

    @property
    def recurrent(self) -> dict[int, RecurrentShape]:
        """Of each layer that recurs; only these have states."""
        return {number: one.recurrent for number, one in enumerate(self.layers) if one.recurrent is not None}

    def widest(self, size: Callable[[AttentionShape], int]) -> int:
        """The largest of a size over the layers that attend; 0 where none does."""
        return max(map(size, self.attention.values()), default=0)

    @property
    def states(self) -> dict[int, States]:
        """What each layer that recurs remembers of a sequence."""
        return {layer: one.states for layer, one in self.recurrent.items()}

    @property
    def state_numbers(self) -> int:
        """How many numbers the states of one sequence have in all layers."""
        return sum(math.prod(size) for states in self.states.values() for size in states)

    @property
    def widest_ff(self) -> int:
        """Of the feed-forward blocks that are not made of experts; 0 where no layer has one."""
        return max((one.ff_width for one in self.layers), default=0)

    def with_layers(self, **changes: Any) -> Shape:
        """The same with these parts in every layer; a tuple has one for each."""
        each = (_of_layer(changes, number) for number in range(self.n_layers))
        return replace(self, layers=tuple(replace(layer, **own) for layer, own in zip(self.layers, each, strict=True)))

    def with_attention(self, **changes: Any) -> Shape:
        """The same with these settings of attention in every layer that attends; a tuple has one for each layer."""
        each = (_of_layer(changes, number) for number in range(self.n_layers))
        both = zip((layer.attention for layer in self.layers), each, strict=True)
        return self.with_layers(attention=tuple(one and replace(one, **own) for one, own in both))

    def with_recurrent_in(self, layers: Collection[int], recurrent: RecurrentShape) -> Shape:
        """The same with this recurrent block in place of attention in these layers."""
        changed = (
            replace(one, attention=None, recurrent=recurrent) if number in layers else one
            for number, one in enumerate(self.layers)
        )
        return replace(self, layers=tuple(changed))

    @property
    def default_context(self) -> int:
        """As trained; with longrope the range in which its short factors, made for it, hold."""
        return min(self.context, self.short_rope_positions or self.context)

    @property
    def rope_kinds(self) -> tuple[Rope, ...]:
        """Its kinds of rotary positions, each once."""
        return tuple(dict.fromkeys(one.rope for one in self.attention.values() if one.rope is not None))

    @property
    def n_pos_dims(self) -> int:
        """Dimensions of a position: 3 where rotary positions have sections for time, height and width."""
        return max((rope.n_dimensions for rope in self.rope_kinds), default=1)

    @property
    def short_rope_positions(self) -> int | None:
        """Positions of the longest sequence that longrope's short factors rotate; None without longrope."""
        return min((rope.original_context for rope in self.rope_kinds if rope.original_context), default=None)

    @property
    def n_rope_sets(self) -> int:
        """How many sets of divisors its ropes have: 2 with longrope."""
        return 1 if self.short_rope_positions is None else 2

    def frequencies(self) -> dict[Rope, Floats]:
        """Of each of its ropes, float32 [rope sets, width / 2]."""
        return {rope: ropes.frequencies_of(rope, self.n_rope_sets) for rope in self.rope_kinds}

    def rope_set(self, n_positions: int) -> int:
        """The set that rotates a sequence of so many positions: 0, or 1, longrope's long factors."""
        return int(n_positions > (self.short_rope_positions or n_positions))


def _of_layer(changes: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What changes name for one layer."""
    return {name: value[number] if isinstance(value, tuple) else value for name, value in changes.items()}


def alike(
    family: str,
    rope: Rope | None,
    *,
    n_layers: int,
    hidden: int,
    n_heads: int,
    ff_width: int,
    n_kv_heads: int | None = None,
    head_width: int | None = None,
    **more: Any,
) -> Shape:
    """A shape whose layers are alike: they see everything before them, and each head has keys and values of its own
    unless said."""
    width = head_width or max(1, hidden // n_heads)
    attention = AttentionShape(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        head_width=width,
        value_width=width,
        query_scale=width**-0.5,
        rope=rope,
    )
    return Shape(family=family, hidden=hidden, layers=(LayerShape(attention, ff_width=ff_width),) * n_layers, **more)


def sectioned(read: Callable[[Description], Shape]) -> Callable[[Description], Shape]:
    """How a family reads its shape, with the sections of rotary positions that its files state."""

    def shape(f: Description) -> Shape:
        found = read(f)
        own = (layer.attention and layer.attention.rope for layer in found.layers)
        return found.with_attention(rope=tuple(rope and ropes.with_sections(rope, f) for rope in own))

    return shape


def common_from_gguf(f: Description, pairing: Pairing = "halves") -> Shape:
    """What llama-like GGUF files state under `<architecture>.`; a list has one number for each layer, and a layer
    without key and value heads has no attention. Layers that predict further tokens are left out."""
    n_stated = limited(f.integer("block_count"), f)
    hidden, n_heads = f.integer("embedding_length"), f.per_layer("attention.head_count", n_stated)
    n_kv_heads = f.per_layer("attention.head_count_kv", n_stated, n_heads)
    head_width = f.integer("attention.key_length", max(1, hidden // max(1, *n_heads)))
    window = f.integer("attention.sliding_window", least=0) if f.has("attention.sliding_window") else 0
    usual = AttentionShape(
        n_heads=1,
        n_kv_heads=1,
        head_width=head_width,
        value_width=f.integer("attention.value_length", head_width),
        query_scale=head_width**-0.5,
        rope=with_factors(ropes.from_gguf(f, head_width, pairing), f),
        window=window or None,
    )
    attention = [
        replace(usual, n_heads=heads, n_kv_heads=kv_heads) if heads and kv_heads else None
        for heads, kv_heads in zip(n_heads, n_kv_heads, strict=True)
    ]
    n_layers = n_stated - n_further_layers(f)
    ff_widths = f.per_layer("feed_forward_length", n_stated, least=0)
    if n_layers < 1:
        raise BadFile(f"{f.path}: {n_stated - n_layers} of {n_stated} layers predict further tokens; none is left")
    return Shape(
        family=f.family,
        hidden=hidden,
        vocab=vocab_rows(f),
        context=f.integer("context_length"),
        norm_eps=f.positive("attention.layer_norm_rms_epsilon", f.positive("attention.layer_norm_epsilon", 1e-5)),
        layers=tuple(LayerShape(one, ff_width=ff) for one, ff in zip(attention, ff_widths, strict=True))[:n_layers],
        tied_head="output.weight" not in f.tensors,
    )


def common_from_config(
    c: Description,
    pairing: Pairing = "halves",
    *,
    rotary_share: float = 1.0,
    ff_key: str = "intermediate_size",
) -> Shape:
    """What llama-like config.json files state. `rotary_share`: of a head, where the file does not say."""
    hidden, n_heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    head_width = c.integer("head_dim", max(1, hidden // n_heads))
    return alike(
        c.family,
        ropes.from_config(c, head_width, pairing, rotary_share=rotary_share),
        n_layers=limited(c.integer("num_hidden_layers"), c),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=c.integer("num_key_value_heads", n_heads),
        head_width=head_width,
        ff_width=c.integer(ff_key),
        vocab=c.integer("vocab_size"),
        context=c.integer("max_position_embeddings"),
        norm_eps=c.positive("rms_norm_eps", c.positive("layer_norm_eps", c.positive("norm_epsilon", 1e-6))),
        activation=activation_from_config(c),
        attention_bias=c.flag("attention_bias", False),
        mlp_bias=c.flag("mlp_bias", False),
        tied_head=c.flag("tie_word_embeddings", False),
    )


def windowed_from_config(c: Description) -> Shape:
    """`common_from_config` with windows, for families whose class in transformers reads them."""
    shape = common_from_config(c)
    return shape.with_attention(window=windows_from_config(c, shape.n_layers))


def with_rope_where(shape: Shape, turned: Sequence[bool]) -> Shape:
    """No rotary positions in the other layers."""
    ropes = (one.attention and one.attention.rope for one in shape.layers)
    return shape.with_attention(rope=tuple(rope if one else None for rope, one in zip(ropes, turned, strict=True)))


def by_window(shape: Shape, sliding: Sequence[bool], window: int, *, local: Rope | None, whole: Rope | None) -> Shape:
    """Layers that see a window, with a rope of their own, and layers that see everything."""
    ropes_of = tuple(local if one else whole for one in sliding)
    return shape.with_attention(window=tuple(window if one else None for one in sliding), rope=ropes_of)


def sliding_from_gguf(f: Description, n_layers: int, every: int, *, first: bool = False) -> Sequence[bool]:
    """Which layers see a window: all but the last of `every` (or the `first`), unless the file has a number or a list
    of its own."""
    stated = f.raw("attention.sliding_window_pattern")
    if isinstance(stated, (list, np.ndarray)):
        if len(stated) < n_layers:
            raise BadFile(f"{f.path}: {f.prefix}attention.sliding_window_pattern is shorter than the {n_layers} layers")
        if not all(isinstance(one, (bool, int, np.integer, np.bool_)) for one in stated):
            raise BadFile(
                f"{f.path}: {f.prefix}attention.sliding_window_pattern holds other things than true and false"
            )
        return [bool(one) for one in stated[:n_layers]]
    every = f.integer("attention.sliding_window_pattern", every)
    return [bool((i if first else i + 1) % every) for i in range(n_layers)]


def sliding_from_config(c: Fields, n_layers: int, every: int) -> Sequence[bool]:
    """The same of config.json, by its layer_types or its sliding_window_pattern."""
    if c.has("layer_types"):
        return [kind == "sliding_attention" for kind in layer_types(c, n_layers)]
    stated = c.raw("sliding_window_pattern")
    if isinstance(stated, str) and set(stated) <= {"L", "G"} and stated:
        return [stated[i % len(stated)] == "L" for i in range(n_layers)]
    every = c.integer("sliding_window_pattern", every)
    return [bool((i + 1) % every) for i in range(n_layers)]


def flags(c: Fields, key: str, default: Sequence[bool]) -> Sequence[bool]:
    """A list of one 0 or 1 for each layer."""
    found = c.raw(key)
    if found is None:
        return default
    if not isinstance(found, list) or len(found) != len(default) or any(one not in (0, 1) for one in found):
        raise BadFile(f"{c.path}: {key} is {str(found)[:80]}; it must be a list of {len(default)} times 0 or 1")
    return [bool(one) for one in found]


def with_biases(shape: Shape, f: Description) -> Shape:
    """GGUF does not state biases: the file has them or not."""
    attention, mlp = (f"blk.0.{name}.bias" in f.tensors for name in ("attn_q", "ffn_up"))
    return replace(shape, attention_bias=attention, mlp_bias=mlp)


def with_factors(rope: Rope, f: Description) -> Rope:
    """A GGUF file's tensors of rope factors: one set (llama3), or a short and a long one (longrope)."""
    if "rope_freqs.weight" in f.tensors:
        factors = _factors(f, "rope_freqs.weight", rope)
        scaling = rope.divisors or (1.0,) * len(factors)
        return replace(rope, divisors=tuple(a * b for a, b in zip(factors, scaling, strict=True)))
    if not {"rope_factors_short.weight", "rope_factors_long.weight"} & f.tensors.keys():
        return rope
    trained = f.integer("context_length")
    original = f.integer("rope.scaling.original_context_length", trained, least=2)
    amplitude = f.positive("rope.scaling.attn_factor", ropes.longrope_amplitude(trained / original, original))
    short, long = (_factors(f, f"rope_factors_{range}.weight", rope) for range in ("short", "long"))
    return Rope(rope.base, rope.width, rope.pairing, short, amplitude, long, original)


def _factors(f: Description, name: str, rope: Rope) -> tuple[float, ...]:
    info = f.tensors.get(name)
    if info is None or info.type != "F32" or info.shape != (rope.width // 2,):
        found = "absent" if info is None else f"{info.type} {list(info.shape)}"
        raise BadFile(f"{f.path}: the tensor {name} is {found}; it must be F32 [{rope.width // 2}]")
    values = np.ascontiguousarray(f.checkpoint.raw(name)).reshape(-1).view(np.float32)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise BadFile(f"{f.path}: the tensor {name} holds factors that are not positive numbers")
    return tuple(float(v) for v in values)


def windows_from_config(c: Fields, n_layers: int, first_windowed: int = 0) -> tuple[int | None, ...]:
    """Sliding windows by layer: from `layer_types` where the file has it, else one window for all or none."""
    window = c.integer("sliding_window", least=0) if c.has("sliding_window") else 0
    if not window or not c.flag("use_sliding_window", True):
        return (None,) * n_layers
    if c.has("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types(c, n_layers))
    first = c.integer("max_window_layers", first_windowed, least=0)
    return tuple(window if layer >= first else None for layer in range(n_layers))


def layer_types(
    c: Fields,
    n_layers: int,
    known: Sequence[str] = ("sliding_attention", "full_attention"),
    *,
    key: str = "layer_types",
) -> Sequence[str]:
    """config.json's list of the kind of each layer."""
    kinds = c.raw(key)
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in known for kind in kinds):
        raise BadFile(f"{c.path}: {key} must list {n_layers} of {' and '.join(map(repr, known))}")
    return kinds


def activation_from_config(c: Fields, name: str | None = None) -> Activation:
    """The activation function that config.json names, or `name` where a family has a key of its own for it."""
    name = name or c.word("hidden_activation", c.word("hidden_act", c.word("activation_function", "silu")))
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise Unsupported(f"{c.path}: the activation {name!r} is not supported; known: {known}")
    return ACTIVATIONS[name]


def only_silu(c: Fields, blocks: str) -> None:
    """Refuse another activation function for blocks of a kind that is computed with this one alone."""
    if (activation := activation_from_config(c)) != "silu":
        raise Unsupported(f"{c.path}: {blocks} with the activation {activation!r} are not supported; only silu is")


def vocab_rows(f: Description) -> int:
    """How many tokens the embedding of a GGUF file holds, which is the vocabulary size that it states."""
    name = "token_embd.weight"
    if name not in f.tensors:
        raise BadFile(f"{f.path}: it has no tensor {name}; a file that holds only a vocabulary cannot be run")
    return f.tensors[name].shape[0]


def limited(n_layers: int, f: Fields) -> int:
    """The number of layers, refused where no model has so many (before anything of that length is made)."""
    if n_layers > 10_000:
        raise BadFile(f"{f.path}: it claims {n_layers} layers; no model has so many, the file is damaged")
    return n_layers


def checked(shape: Shape, f: Fields) -> Shape:
    """The sizes, where they agree with each other."""
    for one in shape.attention.values():
        if one.n_heads % one.n_kv_heads:
            raise BadFile(f"{f.path}: {one.n_heads} heads cannot share {one.n_kv_heads} key and value heads evenly")
        if one.rope is not None:
            ropes.check(one.rope, one.head_width, f)
    if shape.experts is not None:
        _check_experts(shape.experts, f)
    return shape


def _check_experts(experts: ExpertShape, f: Fields) -> None:
    n_open, groups = experts.n_experts, experts.groups
    if groups is not None:
        if n_open % groups.n_groups or n_open // groups.n_groups < groups.n_best:
            raise BadFile(f"{f.path}: {n_open} experts cannot be {groups.n_groups} groups of at least {groups.n_best}")
        n_open = n_open // groups.n_groups * groups.n_used
    if experts.n_used > n_open:
        raise BadFile(f"{f.path}: a row uses {experts.n_used} experts, and there are only {n_open}")
