"""How a block's shared memory is shared out, how many blocks run, and which variant of the kernel.

Arithmetic alone: `src/parts.h` and `src/attention_plan.h` lay the same bytes out, and tests compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from ostinato.backends.machine import Chip, arch_of
from ostinato.backends.tape.backend import group_of
from ostinato.backends.tape.partition import (
    TapeGrid,
    TapeMatrix,
    WeightType,
    largest_chunk,
    padded_columns,
    segments_of,
)
from ostinato.backends.torch.kv_types import KV_DTYPES
from ostinato.backends.torch.ops.attend import PRODUCT
from ostinato.cache.kv_bytes import KV_FORMATS
from ostinato.errors import HardwareCannot
from ostinato.models.shape import AttentionShape, Shape
from ostinato.options import KVType

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
ITEM_BYTES: Final = 32  # of what attention notes of a split
ITEMS_AT_ONCE: Final = 8  # splits that a block has noted, at most
LINES_BYTES: Final = 32 << 10  # for the queries, keys and values of those splits


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
        kept = multiplied_as(kv_type).itemsize
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
                cache_bytes=32 if is_quantised(kv_type) else 16,
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
    parts = grid.n_compute_warps * group_of(heads) * (heads.head_width + 8 + 2) * 4
    buffers = 2 if items > 1 and parts <= 20 << 10 else 1
    return items * (group_of(heads) + 2) * heads.head_width * kept_bytes + buffers * parts


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


def multiplied_as(kv_type: KVType) -> torch.dtype:
    return PRODUCT[getattr(torch, KV_DTYPES[kv_type])]


def is_quantised(kv_type: KVType) -> bool:
    return KV_FORMATS[kv_type].block is not None


def _items(heads: AttentionShape, grid: TapeGrid, n_slots: int, kept_bytes: int) -> int:
    """Splits that a block attends to at once."""
    group = group_of(heads)
    lines = (group + 2) * heads.head_width * kept_bytes
    most = -(-n_slots * (heads.n_heads // group) * SPLITS // grid.n_blocks)
    return min(ITEMS_AT_ONCE, LINES_BYTES // lines, most)


def heads_of(shape: Shape) -> AttentionShape:
    """How its layers attend, which on the tape is alike but for the window and the rope (`why_not_shape`)."""
    return shape.attention[0]


def _whole(n: int, unit: int) -> int:
    return -(-n // unit) * unit
