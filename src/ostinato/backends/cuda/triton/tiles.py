"""How the products of a step are cut into programs: by the weight's type and shape, never by the number of rows.

The cut decides the order in which sums are added and so the bits; the table is tuned by measurement, on the chip that
`machine.TUNED` is. Where a block has less shared memory, fewer iterations are in flight and the cut stays (`fitted`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from ostinato.backends.cuda.chip import stages_that_fit
from ostinato.backends.cuda.packed import Packed
from ostinato.backends.cuda.packed_types import stays_packed
from ostinato.backends.cuda.triton.unpack import INTERPRETED
from ostinato.backends.machine import Chip
from ostinato.backends.torch.ops.matmul import Epilogue, InputNorm
from ostinato.backends.weights import shape_of
from ostinato.files.checkpoint import TensorInfo
from ostinato.files.quants import BLOCKS

ROWS: Final = 16  # of a tile: what one tensor-core instruction takes at once


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: block_n outputs to a program, block_k columns to an iteration of its loop, `slices` of
    those to a warp each (or 1: the warps share the outputs), split_k programs to an output, num_stages iterations in
    flight."""

    block_n: int
    block_k: int
    slices: int = 1
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    few: bool = True  # packed weights: up to 8 rows take a shorter way of the same bits
    max_registers: int | None = None  # of a thread, where more programs at once are worth it
    apart: bool = False  # gated, more than 8 rows: gate's columns first, then up's; the same bits in half the registers


# By class of weight type, of outputs (a program of a gated product has block_n of gate and as many of up) and of
# columns, or by the first of these alone where the others make no difference: the longest key decides. The one table
# that is tuned by measurement (`bench/kernels.py`). Never by rows: the cut decides the bits.
TILES: Final[Mapping[tuple[str, ...], Tile]] = MappingProxyType(
    {
        ("bf16",): Tile(64, 128),
        ("bf16", "narrow", "short"): Tile(32, 256, slices=4),
        ("bf16", "narrow", "long"): Tile(64, 128, split_k=4),
        ("f16",): Tile(32, 256, slices=4, num_stages=3),
        ("f16", "narrow"): Tile(16, 256, slices=4),
        ("f32",): Tile(32, 128, slices=4, num_stages=3),
        ("q4 q5", "narrow", "short"): Tile(32, 512, slices=4, num_stages=3),
        ("q4 q5", "narrow", "long"): Tile(32, 512, slices=4),
        ("q4 q5", "middle", "short"): Tile(32, 512, slices=4, num_stages=3),
        ("q4 q5", "middle", "long"): Tile(32, 512, slices=4),
        ("q4 q5", "wide"): Tile(64, 256, num_warps=2, num_stages=3),
        ("q8",): Tile(32, 256, slices=4),
        ("q8", "narrow"): Tile(16, 512, slices=4),
        ("k4",): Tile(32, 512, slices=2, num_warps=2, num_stages=3),
        ("k4", "narrow", "long"): Tile(32, 512, slices=2, split_k=2, num_warps=2, num_stages=3),
        ("k4", "wide"): Tile(64, 256, num_warps=2, num_stages=3),
        ("k5",): Tile(32, 512, slices=2, num_warps=2, num_stages=3),
        ("k5", "narrow", "long"): Tile(32, 1024, slices=4, num_stages=3),
        ("k5", "wide"): Tile(64, 256, num_warps=2, num_stages=3),
        # Units of 16 bytes: the compiler keeps them out of shared memory only with 64 outputs to a warp.
        ("k6", "narrow"): Tile(64, 128, split_k=8, num_warps=1),
        ("k6", "middle"): Tile(64, 128, split_k=2, num_warps=1),
        ("k6", "wide"): Tile(64, 128, num_warps=1),
    }
)
_CLASSES: Final = {
    "Q4_0": "q4 q5", "Q4_1": "q4 q5", "Q5_0": "q4 q5", "Q5_1": "q4 q5", "Q8_0": "q8", "Q4_K": "k4", "Q5_K": "k5",
    "Q6_K": "k6", "MXFP4": "q4 q5", torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32",
}  # fmt: skip
NARROW_OUTPUTS: Final = 6144  # up to so many a matrix is narrow
WIDE_OUTPUTS: Final = 12288  # from so many on it is wide
LONG_COLUMNS: Final = 6144


def class_of(weight: Tensor | Packed, epilogue: Epilogue = "store") -> tuple[str, str, str]:
    """The longest key that a product can have in TILES."""
    n, k = shape_of(weight)
    n = n // 2 if epilogue == "gated" else n
    outputs = "narrow" if n <= NARROW_OUTPUTS else "wide" if n >= WIDE_OUTPUTS else "middle"
    kind = _CLASSES[weight.type if isinstance(weight, Packed) else weight.dtype]
    return kind, outputs, "long" if k > LONG_COLUMNS else "short"


def tile_for(weight: Tensor | Packed, epilogue: Epilogue = "store") -> Tile:
    """The cut of a product: what TILES says, made to fit a matrix that it does not divide."""
    key = class_of(weight, epilogue)
    tile = next(TILES[key[:n]] for n in (3, 2, 1) if key[:n] in TILES)
    if not isinstance(weight, Packed):
        return tile
    if INTERPRETED.value:  # there a product's bits may depend on how many columns it has; on a GPU they do not
        tile = replace(tile, few=False)
    # Two matrices at once: half the outputs, or registers run out.
    if epilogue == "gated" and weight.type not in ("Q4_K", "Q6_K"):
        tile = replace(tile, block_n=tile.block_n // 2)
    unit = 256 if weight.type in ("Q4_K", "Q5_K") else 64 if weight.cols % 64 == 0 else 32
    slices = tile.slices
    while weight.cols // unit % slices:
        slices //= 2
    if slices == tile.slices:
        return tile
    return replace(tile, slices=slices, num_warps=slices if slices > 1 else max(tile.block_n // 32, 1))


@dataclass(frozen=True, slots=True)
class Given:
    """The inputs of a product, as far as they take memory: rows of a tile, and bytes of a number of x and of a column
    of its norm's weight and bias."""

    rows: int
    item_bytes: int
    norm_bytes: int = 0

    @staticmethod
    def of(rows: int, x: Tensor, norm: InputNorm | None = None) -> Given:
        weights = () if norm is None else (norm.weight, norm.bias)
        return Given(rows, x.element_size(), sum(one.element_size() for one in weights if one is not None))


def step_columns(weight: Tensor | Packed, cut: Tile) -> int:
    """Columns of an iteration: as many as asked for; of a packed weight, whole units that divide its columns."""
    if isinstance(weight, Tensor):
        return cut.block_k
    if weight.type in ("Q4_K", "Q5_K"):
        unit = most = 256
    elif weight.type == "Q6_K":
        unit, most = 64, 256
    else:
        unit = weight.unit_bytes if weight.type == "Q8_0" and weight.cols % 64 else 2 * weight.unit_bytes
        most = cut.block_k
    n_units = weight.cols // unit // cut.slices
    wanted = max(min(cut.block_k // cut.slices, most) // unit, 1)
    return unit * cut.slices * max(d for d in range(1, wanted + 1) if n_units % d == 0)


# Bytes of scales of 256 columns that Q6_K reads beyond the file's: two units share a word, and each reads it.
_READ_TWICE: Final = {"Q6_K": 18}


def iteration_bytes(weight: Tensor | Packed, cut: Tile, epilogue: Epilogue, given: Given) -> int:
    """Bytes that an iteration of a product's loop reads ahead, at most: weights, inputs and the norm of the inputs."""
    columns, outputs = step_columns(weight, cut), cut.block_n * (2 if epilogue == "gated" else 1)
    if isinstance(weight, Packed):
        block, more = BLOCKS[weight.type], _READ_TWICE.get(weight.type, 0)
        row_bytes = -(-columns * (block.n_bytes * (256 // block.elements) + more) // 256)
    else:
        row_bytes = columns * weight.element_size()
    return outputs * row_bytes + columns * (given.rows * given.item_bytes + given.norm_bytes)


def fitted(cut: Tile, weight: Tensor | Packed, epilogue: Epilogue, given: Given, chip: Chip) -> Tile:
    """The same cut with as many stages as a block's shared memory has room for, those of the table at most."""
    beside = 0
    if given.norm_bytes:  # inputs that are normed lie there once more, as they are multiplied
        beside = given.rows * step_columns(weight, cut) * (2 if weight.dtype == torch.bfloat16 else 4)
    room = stages_that_fit(chip, cut.num_stages, iteration_bytes(weight, cut, epilogue, given), beside)
    return cut if room == cut.num_stages else replace(cut, num_stages=room)


def least_bytes(tensor: TensorInfo) -> int:
    """Shared memory that the product of a step with a matrix of a file needs, with the fewest stages."""
    rows, cols = prod(tensor.shape[:-1]), tensor.shape[-1]
    meta, dtypes = torch.device("meta"), {"F32": torch.float32, "F16": torch.float16}
    weight: Tensor | Packed
    if stays_packed(tensor.type, (rows, cols)):
        weight = Packed(tensor.type, rows, cols, ())
    else:
        weight = torch.empty((rows, cols), dtype=dtypes.get(tensor.type, torch.bfloat16), device=meta)
    return iteration_bytes(weight, tile_for(weight), "store", Given(ROWS, 4))
