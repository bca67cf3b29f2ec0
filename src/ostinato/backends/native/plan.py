"""The step as the CPU's native loop runs it: one plan as C structs, over weights in tiles.

`native_plan` converts a model's blocks into the structs of `src/plan.h`, field by field, and lists every buffer in a
`Plan`, so that its addresses are checked as in every other backend (I-6). `NativeStep` is the opened object: it runs
the loop, a single step or a chunk of a prompt, and keeps alive the memory that C points at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Array, Structure, byref, c_float, c_int, c_uint64, c_void_p, pointer, sizeof
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ostinato.backends.base import CHUNK_ROWS
from ostinato.backends.native.pages import KV_TYPES, PAGE_TOKENS, LayerPages, NativePages
from ostinato.backends.native.tiles import TileMatrix, TileMatrixStruct
from ostinato.errors import InternalError
from ostinato.loop.layout import Tables
from ostinato.loop.memory import address_of, host_zeros, memory_in
from ostinato.loop.plan import Buffer, Node, Plan, without_repeats
from ostinato.models.blocks import (
    MLP,
    AnyAttention,
    AnyLayer,
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
    PlainMLP,
    PostNormLayer,
    ShortConvMixer,
)
from ostinato.models.rope import Rope
from ostinato.models.shape import ExpertGroups, ExpertShape, QKNorm, Shape
from ostinato.options import Activations

LANES: Final = 16
MOST_PARTS: Final = 4
_MIXERS: Final = (
    MambaMixer,
    Mamba2Mixer,
    ShortConvMixer,
    DeltaMixer,
)  # in the order of the enumeration in `src/plan.h`
_QK_NORMS: Final[tuple[QKNorm, ...]] = ("heads", "rows", "after_rope")
_ACTIVATIONS: Final = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3, "clamped_swiglu": 4}
_GATE_ACTIVATIONS: Final = {"sigmoid": 5, "softplus": 6}


# --- the structs of `src/`: attention.h, layout.h, plan.h ---


def _pointers(*names: str) -> tuple[tuple[str, type[c_void_p]], ...]:
    return tuple((name, c_void_p) for name in names)


class _Product(Structure):
    _fields_ = (
        ("n_parts", c_int),
        ("rows", c_int),
        ("parts", TileMatrixStruct * MOST_PARTS),
        *_pointers("bias", "scale"),
    )


class _Cache(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales"))


class _Norm(Structure):
    _fields_ = (*_pointers("weight", "bias"), ("eps", c_float))


class _Mixer(Structure):
    _fields_ = (
        *((name, _Product) for name in ("into", "select", "step", "out")),
        *((name, c_void_p) for name in ("conv_weight", "conv_bias", "a", "d", "dt_bias", "norm")),
        ("norms", _Norm * 3),
        *((name, c_void_p) for name in ("inputs", "scanned")),
        *((name, c_int) for name in ("kind", "inner", "state", "kernel", "n_heads", "n_groups", "dt_rank")),
        *((name, c_int) for name in ("norm_first", "tiled")),
        *((name, c_float) for name in ("input_scale", "norm_eps", "least_step", "most_step")),
    )


class _Latent(Structure):
    _fields_ = (
        *((name, _Product) for name in ("q_a", "q_b", "kv_a")),
        *((name, _Norm) for name in ("q_a_norm", "kv_a_norm")),
        ("heads", c_void_p),
        *((name, c_int) for name in ("q_rank", "kv_rank", "plain", "rotated", "expanded")),
    )


class _Layer(Structure):
    _fields_ = (
        *((name, _Norm) for name in ("attention_norm", "after_attention", "attention_post_norm")),
        *((name, _Norm) for name in ("mlp_norm", "after_mlp", "mlp_post_norm", "q_norm", "k_norm", "v_norm")),
        *((name, _Norm) for name in ("router_norm", "experts_norm", "after_experts", "after_shared", "after_part")),
        *((name, _Product) for name in ("qkv", "out", "gate_up", "down", "router")),
        *((name, _Product) for name in ("shared_gate_up", "shared_down", "into_latent", "out_of_latent")),
        *((name, _Product) for name in ("part_gate", "part_out")),
        *((name, c_void_p) for name in ("experts", "choice_bias", "share_scales", "sinks", "latent", "mixer")),
        ("cache", _Cache),
        *((name, c_int) for name in ("window", "rope", "ff_width", "group", "gated")),
        *((name, c_int) for name in ("qk_norm", "parallel", "n_heads", "n_kv_heads", "head_width")),
        *((name, c_int) for name in ("value_width", "gates", "gate_width", "gate_activation")),
        *((name, c_int) for name in ("reads_kv", "temperature_span")),
        *((name, c_float) for name in ("query_scale", "softcap", "temperature", "attention_scale", "out_scale")),
    )


class _Rope(Structure):
    _fields_ = (("frequencies", c_void_p), ("half", c_int), ("neighbours", c_int), ("amplitude", c_float))


class RouterStruct(Structure):
    _fields_ = (
        *((name, c_int) for name in ("n_experts", "n_scores", "n_used", "sigmoid")),
        *((name, c_int) for name in ("by_score", "renormalise", "n_groups", "groups_used", "n_best")),
        *((name, c_float) for name in ("share_scale", "sum_epsilon", "least_sum")),
    )

    @staticmethod
    def of(experts: ExpertShape | None) -> RouterStruct:
        if experts is None:
            return RouterStruct()
        groups = experts.groups or ExpertGroups(1, 1, 1)
        return RouterStruct(
            experts.n_experts,
            experts.n_scores,
            experts.n_used,
            experts.scoring == "sigmoid",
            experts.by_score,
            experts.renormalise,
            groups.n_groups,
            groups.n_used,
            groups.n_best,
            experts.share_scale,
            experts.sum_epsilon,
            experts.least_sum,
        )


class PartStruct(Structure):
    _fields_ = (
        ("pages", c_void_p),
        *((name, c_int) for name in ("n_rows", "start", "slot", "table_pages", "rope_set")),
    )


class OutputsStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("rows", "hidden", "logits", "targets", "logprobs", "top_ids", "top_logprobs")),
        *((name, c_int) for name in ("n", "slice", "n_top", "n_tokens")),
    )


class _NativeView(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("table", "admissions", "rings", "layout", "grammars"))


class _Plan(Structure):
    _fields_ = (
        ("view", _NativeView),
        ("hash", c_uint64),
        ("epoch", c_uint64),
        *((name, c_void_p) for name in ("layers", "ropes")),
        ("norm", _Norm),
        ("embedding_norm", _Norm),
        *((name, c_void_p) for name in ("position_embedding", "segment_embedding")),
        ("embedding", TileMatrixStruct),
        ("part_embedding", TileMatrixStruct),
        ("part_project", _Product),
        ("part_norm", _Norm),
        ("head", _Product),
        *((name, c_void_p) for name in ("logits", "last", "scratch")),
        *((name, c_int) for name in ("n_layers", "n_ropes", "hidden")),
        *((name, c_int) for name in ("widest_ff", "part_width", "shared_width", "shared_gate", "latent_width")),
        *((name, c_int) for name in ("activation", "kept", "wide")),
        *((name, c_int) for name in ("n_threads", "n_slots", "max_pages", "most_rows", "n_tokens", "wake")),
        ("router", RouterStruct),
        ("causal", c_int),
        *((name, c_float) for name in ("logit_softcap", "embedding_scale", "part_scale")),
    )


# --- the plan ---


class NativeStep:
    """A model's step in C, opened. A call returns when its work is done. Close it only while no call is running."""

    def __init__(
        self,
        library: ctypes.CDLL,
        model: ModelBlocks,
        memory: NativePages,
        tables: Tables,
        n_tokens: int,
        *,
        activations: Activations,
        threads: int,
        wake: int = -1,
    ) -> None:
        """`wake`: a file that is written to at step boundaries that the host must hear of; -1 for none."""
        self._library, self._kept = _declared(library), _Kept()
        self.chunk_rows = chunk_rows(model.shape, tables.layout.max_pages * PAGE_TOKENS)
        self.threads, self.vocab, self.hidden = threads, model.shape.vocab, model.shape.hidden
        self.n_segments = 1 if model.type_embedding is None else len(model.type_embedding)
        self.causal, self.recurs = model.shape.causal, bool(model.shape.recurrent)
        self.n_groups = tables.layout.n_groups
        self.n_positions = tables.layout.max_pages * PAGE_TOKENS
        if model.position_embedding is not None:
            self.n_positions = min(self.n_positions, len(model.position_embedding))
        self.logits = host_zeros((tables.layout.n_slots, model.shape.vocab), np.float32)
        self.last = host_zeros((tables.layout.n_slots, model.shape.hidden), np.float32)
        self._plan = self._made(model, memory, tables, n_tokens, activations, wake)
        n_bytes = self._library.ostinato_scratch_bytes(pointer(self._plan))
        self.scratch = host_zeros((n_bytes,), np.uint8)
        self._plan.scratch = address_of(self.scratch)
        self._opened: int | None = self._library.ostinato_open(pointer(self._plan))
        if not self._opened:
            raise InternalError("the native loop could not be opened: no memory or no threads")

    @property
    def arrays(self) -> list[np.ndarray]:
        """What it reads besides: copies of weights in another order, arrays of the model itself, and the structs."""
        return self._kept.arrays

    # The jobs: each call returns when its job is done, and releases the interpreter's lock meanwhile

    def run_loop(self) -> None:
        """A step boundary, then steps until no slot is live."""
        self._call("ostinato_run")

    def host_published(self) -> None:
        """Wake a loop that waits for the host; from any thread, also while the loop runs."""
        self._call("ostinato_published")

    def step(self) -> None:
        """One step and its step boundary."""
        self._call("ostinato_step")

    def chunk(
        self,
        parts: Array[PartStruct],
        ids: NDArray[np.int32],
        segments: NDArray[np.int32] | None,
        outputs: OutputsStruct,
    ) -> None:
        """Write rows of some sequences to their pages and compute the requested outputs, between two steps."""
        of_ids = None if segments is None else segments.ctypes.data
        at = c_void_p(ids.ctypes.data), c_void_p(of_ids)
        self._call("ostinato_chunk", parts, c_int(len(parts)), *at, byref(outputs))

    def first(self, slot: int) -> None:
        """The first token of a slot, from the last row that ran for it, by its staged admission."""
        self._call("ostinato_first", c_int(slot))

    def built(self, plan_hash: int, epoch: int) -> None:
        """What the step boundary finds in the table at every step, or ends (I-10)."""
        self._call("ostinato_built", c_uint64(plan_hash), c_uint64(epoch))

    def close(self) -> None:
        """End the threads; no call may be running."""
        if self._opened:
            opened, self._opened = self._opened, None
            self._library.ostinato_close(c_void_p(opened))

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._opened is None:
            raise InternalError("the native loop is closed")
        return self._library[name](c_void_p(self._opened), *arguments)

    # From blocks to structs

    def _made(
        self,
        model: ModelBlocks,
        memory: NativePages,
        tables: Tables,
        n_tokens: int,
        activations: Activations,
        wake: int,
    ) -> _Plan:
        kept, shape, experts, wide = self._kept, model.shape, model.shape.experts, activations == "wide"
        assert isinstance(model.embedding, TileMatrix)
        if model.embedding.wide != wide:
            raise InternalError("the model was packed for other activations than the loop is opened with")
        ropes, parts = list(model.frequencies), model.per_layer
        return _Plan(
            view=_NativeView(
                *tables.addresses,
                kept.array(tables.layout.words(PAGE_TOKENS)),
                tables.grammar_address or None,
            ),
            layers=kept.structs(_Layer, [self._layer(layer, shape, memory, ropes) for layer in model.layers]),
            ropes=kept.structs(_Rope, [self._rope(rope, model.frequencies[rope]) for rope in ropes]),
            norm=self._norm(model.norm),
            embedding_norm=self._norm(model.embedding_norm),
            position_embedding=self._table(model.position_embedding),
            segment_embedding=self._table(model.type_embedding),
            embedding=model.embedding.matrix,
            part_embedding=TileMatrixStruct() if parts is None else parts.embedding.matrix,
            part_project=_Product() if parts is None else self._product(parts.project),
            part_norm=self._norm(None if parts is None else parts.norm),
            part_width=shape.per_layer_width,
            part_scale=0.0 if parts is None else parts.scale,
            head=_Product() if model.head is None else self._product(model.head),
            logits=address_of(self.logits),
            last=address_of(self.last),
            n_layers=shape.n_layers,
            n_ropes=len(ropes),
            hidden=shape.hidden,
            widest_ff=max(shape.widest_ff, *((0,) if experts is None else (experts.ff_width, experts.shared_width))),
            shared_width=0 if experts is None else experts.shared_width,
            shared_gate=experts is not None and experts.shared_gate,
            latent_width=0 if experts is None else experts.latent_width or 0,
            router=RouterStruct.of(experts),
            activation=_ACTIVATIONS[shape.activation],
            kept=list(KV_TYPES).index(memory.kv_type),
            wide=wide,
            n_threads=self.threads,
            n_slots=tables.layout.n_slots,
            max_pages=tables.layout.max_pages,
            most_rows=self.chunk_rows,
            n_tokens=n_tokens,
            wake=wake,
            causal=shape.causal,
            logit_softcap=shape.logit_softcap or 0.0,
            embedding_scale=shape.embedding_scale or 0.0,
        )

    def _rope(self, rope: Rope, frequencies: Any) -> _Rope:
        neighbours = rope.pairing == "neighbours"
        return _Rope(self._kept.floats(frequencies), rope.width // 2, neighbours, rope.amplitude)

    def _layer(self, layer: AnyLayer, shape: Shape, memory: NativePages, ropes: list[Rope]) -> _Layer:
        out = _Layer()
        match layer:
            case Layer():
                out.attention_scale, out.parallel = _factor(layer.attention_in), layer.parallel
                out.attention_norm, out.after_attention = map(self._norm, (layer.attention_norm, layer.after_attention))
                one = layer.attention_norm if shape.parallel and layer.mlp_norm is None else layer.mlp_norm
                out.mlp_norm, out.after_mlp = self._norm(one), self._norm(layer.after_mlp)
                out.out_scale = 0.0 if layer.out_scale is None else float(layer.out_scale[0])
                if layer.per_layer is not None:
                    part = layer.per_layer
                    out.part_gate, out.part_out = self._product(part.gate), self._product(part.out)
                    out.after_part = self._norm(part.norm)
            case PostNormLayer():
                out.attention_post_norm, out.mlp_post_norm = map(self._norm, (layer.attention_norm, layer.mlp_norm))
        if isinstance(layer, Layer) and layer.mixer is not None:
            self._set_mixer(out, layer.mixer, memory, layer.mixer_in)
        if layer.attention is not None:
            self._set_attention(out, layer.attention, memory, ropes)
        if layer.mlp is not None:
            self._set_mlp(out, layer.mlp, shape)
        return out

    def _set_attention(self, out: _Layer, attention: AnyAttention, memory: NativePages, ropes: list[Rope]) -> None:
        number, s = attention.kv_layer, attention.shape
        if isinstance(attention, LatentAttention):
            out.latent = self._kept.structs(_Latent, [self._latent(attention)])
        else:
            out.q_norm, out.k_norm = self._norm(attention.q_norm), self._norm(attention.k_norm)
            out.v_norm, out.reads_kv = self._norm(attention.v_norm), s.kv_from is not None
            out.qkv = self._product(attention.qkv)
        out.out = self._product(attention.out)
        out.cache, out.group = _cache(memory.layers[number]), memory.group_of[number]
        out.window, out.rope = s.window or 0, -1 if s.rope is None else ropes.index(s.rope)
        out.n_heads, out.n_kv_heads = s.n_heads, s.n_kv_heads
        out.head_width, out.value_width = s.head_width, s.value_width
        out.gates, out.gate_width = s.gated + s.gates_apart, s.gate_width
        out.gate_activation = _GATE_ACTIVATIONS[s.gate_activation]
        out.query_scale, out.softcap = s.query_scale, s.softcap or 0.0
        out.qk_norm, out.sinks = _QK_NORMS.index(s.qk_norm), self._table(attention.sinks)
        if s.temperature is not None:
            out.temperature, out.temperature_span = s.temperature.scale, s.temperature.span

    def _latent(self, attention: LatentAttention) -> _Latent:
        latent = attention.shape.latent
        assert latent is not None
        if not isinstance(attention.k_b, tuple) or not isinstance(attention.v_b, tuple):
            raise InternalError("the native loop was given the heads of latent attention in one matrix")
        parts = [self._of(matrix) for both in zip(attention.k_b, attention.v_b, strict=True) for matrix in both]
        return _Latent(
            q_a=_Product() if attention.q_a is None else self._product(attention.q_a),
            q_b=self._product(attention.q_b),
            kv_a=self._product(attention.kv_a),
            q_a_norm=self._norm(attention.q_a_norm),
            kv_a_norm=self._norm(attention.kv_a_norm),
            heads=self._kept.structs(_Product, parts),
            q_rank=latent.q_rank or 0,
            kv_rank=latent.kv_rank,
            plain=latent.plain_width,
            rotated=attention.shape.head_width - latent.kv_rank,
            expanded=latent.value_width,
        )

    def _set_mixer(self, out: _Layer, mixer: Mixer, memory: NativePages, input_scale: float) -> None:
        inputs, *scanned = memory.states[mixer.layer]  # a short convolution has nothing else
        common: dict[str, Any] = {
            "into": self._product(mixer.into),
            "out": self._product(mixer.out),
            "conv_weight": self._kept.floats(mixer.conv.weight.T),
            "conv_bias": self._table(mixer.conv.bias),
            "inputs": address_of(inputs),
            "scanned": address_of(scanned[0]) if scanned else None,
            "kind": list(_MIXERS).index(type(mixer)),
            "input_scale": _factor(input_scale),
            "kernel": mixer.shape.kernel,
        }
        if not isinstance(mixer, ShortConvMixer):
            common |= {"inner": mixer.shape.inner, "dt_bias": self._kept.floats(mixer.decay.dt_bias), "most_step": inf}
        match mixer:
            case MambaMixer():
                made = _Mixer(
                    **common,
                    state=mixer.shape.state,
                    d=self._kept.floats(mixer.decay.d),
                    select=self._product(mixer.select),
                    step=self._product(mixer.step),
                    a=self._kept.floats(mixer.decay.a.T),
                    norms=(_Norm * 3)(*map(self._norm, mixer.norms or ())),
                    n_groups=1,
                    dt_rank=mixer.shape.dt_rank,
                    norm_eps=mixer.shape.norm_eps or 0.0,
                )
            case Mamba2Mixer():
                common["least_step"], common["most_step"] = mixer.shape.dt_limit
                made = _Mixer(
                    **common,
                    state=mixer.shape.state,
                    d=self._kept.floats(mixer.decay.d),
                    a=self._kept.floats(mixer.decay.a),
                    norm=self._table(mixer.norm),
                    n_heads=mixer.shape.n_heads,
                    n_groups=mixer.shape.n_groups,
                    norm_first=mixer.shape.norm_first,
                    norm_eps=mixer.norm_eps,
                )
            case ShortConvMixer():
                made = _Mixer(**common, inner=mixer.shape.width, n_groups=1)
            case DeltaMixer():
                made = _Mixer(
                    **common,
                    state=mixer.shape.key_width,
                    a=self._kept.floats(mixer.decay.a),
                    norm=self._table(mixer.norm.weight),
                    n_heads=mixer.shape.n_heads,
                    n_groups=mixer.shape.n_key_heads,
                    norm_first=True,
                    tiled=mixer.shape.tiled,
                    norm_eps=mixer.norm.eps,
                )
        out.mixer = self._kept.structs(_Mixer, [made])

    def _set_mlp(self, out: _Layer, mlp: MLP, shape: Shape) -> None:
        if isinstance(mlp, Experts):
            self._set_experts(out, mlp, shape)
            return
        out.gate_up, out.down = self._feed_forward(mlp)
        out.ff_width, out.gated = mlp.down.weight.shape[1], isinstance(mlp, GatedMLP)

    def _feed_forward(self, mlp: GatedMLP | PlainMLP) -> tuple[_Product, _Product]:
        if isinstance(mlp, GatedMLP):
            return self._inner(mlp.gate_up), self._product(mlp.down)
        return self._product(mlp.up), self._product(mlp.down)

    def _set_experts(self, out: _Layer, mlp: Experts, shape: Shape) -> None:
        if not isinstance(mlp.gate_up, tuple) or not isinstance(mlp.down, tuple):
            raise InternalError(f"the native loop was given experts of {shape.family} in one matrix")
        out.ff_width, out.gated = mlp.experts.ff_width, mlp.experts.gated
        out.router, out.choice_bias = self._product(mlp.router), self._table(mlp.choice_bias)
        out.share_scales = self._table(mlp.share_scales)
        if mlp.norms is not None:
            out.router_norm, out.experts_norm = self._norm(mlp.norms.router), self._norm(mlp.norms.experts)
            out.after_experts, out.after_shared = map(self._norm, (mlp.norms.after_experts, mlp.norms.after_shared))
        nothing = [None] * mlp.experts.n_experts
        into_biases = nothing if mlp.gate_up_bias is None else mlp.gate_up_bias
        out_biases = nothing if mlp.down_bias is None else mlp.down_bias
        into = self._inner if mlp.experts.gated else self._product
        parts = []
        for gate_up, down, into_bias, out_bias in zip(mlp.gate_up, mlp.down, into_biases, out_biases, strict=True):
            parts += [into(Linear(gate_up, into_bias)), self._of(down, out_bias)]
        out.experts = self._kept.structs(_Product, parts)
        if mlp.shared is not None:
            out.shared_gate_up, out.shared_down = self._feed_forward(mlp.shared)
        if mlp.into_latent is not None and mlp.out_of_latent is not None:
            out.into_latent, out.out_of_latent = self._product(mlp.into_latent), self._product(mlp.out_of_latent)

    def _norm(self, norm: Norm | None) -> _Norm:
        if norm is None:
            return _Norm()
        return _Norm(self._kept.floats(norm.weight), self._table(norm.bias), norm.eps)

    def _table(self, values: Any | None) -> int | None:
        return None if values is None else self._kept.floats(values)

    def _product(self, linear: Linear) -> _Product:
        return self._of(linear.weight, linear.bias, linear.scale)

    def _inner(self, linear: Linear) -> _Product:
        """Gate and up: their columns must begin at a tile each."""
        parts = _parts(linear.weight)
        if len(parts) == 1 and parts[0].rows // 2 % LANES:
            raise InternalError(f"gate and up in one matrix of {parts[0].rows} rows: up begins inside a tile")
        return self._product(linear)

    def _of(self, weight: Any, bias: Any = None, scale: Any = None) -> _Product:
        parts = _parts(weight)
        out = _Product(len(parts), sum(part.rows for part in parts))
        for number, part in enumerate(parts):
            out.parts[number] = part.matrix
        out.bias = self._table(bias)
        if scale is not None:
            out.scale = self._kept.floats(np.broadcast_to(np.asarray(scale, np.float32), (out.rows,)))
        return out


def chunk_rows(shape: Shape, context: int) -> int:
    """Rows of a chunk, at most. An encoder's text goes through as a whole, because its rows see those that follow."""
    return min(CHUNK_ROWS["cpu"], context) if shape.causal else max(CHUNK_ROWS["cpu"], context)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with its return types declared, checked to have the same struct sizes as these classes."""
    library.ostinato_scratch_bytes.restype, library.ostinato_open.restype = c_uint64, c_void_p
    ours = [
        sizeof(kind)
        for kind in (_Plan, _Layer, _Product, _Mixer, _Rope, PartStruct, OutputsStruct, RouterStruct, _Latent)
    ]
    if [library.ostinato_plan_bytes(which) for which in range(len(ours))] != ours:
        raise InternalError("the native library has another idea of a plan than backends/native/plan.py")
    return library


class _Kept:
    """Owns the memory that C points at and that has no other owner."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []

    def floats(self, values: Any) -> int:
        """The address of an array, or of a tensor of the host, as float32 in one piece; it stays there."""
        return self.array(np.ascontiguousarray(values, np.float32))

    def array(self, array: np.ndarray) -> int:
        self.arrays.append(array)
        return address_of(array)

    def structs(self, kind: type[Any], structs: Sequence[Any]) -> int:
        """The address of structs one after the other. They are bytes of an array, which the plan lists as a weight:
        it cannot be written to (I-5)."""
        array = host_zeros((sizeof(kind) * len(structs),), np.uint8)
        array[:] = np.frombuffer(bytes((kind * len(structs))(*structs)), np.uint8)
        return self.array(array)


def _parts(weight: Any) -> tuple[TileMatrix, ...]:
    """The matrices of a weight: itself, or those that are stacked in it."""
    parts: tuple[TileMatrix, ...] = getattr(weight, "parts", (weight,))
    if not all(isinstance(part, TileMatrix) for part in parts):
        raise InternalError("the native loop multiplies weights in tiles only")
    return parts


def _factor(scale: float) -> float:
    """A factor as C has it: 0 for none."""
    return 0.0 if scale == 1 else scale


def _cache(layer: LayerPages) -> _Cache:
    arrays = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
    return _Cache(*(address_of(array) if array.nbytes else None for array in arrays))


def native_plan(model: ModelBlocks, memory: NativePages, tables: Tables, step: NativeStep, constants: str) -> Plan:
    """Everything that a step reads and writes, as one node: C runs the whole step."""
    # Not every type of tiles has all its planes, nor every kv_type scales.
    named = [*memory_in(model, "model"), *memory_in(step.arrays, "step.array")]
    weights = without_repeats([Buffer.of(name, array, is_weight=True) for name, array in named if array.nbytes])
    kept = [Buffer.of(name, array) for name, array in memory_in(memory.layers, "memory") if array.nbytes]
    kept += [Buffer.of(name, array) for name, array in memory_in(memory.states, "states")]
    own = [
        Buffer.of("table", tables.table.memory),
        Buffer.of("admissions", tables.admissions.memory),
        Buffer.of("rings", tables.rings.memory),
        *(() if tables.grammars is None else (Buffer.of("grammars", tables.grammars.plain_words),)),
        Buffer.of("logits", step.logits),
        Buffer.of("last", step.last),
        Buffer.of("step.workspace", step.scratch),
    ]
    written = ("table", "logits", "step.workspace", *(buffer.name for buffer in kept))
    read = (*written, *(buffer.name for buffer in weights))
    n_bytes = sum(buffer.n_bytes for buffer in weights)
    routed = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]
    routed_bytes = sum(array.nbytes for mlp in routed for _, array in memory_in((mlp.gate_up, mlp.down), "routed"))
    share = routed[0].experts.n_used / routed[0].experts.n_experts if routed else 1.0
    node = Node("step", "native step", step.step, read, written, n_bytes, None, routed_bytes, share)
    return Plan("cpu", (*own, *kept, *weights), (node,), PAGE_TOKENS, constants)
