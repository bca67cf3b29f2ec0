"""A prompt's attention, chunk by chunk: append k and v, then softmax(scale * q k^T) v of each row over all before it.

A chunk is up to M rows of one sequence at positions start, start + 1, ...; rows from n on only fill it up and are
neither read nor written. Everything is computed in float32; q, K and V are rounded where they are kept, and q once more
to what the fast kernels multiply: `triton/chunk_attention.py`, bound by the products at long prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ostinato.backends.torch.ops.attend import PRODUCT, Heads, PagedKV, attend_row_torch, rotate_qk_torch, visible


@dataclass(frozen=True, slots=True)
class Chunk:
    """Which rows of which sequence: int32 on the device, so that one captured graph serves every chunk of a size."""

    start: Tensor  # [1], the position of the first row
    n: Tensor  # [1], live rows
    pages: Tensor  # [max_pages] or [1, max_pages], of the sequence


def append_chunk_torch(qkv: Tensor, q: Tensor, kv: PagedKV, chunk: Chunk, heads: Heads) -> None:
    """qkv [M, (heads + 2 kv_heads) * width] to q [M, heads, width], normed and turned, and to k and v in the store.

    qkv and q are float32, bfloat16 or float16; live rows are written.
    """
    start, n = int(chunk.start), int(chunk.n)
    positions = visible(start + n - 1, n, qkv.device)
    rotated, k, v = rotate_qk_torch(qkv[:n], positions, heads)
    q[:n] = rotated.to(q.dtype)
    kv.append(kv.cells(chunk.pages.flatten(), positions), k, v)


def chunk_attention_torch(q: Tensor, attended: Tensor, kv: PagedKV, chunk: Chunk, heads: Heads) -> None:
    """q [M, heads, width], normed and turned, to seen [M, heads * width] in the same type; live rows are written."""
    start = int(chunk.start)
    for row in range(int(chunk.n)):
        cells = kv.cells(chunk.pages.flatten(), visible(start + row, heads.window, q.device))
        rounded = q[row].to(PRODUCT[kv.keys.dtype]).float()
        attended[row] = attend_row_torch(rounded * heads.scale, *kv.read(cells), heads).flatten().to(attended.dtype)
