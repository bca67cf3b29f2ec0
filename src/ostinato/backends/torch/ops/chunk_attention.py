"""A chunk's attention: append k and v, then softmax(scale * q k^T) v of each row over its own sequence so far.

A chunk is up to M rows of one or several sequences, each with its own position; rows from n on only fill it up and are
neither read nor written. Everything is computed in float32; q, K and V are rounded where they are kept, and q once more
to what the fast kernels multiply: `triton/chunk_attention.py`, bound by the products at long prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ostinato.backends.torch.ops.attend import PRODUCT, Heads, PagedKV, attend_row_torch, rotate_qk_torch, visible

TILE_ROWS: Final = 64  # rows of one sequence that a kernel attends for together, at most


@dataclass(frozen=True, slots=True)
class Chunk:
    """Which rows of which sequences: int32 on the device, so that one captured graph serves every chunk of a size."""

    n: Tensor  # [1], live rows
    n_tiles: Tensor  # [1]
    tiles: Tensor  # [M, 4], as `chunk_tables` has them
    positions: Tensor  # [M], by row
    parts: Tensor  # [M], by row: whose page table
    pages: Tensor  # [parts, max_pages]: the page tables of one group of layers
    rope_set: Tensor | None = None  # [M], by row: of the frequencies; None: the first


@dataclass(frozen=True, slots=True)
class ChunkTables:
    """The rows of a chunk as the kernels look them up: int32."""

    tiles: NDArray[np.int32]  # [tiles, 4]: the first row, how many, the first one's position, their part
    positions: NDArray[np.int32]  # [rows]
    parts: NDArray[np.int32]  # [rows]


def chunk_tables(starts: Sequence[int], counts: Sequence[int]) -> ChunkTables:
    """Parts of so many rows from these positions on, one after the other.

    >>> chunk_tables([7, 0], [66, 3]).tiles.tolist()
    [[0, 64, 7, 0], [64, 2, 71, 0], [66, 3, 0, 1]]
    """
    tiles, row = [], 0
    for part, (start, n) in enumerate(zip(starts, counts, strict=True)):
        tiles += [[row + at, min(TILE_ROWS, n - at), start + at, part] for at in range(0, n, TILE_ROWS)]
        row += n
    positions = [np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
    parts = np.repeat(np.arange(len(counts)), counts)
    return ChunkTables(
        np.array(tiles, np.int32).reshape(-1, 4), np.concatenate(positions).astype(np.int32), parts.astype(np.int32)
    )


def append_chunk_torch(qkv: Tensor, q: Tensor, kv: PagedKV, chunk: Chunk, heads: Heads) -> None:
    """qkv [M, (heads + 2 kv_heads) * width] to q [M, heads, width], after norm and RoPE, and to k and v in the store.

    qkv and q are float32, bfloat16 or float16; live rows are written.
    """
    n = int(chunk.n)
    positions, parts = chunk.positions[:n].long(), chunk.parts[:n].long()
    rotated, k, v = rotate_qk_torch(qkv[:n], positions, heads, None if chunk.rope_set is None else chunk.rope_set[:n])
    q[:n] = rotated.to(q.dtype)
    if heads.reads_kv:
        return
    pages = chunk.pages[parts, positions // kv.page_tokens].long()
    kv.append(pages * kv.page_tokens + positions % kv.page_tokens, k, v)


def chunk_attention_torch(q: Tensor, attended: Tensor, kv: PagedKV, chunk: Chunk, heads: Heads) -> None:
    """q [M, heads, width], after norm and RoPE, to seen [M, heads * width] in the same type; live rows are written."""
    for row in range(int(chunk.n)):
        seen = visible(int(chunk.positions[row]), heads.window, q.device)
        cells = kv.cells(chunk.pages[int(chunk.parts[row])], seen)
        rounded = q[row].to(PRODUCT[kv.keys.dtype]).float()
        attended[row] = attend_row_torch(rounded * heads.scale, *kv.read(cells), heads).flatten().to(attended.dtype)
