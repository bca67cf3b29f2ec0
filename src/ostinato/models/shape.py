"""What a model is, before any weight is read: sizes, windows, caps, rope, experts.

`read_shape` asks the checkpoint's family; `common_from_gguf` and `common_from_config` read what nearly every
family states alike, and a family changes by `replace` what it does differently. `docs/add-a-family.md` says how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from ostinato.errors import BadFile, Unsupported
from ostinato.files.unpack import Floats
from ostinato.models import rope as ropes
from ostinato.models.fields import Description, Fields, n_further_layers
from ostinato.models.rope import Pairing, Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
ACTIVATIONS: Mapping[str, Activation] = {  # as config.json calls them
    **{"silu": "silu", "swish": "silu", "gelu": "gelu"},
    **{"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu2": "relu2"},
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
    share_scale: float = 1.0  # routed scaling factor
    gated: bool = True  # false: down(act(up(x)))
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
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_width: int
    ff_width: int
    vocab: int
    context: int  # as trained
    norm_eps: float
    ropes: tuple[Rope | None, ...]  # per layer; None: no rotary positions
    windows: tuple[int | None, ...]  # per layer; None: sees everything before it
    query_scale: float
    activation: Activation = "silu"
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    experts: ExpertShape | None = None
    attention_bias: bool = False
    qk_norm: QKNorm = "heads"  # where there are such norms
    parallel: bool = False  # attention and feed-forward take in the same row
    attention_gate: bool = False  # q is twice as wide: a query and a gate on the output for each head
    mlp_bias: bool = False
    tied_head: bool = False  # the head is the embedding
    attention: bool = True  # false: recurrent layers only, no keys and values
    recurrent: RecurrentShape | None = None  # with attention too: a hybrid
    causal: bool = True  # false: an encoder, every row sees every row of its sequence
    pooling: str | None = None  # an encoder's own way to one vector: mean, cls, last, rank, none
    normalise: bool = False  # an encoder's vectors have length 1
    n_classes: int | None = None  # a ranking head's outputs
    multipliers: Multipliers = Multipliers()
    wide_residual: bool = False  # what the layers add to is float32 whatever the weights are

    @property
    def default_context(self) -> int:
        """As trained; with longrope the range in which its short factors, made for it, hold."""
        return min(self.context, self.short_rope_positions or self.context)

    @property
    def short_rope_positions(self) -> int | None:
        """Positions of the longest sequence that longrope's short factors rotate; None without longrope."""
        return min((r.original_context for r in self.ropes if r is not None and r.original_context), default=None)

    @property
    def n_rope_sets(self) -> int:
        """How many sets of divisors its ropes have: 2 with longrope."""
        return 1 if self.short_rope_positions is None else 2

    def frequencies(self) -> dict[Rope, Floats]:
        """Of each of its ropes, float32 [rope sets, width / 2]."""
        kinds = [rope for rope in dict.fromkeys(self.ropes) if rope is not None]
        return {rope: ropes.frequencies_of(rope, self.n_rope_sets) for rope in kinds}

    def rope_set(self, n_positions: int) -> int:
        """The set that rotates a sequence of so many positions: 0, or 1, longrope's long factors."""
        return int(n_positions > (self.short_rope_positions or n_positions))


def alike(family: str, rope: Rope | None, **sizes: Any) -> Shape:
    """A shape whose layers are alike: they see everything before them, and each head has keys and values of its own;
    unless said."""
    n_layers, n_heads, width = sizes["n_layers"], sizes["n_heads"], max(1, sizes["hidden"] // sizes["n_heads"])
    width = sizes.setdefault("head_width", width)
    plain = {"n_kv_heads": n_heads, "windows": everywhere(None, n_layers), "query_scale": width**-0.5}
    return Shape(family=family, ropes=everywhere(rope, n_layers), **{**plain, **sizes})


def everywhere(value: Any, n_layers: int) -> tuple[Any, ...]:
    return (value,) * n_layers


def common_from_gguf(f: Description, pairing: Pairing = "halves") -> Shape:
    """What llama-like GGUF files state under `<architecture>.`"""
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(f.raw(key), (list, np.ndarray)):
            raise Unsupported(f"{f.path}: {f.prefix}{key} differs from layer to layer, which is not supported")
    hidden, n_heads = f.integer("embedding_length"), f.integer("attention.head_count")
    head_width = f.integer("attention.key_length", max(1, hidden // n_heads))
    if f.integer("attention.value_length", head_width) != head_width:
        raise Unsupported(f"{f.path}: key heads and value heads of different width are not supported")
    n_layers = f.integer("block_count") - n_further_layers(f)
    rope = with_factors(ropes.from_gguf(f, head_width, pairing), f)
    window = f.integer("attention.sliding_window", least=0) if f.has("attention.sliding_window") else 0
    return Shape(
        family=f.family,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=f.integer("attention.head_count_kv", n_heads),
        head_width=head_width,
        ff_width=f.integer("feed_forward_length", least=0) or 1,
        vocab=vocab_rows(f),
        context=f.integer("context_length"),
        norm_eps=f.positive("attention.layer_norm_rms_epsilon", f.positive("attention.layer_norm_epsilon", 1e-5)),
        ropes=everywhere(rope, limited(n_layers, f)),
        windows=everywhere(window or None, n_layers),
        query_scale=head_width**-0.5,
        tied_head="output.weight" not in f.tensors,
    )


def common_from_config(c: Description, pairing: Pairing = "halves", *, rotary_share: float = 1.0) -> Shape:
    """What llama-like config.json files state. `rotary_share`: of a head, where the file does not say."""
    hidden, n_heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    head_width = c.integer("head_dim", max(1, hidden // n_heads))
    n_layers = c.integer("num_hidden_layers")
    return Shape(
        family=c.family,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=c.integer("num_key_value_heads", n_heads),
        head_width=head_width,
        ff_width=c.integer("intermediate_size"),
        vocab=c.integer("vocab_size"),
        context=c.integer("max_position_embeddings"),
        norm_eps=c.positive("rms_norm_eps", c.positive("layer_norm_eps", c.positive("norm_epsilon", 1e-6))),
        ropes=everywhere(ropes.from_config(c, head_width, pairing, rotary_share=rotary_share), limited(n_layers, c)),
        windows=windows_from_config(c, n_layers),
        query_scale=head_width**-0.5,
        activation=activation_from_config(c),
        attention_bias=c.flag("attention_bias", False),
        mlp_bias=c.flag("mlp_bias", False),
        tied_head=c.flag("tie_word_embeddings", False),
    )


def with_rope_where(shape: Shape, turned: Sequence[bool]) -> Shape:
    """No rotary positions in the other layers."""
    return replace(shape, ropes=tuple(r if one else None for r, one in zip(shape.ropes, turned, strict=True)))


def by_window(shape: Shape, sliding: Sequence[bool], window: int, *, local: Rope | None, whole: Rope | None) -> Shape:
    """Layers that see a window, with a rope of their own, and layers that see everything."""
    ropes_of = tuple(local if one else whole for one in sliding)
    return replace(shape, windows=tuple(window if one else None for one in sliding), ropes=ropes_of)


def sliding_from_gguf(f: Description, n_layers: int, every: int) -> Sequence[bool]:
    """Which layers see a window: all but every `every`-th, unless the file has a number or a list of its own."""
    stated = f.raw("attention.sliding_window_pattern")
    if isinstance(stated, (list, np.ndarray)):
        if len(stated) < n_layers:
            raise BadFile(f"{f.path}: {f.prefix}attention.sliding_window_pattern is shorter than the {n_layers} layers")
        return [bool(one) for one in stated[:n_layers]]
    every = f.integer("attention.sliding_window_pattern", every)
    return [bool((i + 1) % every) for i in range(n_layers)]


def sliding_from_config(c: Fields, n_layers: int, every: int) -> Sequence[bool]:
    """The same of config.json, by its layer_types or its sliding_window_pattern."""
    if c.has("layer_types"):
        return [kind == "sliding_attention" for kind in layer_types(c, n_layers)]
    stated = c.raw("sliding_window_pattern")
    if isinstance(stated, str) and set(stated) <= {"L", "G"} and stated:
        return [stated[i % len(stated)] == "L" for i in range(n_layers)]
    every = c.integer("sliding_window_pattern", every)
    return [bool((i + 1) % every) for i in range(n_layers)]


def with_query_scale(shape: Shape, scale: float) -> Shape:
    return replace(shape, query_scale=scale)


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
        return Rope(rope.base, rope.width, rope.pairing, _factors(f, "rope_freqs.weight", rope))
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
        return everywhere(None, n_layers)
    if c.has("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types(c, n_layers))
    first = c.integer("max_window_layers", first_windowed, least=0)
    return tuple(window if layer >= first else None for layer in range(n_layers))


def layer_types(c: Fields, n_layers: int) -> Sequence[str]:
    """config.json's list of `sliding_attention` and `full_attention`, one per layer."""
    kinds = c.raw("layer_types")
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in known for kind in kinds):
        raise BadFile(f"{c.path}: layer_types must list {n_layers} of {known[0]!r} and {known[1]!r}")
    return kinds


def activation_from_config(c: Fields) -> Activation:
    name = c.word("hidden_activation", c.word("hidden_act", c.word("activation_function", "silu")))
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise Unsupported(f"{c.path}: the activation {name!r} is not supported; known: {known}")
    return ACTIVATIONS[name]


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
    if shape.attention and shape.n_heads % shape.n_kv_heads:
        raise BadFile(f"{f.path}: {shape.n_heads} heads cannot share {shape.n_kv_heads} key and value heads evenly")
    if shape.experts is not None:
        _check_experts(shape.experts, f)
    return shape


def _check_experts(experts: ExpertShape, f: Fields) -> None:
    n_open, groups = experts.n_experts, experts.groups
    if groups is not None:
        if n_open % groups.n_groups or n_open // groups.n_groups < groups.n_best or groups.n_used > groups.n_groups:
            raise BadFile(
                f"{f.path}: {n_open} experts cannot be {groups.n_groups} groups of at least {groups.n_best}, of which "
                f"a row uses {groups.n_used}"
            )
        n_open = n_open // groups.n_groups * groups.n_used
    if experts.n_used > n_open:
        raise BadFile(f"{f.path}: a row uses {experts.n_used} experts, and there are only {n_open}")
