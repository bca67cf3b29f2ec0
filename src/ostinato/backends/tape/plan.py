"""The tape of one model: which weights in which order, the constants its kernel is compiled with, and its one argument.

`backend.py` says what the kernel cannot express. `TapeSizes` settles how a block's shared memory is shared out
and how many blocks run; `shape_header` emits all of it for `src/*.h`. `TapeStep` packs the weights, owns the buffers
between blocks, and fills the argument, field by field as `parts.h` has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from ctypes import Structure, c_int, c_uint64, c_void_p
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ostinato.backends.cuda.launch import checked
from ostinato.backends.cuda.packed import Packed
from ostinato.backends.cuda.scratch import scratch_elements
from ostinato.backends.machine import Chip, arch_of
from ostinato.backends.tape.backend import ACTIVATIONS
from ostinato.backends.tape.pack import TapeSource, source_of, tape_of, why_not_packed
from ostinato.backends.tape.partition import (
    Partition,
    Segment,
    TapeGrid,
    TapeMatrix,
    WeightType,
    largest_chunk,
    make_partition,
    matrix_bytes,
    padded_columns,
    segments_of,
)
from ostinato.backends.tape.tape_weight import Tape, TapeWeight
from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.arrays import as_tensor
from ostinato.backends.torch.kv_types import KV_DTYPES
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.attend import PRODUCT
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.plan import memory_tensors, tensors_of
from ostinato.backends.torch.weight import Weight, rows_of
from ostinato.backends.weights import Stack
from ostinato.cache.kv_bytes import KV_FORMATS
from ostinato.errors import BadPointer, HardwareCannot, InternalError
from ostinato.loop.layout import Layout, Tables
from ostinato.loop.plan import Buffer, Node, Plan, without_repeats
from ostinato.models.blocks import Attention, GatedMLP, Layer, Linear, Norm, with_leaves
from ostinato.models.shape import AttentionShape, Shape
from ostinato.options import Activations, KVType

SPLITS: Final = 16  # of what a row sees, at most
LEAST_SPLIT: Final = 128  # positions: as many as the warps of a block take at once
IN_FLIGHT_BYTES: Final = 32 << 10  # of a block's requests: with more, small loads wait behind the stream (docs/lab)
LEAST_ACTIVATION_BYTES: Final = 32 << 10  # the choice of tokens works there too
STATIC_BYTES: Final = 2 << 10  # of a block's shared memory: what the step boundary keeps
DEADLINE_NS: Final = 2_000_000_000  # for any wait on the device
REGISTERS_MOVE_BY: Final = 128  # threads: four warps
QKV_SEGMENTS: Final = 3
SEGMENTS_A_LAYER: Final = QKV_SEGMENTS + 3
LEAST_STAGES: Final = 2
HOPPER: Final = (9, 0)
SUBNORMALS_TESTED: Final = frozenset({HOPPER})  # chips on which tensor cores multiplied subnormal bfloat16 exactly
SLAB_COLUMNS: Final = 256  # of each compute warp: the least that a product takes of rows at once
GATES_BYTES: Final = 16  # of a stage: when it is full, and when it is empty
ROW_PADDING: Final = 8  # elements between two rows of activations
SUMMARY_WORDS: Final = 8  # of a block's summary of a row's logits
ITEM_BYTES: Final = 32  # of what attention notes of a split
ITEMS_AT_ONCE: Final = 8  # splits that a block has noted, at most
LINES_BYTES: Final = 32 << 10  # for the queries, keys and values of those splits
CLOCKED_A_LAYER: Final = 5

_TYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


# --- the structs of backends/tape/src/parts.h ---


_VIEW: Final = ("table", "admissions", "rings", "grammars")
_POINTERS: Final = (
    *("tape", "tape_at", "segments", "norms", "qkv_bias", "qk_norms"),
    *("frequencies", "embedding", "caches", "windows", "groups"),
    *("x", "qkv", "parts", "attended", "inside", "summaries", "marks"),
    *("logits", "scaled", "state", "after_norms", "squares", "clock"),
)


class _TapeView(Structure):
    _fields_ = tuple((name, c_void_p) for name in _VIEW)


class Argument(Structure):
    """What the kernel is launched with: `struct Tape`."""

    _fields_ = (
        ("view", _TapeView),
        *((name, c_uint64) for name in ("plan_hash", "epoch")),
        *((name, c_void_p) for name in _POINTERS),
        ("single", c_int),
    )


# --- what it can run ---


def why_not_values(model: Model) -> str | None:
    """Why a loaded model's weights lose something on the tape, which no header states; None where they do not."""
    for name, weight in _weights(model):
        reason = why_not_packed(weight, model.dtype, paired=name.endswith("gate_up"))
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _linears(model: Model) -> Iterator[tuple[str, Linear]]:
    for number, layer in enumerate(model.layers):
        attention = _attention(model, number)
        assert isinstance(layer.mlp, GatedMLP)
        at = f"layer.{number}"
        yield f"{at}.qkv", attention.qkv
        yield f"{at}.out", attention.out
        yield f"{at}.gate_up", layer.mlp.gate_up
        yield f"{at}.down", layer.mlp.down
    assert model.head is not None
    yield "head", model.head


def without_matrices_on(model: Model, device: torch.device) -> Model:
    """A model whose matrices stay where they are, to be copied to the device one at a time, while the embedding and all
    that is no matrix come to it. A tied head is the embedding, there too."""
    embedding = model.embedding.to(device)

    def there(weight: Any) -> Any:
        if weight is model.embedding:
            return embedding
        return weight.to(device) if isinstance(weight, Tensor) and weight.dim() == 1 else weight

    frequencies = {rope: sets.to(device) for rope, sets in model.frequencies.items()}
    return replace(with_leaves(model, there), device=device, frequencies=frequencies)


# --- sizes ---


class Variant(NamedTuple):
    """What the kernel is compiled with because of the chip; the order of sums depends on none of it."""

    bulk_copies: bool  # the loader is one thread that asks the copy engine, or a warp that copies 16 bytes a lane
    move_registers: bool  # from the loader's warps to the compute warps
    lift_weights: bool  # no operand of a tensor core is a subnormal bfloat16
    arch: str  # that NVRTC compiles for
    as_ptx: bool  # which the driver assembles, in place of a binary

    @staticmethod
    def of(chip: Chip) -> Variant:
        """Registers move only in code for one chip, and that is made for HOPPER. Newer chips get what it has in common
        with them: NVRTC 13.0 spills four times as much where it compiles for them (docs/tape.md)."""
        lift = chip.capability not in SUBNORMALS_TESTED
        if not chip.has_bulk_copies:
            return Variant(False, False, lift, chip.arch, chip.is_pretended)
        if chip.capability == HOPPER and not chip.is_pretended:
            return Variant(True, True, lift, chip.exact_arch, False)
        return Variant(True, False, lift, arch_of(HOPPER), True)

    @property
    def loader_threads(self) -> int:
        return REGISTERS_MOVE_BY if self.move_registers else 32


@dataclass(frozen=True, slots=True)
class TapeSizes:
    """How a grid and a block's shared memory are shared out, and which variant of the kernel runs there."""

    variant: Variant
    grid: TapeGrid
    n_slots: int
    n_stages: int
    stage_bytes: int
    activation_bytes: int
    residual_tiles: int  # of x, that a block makes
    n_residuals: int  # for which they have room: before attention, before the MLP, and what is normed after a block
    n_segments: int
    attention_plan_bytes: int
    deadline_ns: int = DEADLINE_NS

    @staticmethod
    def of(
        shape: Shape,
        matrices: Sequence[TapeMatrix],
        n_slots: int,
        chip: Chip,
        n_compute_warps: int = 8,
        *,
        kv_type: KVType,
        page_tokens: int,
        max_pages: int,
        after_norms: bool = False,
    ) -> TapeSizes:
        """As many stages as fit; as many blocks as have work in every product that keeps them in step. Raises
        HardwareCannot where fewer than LEAST_STAGES fit, with the most slots with which they do."""

        def sizes_of(n_slots: int) -> TapeSizes:
            return TapeSizes._with_ring(
                shape,
                matrices,
                n_slots,
                chip,
                n_compute_warps,
                kv_type=kv_type,
                page_tokens=page_tokens,
                max_pages=max_pages,
                after_norms=after_norms,
            )

        sizes = sizes_of(n_slots)
        if sizes.n_stages >= LEAST_STAGES:
            return sizes
        least = sizes.with_stages(LEAST_STAGES).shared_bytes + STATIC_BYTES
        fewer = next((n for n in range(n_slots - 1, 0, -1) if sizes_of(n).n_stages >= LEAST_STAGES), None)
        raise HardwareCannot(
            f"a block of the persistent kernel needs {least} bytes of shared memory for this model with --slots "
            f"{n_slots} ({LEAST_STAGES} stages of {sizes.stage_bytes} bytes, {sizes.activation_bytes} of activations, "
            f"the rest for sums and tables), and {chip.arch} has {chip.shared_bytes}; use "
            + ("--mode loop" if fewer is None else f"--slots {fewer}, with which it fits, or --mode loop")
        )

    @staticmethod
    def _with_ring(
        shape: Shape,
        matrices: Sequence[TapeMatrix],
        n_slots: int,
        chip: Chip,
        n_compute_warps: int,
        *,
        kv_type: KVType,
        page_tokens: int,
        max_pages: int,
        after_norms: bool = False,
    ) -> TapeSizes:
        """With as many stages as fit, be they too few."""
        # A block without a tile there could fall behind by two layers, and its values be overwritten.
        n_blocks = min(chip.n_multiprocessors, shape.widest_ff // 8, -(-shape.vocab // 16))
        grid = TapeGrid(n_blocks, n_compute_warps)
        segments = segments_of(matrices, grid)
        # Normed rows have the same padding for every weight type.
        hidden = padded_columns(WeightType.FOUR, shape.hidden, n_compute_warps)
        widest = padded_columns(WeightType.FOUR, max(matrix.columns for matrix in matrices), n_compute_warps)
        one_row = widest + ROW_PADDING
        all_rows = n_slots * (max(hidden, SLAB_COLUMNS * n_compute_warps) + ROW_PADDING)
        kept = _multiplied_as(kv_type).itemsize
        attending = attention_bytes(shape, grid, n_slots, kept)
        activations = _whole(max(LEAST_ACTIVATION_BYTES, 2 * all_rows, 2 * one_row, attending), 128)
        stage = _whole(largest_chunk(segments, n_compute_warps), 128)
        least = TapeSizes(
            Variant.of(chip),
            grid,
            n_slots,
            0,
            stage,
            activations,
            residual_tiles=-(-(shape.hidden // 16) // n_blocks),
            n_residuals=2 + after_norms,
            n_segments=SEGMENTS_A_LAYER * shape.n_layers + 1,
            attention_plan_bytes=attention_plan_bytes(
                shape,
                grid,
                n_slots,
                kept,
                cache_bytes=32 if _is_quantised(kv_type) else 16,
                page_tokens=page_tokens,
                max_pages=max_pages,
            ),
        )
        left = chip.shared_bytes - STATIC_BYTES - least.shared_bytes
        most = max(0, left // stage)  # or one less, for the gates that they need
        while most > 0 and least.with_stages(most).shared_bytes + STATIC_BYTES > chip.shared_bytes:
            most -= 1
        return least.with_stages(most)

    def with_stages(self, n_stages: int) -> TapeSizes:
        return replace(self, n_stages=n_stages)

    @property
    def n_threads(self) -> int:
        """Of a block: the compute warps' and the loader's."""
        return self.grid.n_compute_warps * 32 + self.variant.loader_threads

    @property
    def in_flight(self) -> int:
        """Chunks that a block has in flight at most: at least two, or none would be in flight between the arrival of
        one and the request for the next."""
        return max(2, min(self.n_stages - 1, IN_FLIGHT_BYTES // self.stage_bytes))

    @property
    def own_bytes(self) -> int:
        """Of `struct Shared`, to the place where the ring begins."""
        compute_warps = self.grid.n_compute_warps
        sum_rows = 4 if self.n_slots <= 4 else 8
        words = 3 + compute_warps * self.grid.tiles_at_once * 16 * sum_rows + (compute_warps * 4 + 3) * self.n_slots
        words += self.n_residuals * self.residual_tiles * 16 * self.n_slots + 4 * self.n_segments
        return _whole(_whole(GATES_BYTES * self.n_stages + self.attention_plan_bytes + 4 * words, 8), 128)

    @property
    def shared_bytes(self) -> int:
        return self.own_bytes + self.n_stages * self.stage_bytes + self.activation_bytes


def attention_bytes(shape: Shape, grid: TapeGrid, n_slots: int, kept_bytes: int) -> int:
    """What attention works in, where activations lie otherwise: ATTENTION_BYTES of `attention.h`, line by line."""
    heads = heads_of(shape)
    items = _items(heads, grid, n_slots, kept_bytes)
    parts = grid.n_compute_warps * heads.group * (heads.head_width + 8 + 2) * 4
    buffers = 2 if items > 1 and parts <= 20 << 10 else 1
    return items * (heads.group + 2) * heads.head_width * kept_bytes + buffers * parts


def attention_plan_bytes(
    shape: Shape, grid: TapeGrid, n_slots: int, kept_bytes: int, *, cache_bytes: int, page_tokens: int, max_pages: int
) -> int:
    """What attention knows of a step: `struct AttentionPlan` of `attention_plan.h`, field by field."""
    heads = heads_of(shape)
    items = _items(heads, grid, n_slots, kept_bytes)
    longest_split = _whole(max_pages * page_tokens, LEAST_SPLIT * SPLITS) // SPLITS
    pages = items * (longest_split // page_tokens + 2)
    rotations = len(shape.rope_kinds) * n_slots * max(1, shape.rope_kinds[0].width // 2)
    return _whole(cache_bytes * shape.n_layers + 8 * rotations + ITEM_BYTES * items + 4 * (pages + n_slots + 3), 8)


def _multiplied_as(kv_type: KVType) -> torch.dtype:
    return PRODUCT[getattr(torch, KV_DTYPES[kv_type])]


def _is_quantised(kv_type: KVType) -> bool:
    return KV_FORMATS[kv_type].block is not None


def _items(heads: AttentionShape, grid: TapeGrid, n_slots: int, kept_bytes: int) -> int:
    """Splits that a block attends to at once."""
    lines = (heads.group + 2) * heads.head_width * kept_bytes
    return min(ITEMS_AT_ONCE, LINES_BYTES // lines, -(-n_slots * heads.n_kv_heads * SPLITS // grid.n_blocks))


def heads_of(shape: Shape) -> AttentionShape:
    """How its layers attend, which on the tape is alike but for the window and the rope (`why_not_shape`)."""
    return shape.attention[0]


def layer_ropes_of(shape: Shape) -> list[int]:
    """Of each layer, which of the model's kinds of rope it has; -1: none."""
    kinds = shape.rope_kinds
    return [-1 if one.rope is None else kinds.index(one.rope) for one in shape.attention.values()]


class Traits(NamedTuple):
    """What the kernel is compiled for of a model, beside its shape and its matrices."""

    dtype: torch.dtype  # of activations, and of plain matrices
    embedding: torch.dtype
    has_bias: bool  # of q, k and v
    qk_norm_eps: float | None  # None: q and k have no norm
    after_norms: bool = False  # each block's output is normed before it is added

    @staticmethod
    def of(model: Model) -> Traits:
        attention = _attention(model, 0)
        return Traits(
            model.dtype,
            model.embedding.dtype if isinstance(model.embedding, Tensor) else model.dtype,
            attention.qkv.bias is not None,
            None if attention.q_norm is None else attention.q_norm.eps,
            _has_after_norms(model),
        )


def shape_header(
    shape: Shape,
    traits: Traits,
    sizes: TapeSizes,
    n_tokens: int,
    kv_type: KVType,
    weight_types: Collection[WeightType],
    activations: Activations,
) -> str:
    """`shape.h`: everything that the kernel is compiled for."""
    s, grid, heads = shape, sizes.grid, heads_of(shape)
    rope, temperature, layer_ropes = s.rope_kinds[0], heads.temperature, layer_ropes_of(s)
    numbers: dict[str, object] = {
        "N_BLOCKS": grid.n_blocks,
        "N_COMPUTE_WARPS": grid.n_compute_warps,
        "N_LOADER_THREADS": sizes.variant.loader_threads,
        "BULK_COPIES": int(sizes.variant.bulk_copies),
        "MOVE_REGISTERS": int(sizes.variant.move_registers),
        "LIFT_WEIGHTS": int(sizes.variant.lift_weights),
        "STAGES": sizes.n_stages,
        "STAGE_BYTES": sizes.stage_bytes,
        "IN_FLIGHT": sizes.in_flight,
        "TILES_AT_ONCE": grid.tiles_at_once,
        "ACTIVATION_BYTES": sizes.activation_bytes,
        "ATTENTION_PLAN_BYTES": sizes.attention_plan_bytes,
        "MAX_ROWS": sizes.n_slots,
        "N_LAYERS": s.n_layers,
        "HIDDEN": s.hidden,
        "FF": s.widest_ff,
        "N_HEADS": heads.n_heads,
        "N_KV_HEADS": heads.n_kv_heads,
        "HEAD_WIDTH": heads.head_width,
        "N_TOKENS": n_tokens,
        "NORM_EPS": _float(s.norm_eps),
        "QK_NORM_EPS": _float(s.norm_eps if traits.qk_norm_eps is None else traits.qk_norm_eps),
        "QUERY_SCALE": _float(heads.query_scale),
        "EMBEDDING_SCALE": _float(_rounded(s.embedding_scale or 1.0, traits.embedding)),
        "OUT_SCALE": _float(s.multipliers.attention_out),
        "DOWN_SCALE": _float(s.multipliers.ff_down),
        "HEAD_SCALE": _float(s.multipliers.head),
        "ACTIVATION": ACTIVATIONS.index(s.activation),
        "SCORE_CAP": _float(heads.softcap or 0.0),
        "LOGIT_CAP": _float(s.logit_softcap or 0.0),
        "QUERY_TEMPERATURE": _float(0.0 if temperature is None else temperature.scale),
        "QUERY_SPAN": 1 if temperature is None else temperature.span,
        "ROPE_KINDS": len(s.rope_kinds),
        "ROPE_BY_LAYER": int(any(layer_ropes)),
        "LAYER_ROPES": ", ".join(map(str, layer_ropes)),
        "ROPE_SETS": s.n_rope_sets,
        "ROPE_HALF": rope.width // 2,
        "ROPE_NEIGHBOURS": int(rope.pairing == "neighbours"),
        "ROPE_AMPLITUDE": _float(rope.amplitude),
        "SPLITS": SPLITS,
        "LEAST_SPLIT": LEAST_SPLIT,
        "ACTIVATION_BF16": int(traits.dtype == torch.bfloat16),
        "KEPT": _TYPES[_multiplied_as(kv_type)],
        "KEPT_Q8": int(_is_quantised(kv_type)),
        "EMBEDDING_TYPE": _TYPES[traits.embedding],
        "HAS_BIAS": int(traits.has_bias),
        "HAS_QK_NORM": int(traits.qk_norm_eps is not None),
        "HAS_AFTER_NORMS": int(traits.after_norms),
        "AFTER_NORM_EPS": _float(s.after_norm_eps or s.norm_eps),
        **{f"HAS_WEIGHT_{weight_type.name}": int(weight_type in weight_types) for weight_type in WeightType},
        "WIDE": int(activations == "wide"),
        "DEADLINE_NS": f"{sizes.deadline_ns}LL",
        "N_CLOCKED": n_clocked(s),
    }
    lines = ["// Emitted by backends/tape/plan.py; edit there.", "#pragma once", '#include "layout.h"']
    return "\n".join([*lines, *(f"#define {name} {value}" for name, value in numbers.items())]) + "\n"


def n_clocked(shape: Shape) -> int:
    """Marks of one block in a step: five of each layer, the head, the choice, the step boundary."""
    return 3 + CLOCKED_A_LAYER * shape.n_layers


class TapeProgram(NamedTuple):
    """What the kernel of a model is compiled from: of weights their types and sizes, so they may be without memory."""

    sources: tuple[TapeSource, ...]
    names: tuple[str, ...]  # of the linear that each belongs to
    sizes: TapeSizes
    partition: Partition
    header: str

    @staticmethod
    def of(
        model: Model,
        layout: Layout,
        page_tokens: int,
        n_tokens: int,
        chip: Chip,
        *,
        kv_type: KVType,
        activations: Activations = "wide",
        n_compute_warps: int = 8,
    ) -> TapeProgram:
        names, sources = zip(*sources_of(model), strict=True)
        matrices = [source.matrix for source in sources]
        sizes = TapeSizes.of(
            model.shape,
            matrices,
            layout.n_slots,
            chip,
            n_compute_warps,
            kv_type=kv_type,
            page_tokens=page_tokens,
            max_pages=layout.max_pages,
            after_norms=_has_after_norms(model),
        )
        types = {matrix.weight_type for matrix in matrices}
        header = shape_header(model.shape, Traits.of(model), sizes, n_tokens, kv_type, types, activations)
        return TapeProgram(sources, names, sizes, make_partition(matrices, sizes.grid), header)


def on_tape(model: Model, tape: Tape, embedding: Tensor) -> Model:
    """The model with every matrix on the tape, and the embedding as the kernel has it; a tied head reads that."""
    at = 0
    weights: dict[int, Weight] = {}
    for name, linear in _linears(model):
        n_parts = len(_parts(name, linear.weight))
        weights[id(linear.weight)] = TapeWeight(tape, range(at, at + n_parts))
        at += n_parts
    weights[id(model.embedding)] = embedding
    return with_leaves(model, lambda weight: weights.get(id(weight), weight))


def on_tape_ahead(model: Model, program: TapeProgram) -> Model:
    """The same of a model without memory, on a tape without memory."""
    shape, meta = model.shape, model.device
    tape = Tape(torch.empty(program.partition.n_bytes, dtype=torch.uint8, device=meta), program.partition, model.dtype)
    widened = torch.empty((shape.vocab, shape.hidden), dtype=model.dtype, device=meta)
    return on_tape(model, tape, model.embedding if isinstance(model.embedding, Tensor) else widened)


# --- the step ---


class TapeStep:
    """Weights on the tape, the buffers between blocks, and the argument over them.

    `model` is the one that prompts go through: that which was given, or with `on_tape` one that has its matrices on the
    tape alone, so that a caller that frees the first keeps one copy of them.
    """

    def __init__(
        self,
        model: Model,
        memory: PagedMemory,
        tables: Tables,
        n_tokens: int,
        chip: Chip,
        *,
        kv_type: KVType,
        activations: Activations = "wide",
        n_compute_warps: int = 8,
        on_tape: bool = False,
    ) -> None:
        program = TapeProgram.of(
            model,
            tables.layout,
            memory.page_tokens,
            n_tokens,
            chip,
            kv_type=kv_type,
            activations=activations,
            n_compute_warps=n_compute_warps,
        )
        self.sizes, self.partition, self.header = program.sizes, program.partition, program.header
        self.buffers = self._weights(model, program.sources, [name.endswith("qkv") for name in program.names])
        between = self._between(model, tables.layout.vocab)
        self.buffers |= between
        self.written = tuple(between)
        self._caches(model, memory)
        self._device, self._notes_times = model.device, False
        self._viewed = viewed_memory(tables)
        self.argument = self._argument(tables)
        self.n_plain_bytes = sum(b.n_bytes for b in without_repeats(_weight_buffers(model)))  # what prompts could read
        self.n_scratch_bytes = scratch_elements(model) * model.dtype.itemsize
        named = zip(program.names, program.sources, strict=True)
        layers = [source.matrix for name, source in named if name != "head"]
        self.prompts = self._read_and_written(layers, model.dtype) if on_tape else self._read_plain()
        self.model = self.on_tape(model) if on_tape else model

    @property
    def n_bytes(self) -> int:
        """Of the tape itself."""
        return self.partition.n_bytes

    def _read_plain(self) -> str:
        return (
            f"a plain copy of {self.n_plain_bytes} bytes for prompts, "
            f"which could read the tape through {self.n_scratch_bytes} bytes of scratch"
        )

    def _read_and_written(self, layers: Sequence[TapeMatrix], dtype: torch.dtype) -> str:
        read = sum(matrix_bytes(m.weight_type, m.rows, m.columns, self.sizes.grid.n_compute_warps) for m in layers)
        written = sum(m.rows * m.columns for m in layers) * dtype.itemsize
        return (
            f"prompts read it through {self.n_scratch_bytes} bytes of scratch, in place of a plain copy of "
            f"{self.n_plain_bytes} bytes: a chunk reads {read} bytes and writes {written} before it multiplies"
        )

    def on_tape(self, model: Model) -> Model:
        """The model as prompts read it from this tape."""
        tape = Tape(self.buffers["tape"], self.partition, model.dtype)
        return on_tape(model, tape, self.buffers["embedding"])

    def built(self, plan_hash: int, executable: int) -> None:
        """What the step boundary compares at every step (I-10)."""
        self.argument.plan_hash, self.argument.epoch = plan_hash, executable

    def checked_argument(self, *, single: bool) -> Argument:
        """The argument of one launch, with every address through the gate of launches (E-1): BadPointer, by name, where
        it is not that of the tensor that it was made of, or where that tensor is no longer there."""
        expected = {name: _address(name, tensor, self._device) for name, tensor in self.buffers.items()}
        if not self._notes_times:
            expected["clock"] = 0
        expected |= {f"view.{name}": _address(name, memory, memory.device) for name, memory in self._viewed.items()}
        given = {name: getattr(self.argument, name) for name in _POINTERS}
        given |= {f"view.{name}": getattr(self.argument.view, name) for name in _VIEW}
        for name, address in given.items():
            if (address or 0) != expected.get(name, 0):
                raise BadPointer(
                    f"{name} of the persistent kernel is {address or 0:#x}, and its memory is at "
                    f"{expected.get(name, 0):#x}; it is not launched"
                )
        copied = Argument.from_buffer_copy(self.argument)
        copied.single = single
        return copied

    def note_times(self) -> None:
        """From the next launch on, every block notes when it begins each phase: for the timeline (`lab/tape.py`)."""
        self._notes_times = True
        self.argument.clock = self.buffers["clock"].data_ptr()

    def _weights(self, model: Model, sources: Sequence[TapeSource], of_qkv: Sequence[bool]) -> dict[str, Tensor]:
        s, device = model.shape, model.device
        attention = [_attention(model, number) for number in range(s.n_layers)]
        assert model.norm is not None
        norms = [norm for layer in model.layers for norm in (layer.attention_norm, layer.mlp_norm) if norm is not None]
        made = {
            "tape": tape_of(sources, self.partition, device, model.dtype),
            "tape_at": torch.tensor(self.partition.begins, dtype=torch.int64, device=device),
            "segments": torch.tensor(self._segments(of_qkv), dtype=torch.int32, device=device),
            "norms": _stacked([*norms, model.norm]),
            "frequencies": torch.stack([model.frequencies[rope].float() for rope in s.rope_kinds]),
            "windows": torch.tensor([one.shape.window or 0 for one in attention], dtype=torch.int32, device=device),
            "embedding": _plain_embedding(model),
        }
        biases = [one.qkv.bias for one in attention]
        if biases[0] is not None:
            made["qkv_bias"] = torch.stack([bias.float() for bias in biases if bias is not None]).contiguous()
        pairs = [(one.q_norm, one.k_norm) for one in attention]
        if pairs[0][0] is not None:
            made["qk_norms"] = _stacked([norm for pair in pairs for norm in pair if norm is not None])
        if _has_after_norms(model):
            layers = [layer for layer in model.layers if isinstance(layer, Layer)]
            after = [norm for layer in layers for norm in (layer.after_attention, layer.after_mlp) if norm is not None]
            made["after_norms"] = _stacked(after)
        return made

    def _segments(self, of_qkv: Sequence[bool]) -> list[Segment]:
        """As the kernel counts them: three for q, k and v, of which those after the last part are empty."""
        listed: list[Segment] = []
        for is_qkv, run in groupby(zip(of_qkv, self.partition.segments, strict=True), key=lambda pair: pair[0]):
            found = [segment for _, segment in run]
            listed += found
            if is_qkv:
                listed += [found[-1]._replace(n_tiles=0)] * (QKV_SEGMENTS - len(found))
        return listed

    def _between(self, model: Model, vocab: int) -> dict[str, Tensor]:
        """What blocks hand each other: a word has a value and its tag. Zeroed: no tag is 0."""
        s, n, device, n_blocks = model.shape, self.sizes.n_slots, model.device, self.sizes.grid.n_blocks
        heads = heads_of(s)
        words = {
            "x": (4, n, s.hidden),
            "qkv": (2, n, heads.qkv_width),
            "parts": (2, n, heads.n_heads, SPLITS, heads.head_width + 2),
            "attended": (2, n, heads.out_width // 2),
            "inside": (2, n, s.widest_ff // 2),
            "summaries": (n, n_blocks, SUMMARY_WORDS),
            "marks": (n_blocks + 2 * n + 1,),
            "clock": (n_blocks, n_clocked(s)),
            **({"squares": (4, n, s.hidden // 16)} if _has_after_norms(model) else {}),
        }
        made = {name: zeros(shape, torch.int64, device) for name, shape in words.items()}
        for name in ("logits", "scaled"):
            made[name] = zeros((n, vocab), torch.float32, device)
        made["state"] = zeros((2,), torch.int32, device)
        return made

    def _caches(self, model: Model, memory: PagedMemory) -> None:
        assert memory.kv is not None
        # Of a layer: keys and values, then where they are quantised the scales of both.
        kept = [(memory.kv.keys[i].parts, memory.kv.values[i].parts) for i in range(model.shape.n_layers)]
        places = [part.data_ptr() for both in kept for parts in zip(*both, strict=True) for part in parts]
        self.buffers["caches"] = torch.tensor(places, dtype=torch.int64, device=model.device)
        self.buffers["groups"] = torch.tensor([*memory.group_of.values()], dtype=torch.int32, device=model.device)

    def _argument(self, tables: Tables) -> Argument:
        argument = Argument(_TapeView(*tables.addresses, tables.grammar_address or None))
        for name, tensor in self.buffers.items():
            setattr(argument, name, tensor.data_ptr())
        argument.clock = None  # marks cost a little: `note_times` turns them on
        return argument


def viewed_memory(tables: Tables) -> dict[str, Tensor]:
    """What the kernel has of the tables, by name: the arenas, and the grammar memory where there is one."""
    grammars = {} if tables.grammars is None else {"grammars": as_tensor(tables.grammars.words)}
    return {
        "table": tables.table.memory,
        "admissions": tables.admissions.memory,
        "rings": tables.rings.memory,
    } | grammars


def _stacked(norms: Sequence[Norm]) -> Tensor:
    return torch.stack([norm.weight.float() for norm in norms]).contiguous()


def _address(name: str, tensor: Tensor, device: torch.device) -> int:
    """Of a tensor that a kernel may be launched on; BadPointer where it may not."""
    return checked(name, tensor, dtype=tensor.dtype, shape=[None] * tensor.dim(), device=device).data_ptr()


def tape_plan(model: Model, memory: PagedMemory, tables: Tables, step: TapeStep) -> Plan:
    """Everything that the kernel reads and writes, as one node: it runs the whole step. Its text says how many bytes
    the tape has, and what prompts read. `model` is the step's own."""
    viewed = viewed_memory(tables)
    own = [Buffer.of(name, memory) for name, memory in viewed.items()]
    own += [Buffer.of(name, part, is_weight=name not in step.written) for name, part in step.buffers.items()]
    kept = [Buffer.of(name, tensor) for name, tensor in memory_tensors(memory)]
    known = {buffer.address for buffer in own}
    plain = [b for b in without_repeats(_weight_buffers(model)) if b.address not in known]
    written = (*(name for name in viewed if name != "admissions"), *step.written, *(buffer.name for buffer in kept))
    read = (*written, "admissions", *(name for name in step.buffers if name not in step.written))
    node = Node("step", "tape", _run_whole, read, written, step.n_bytes, 1)
    constants = f"{step.header}tape of {step.n_bytes} bytes for {step.sizes.grid.n_blocks} blocks; {step.prompts}"
    return Plan(str(model.device), (*own, *kept, *plain), (node,), memory.page_tokens, constants)


def _run_whole() -> None:
    raise InternalError("only the kernel of the tape can run its step; use Start.step")


# --- the weights of a model, in the tape's order ---


def sources_of(model: Model) -> list[tuple[str, TapeSource]]:
    """Every matrix of the tape in its order, with the name of the linear that it belongs to."""
    return [(name, source_of(weight, paired=name.endswith("gate_up"))) for name, weight in _weights(model)]


def _weights(model: Model) -> Iterator[tuple[str, Weight]]:
    return ((name, part) for name, linear in _linears(model) for part in _parts(name, linear.weight))


def _parts(name: str, weight: Weight) -> list[Weight]:
    """A linear's matrices on the tape: q, k and v are one or, where their kinds differ, one for each part."""
    parts = weight.parts if isinstance(weight, Stack) and name.endswith("qkv") else ()
    differ = len({part.type if isinstance(part, Packed) else "plain" for part in parts}) > 1
    return list(parts) if differ else [weight]


def _plain_embedding(model: Model) -> Tensor:
    """Rows that the kernel reads as they are: packed ones are widened to the type of its activations, once."""
    if isinstance(model.embedding, Tensor):
        return model.embedding
    vocab, at_once, device = model.shape.vocab, 4096, model.device
    ids = (torch.arange(first, min(first + at_once, vocab), device=device) for first in range(0, vocab, at_once))
    return torch.cat([rows_of(model.embedding, some, model.dtype) for some in ids])


def _has_after_norms(model: Model) -> bool:
    layer = model.layers[0]
    return isinstance(layer, Layer) and layer.after_attention is not None


def _attention(model: Model, number: int) -> Attention:
    attention = model.layers[number].attention
    assert isinstance(attention, Attention)
    return attention


def _weight_buffers(model: Model) -> list[Buffer]:
    return [Buffer.of(name, tensor, is_weight=True) for name, tensor in tensors_of(model, "model")]


def _whole(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))


def _float(value: float) -> str:
    return f"{value!r}f" if "." in repr(value) or "e" in repr(value) else f"{value!r}.0f"
