"""Latent attention around its softmax: rotary positions, norm and append; products with a matrix for each head.

    rows = bind_latent_rows(heads, row, query, kv, rows, latent)                         # of a step or of a chunk
    absorb = bind_heads_product(heads, k_b, query[:, rotated:], n, n_heads=..., ...)     # and expand, by v_b

What they compute is `torch/ops/latent.py`. x and out are float32 or bfloat16 [rows, ...], weights float32, float16,
bfloat16 or `Packed` [n_heads * outputs, columns], sums float32. Written in place: query and one cell of the store for
each live row; out. Rows from n on are neither read nor written, and their programs end at once. Bound in a step by
reading the weights once for each 16 rows, in a chunk by the tensor cores.

A row's bits depend on the row alone: columns are summed in one order, and tiles follow from the weight's type and from
whether rows are a step's or a chunk's, never from how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.chip import padded, stages_that_fit
from ostinato.backends.cuda.launch import EITHER, FLOATS, TritonLaunch, checked, grouped
from ostinato.backends.cuda.packed import Packed, for_a_gpu
from ostinato.backends.cuda.triton.attend import narrowed as rounded
from ostinato.backends.cuda.triton.attend import rope_cos_sin, rotated
from ostinato.backends.cuda.triton.gemm import GemmTile, unit_values
from ostinato.backends.cuda.triton.matmul import weight_arguments
from ostinato.backends.cuda.triton.unpack import DENSE, INTERPRETED, Q8_0, narrowed, operand, places_of_rows
from ostinato.backends.machine import TUNED, Chip
from ostinato.backends.torch.ops.attend import StepRows
from ostinato.backends.torch.ops.chunk_attention import Chunk
from ostinato.backends.torch.ops.latent import LatentHeads, LatentKV
from ostinato.backends.torch.ops.q8_0 import BLOCK as Q8_BLOCK
from ostinato.backends.torch.weight import Weight
from ostinato.backends.weights import shape_of
from ostinato.errors import InternalError

STEP_ROWS: Final = 16  # of a tile of a step: what one tensor-core instruction takes at once

# By class of weight type: of a step, whose programs are many and small, and of a chunk. The tile decides the bits.
STEP_TILES: Final = {
    "bf16": GemmTile(STEP_ROWS, 32, 128, num_warps=4, num_stages=4),
    "f16": GemmTile(STEP_ROWS, 32, 64, num_warps=4, num_stages=3),
    "f32": GemmTile(STEP_ROWS, 32, 64, num_warps=4, num_stages=3),
    "packed": GemmTile(STEP_ROWS, 32, 64, num_warps=4, num_stages=3),
}
CHUNK_TILES: Final = {
    "bf16": GemmTile(128, 64, 64, num_warps=4, num_stages=3),
    "f16": GemmTile(128, 64, 32, num_warps=4, num_stages=3),
    "f32": GemmTile(64, 64, 32, num_warps=4, num_stages=3),
    "packed": GemmTile(128, 64, 64, num_warps=4, num_stages=3),
}


@dataclass(frozen=True, slots=True)
class RowSizes:
    """What `latent_rows_kernel` is compiled for; `d` and the next five as `rotated` reads them."""

    d: int  # of the rotated part, a power of two
    width: int
    n_rotary: int
    n_rope_sets: int
    neighbours: bool
    normed: int  # 0: the rotated parts of queries and keys have no norm
    heads: int
    plain: int
    query: int  # width of a query before it is absorbed
    rank: int
    rank_d: int  # as many or more, a power of two
    key: int
    page: int
    by_owner: bool  # positions and rope sets are by slot, as a step has them; else by row
    q8: bool


def bind_latent_rows(
    heads: Tensor, row: Tensor, query: Tensor, kv: LatentKV, rows: StepRows | Chunk, latent: LatentHeads
) -> TritonLaunch:
    """Check everything once and return the launch; what it computes is `latent_rows_torch`."""
    m, device, n = heads.shape[0], heads.device, latent.n_heads
    checked("frequencies", latent.frequencies, dtype=torch.float32, shape=(1, latent.rotated // 2), device=device)
    norm = checked("norm", latent.norm, dtype=FLOATS, shape=(latent.rank,), device=device)
    rope = {"frequencies": latent.frequencies, "amplitude": latent.amplitude, "norm": norm, "eps": latent.norm_eps}
    given = {
        "heads": checked("heads", heads, dtype=EITHER, shape=(m, n * latent.query_width), device=device),
        "row": checked("row", row, dtype=EITHER, shape=(m, latent.key_width), device=device),
        "query": checked("query", query, dtype=EITHER, shape=(m, n * latent.key_width), device=device),
        "kv": store_arguments(kv, latent, heads),
        "rows": _placed(rows, m, device, len(latent.frequencies)),
        "rope": grouped(rope),
        "S": RowSizes(
            d=padded(latent.rotated),
            width=latent.rotated,
            n_rotary=latent.rotated,
            n_rope_sets=len(latent.frequencies),
            neighbours=latent.pairing == "neighbours",
            normed=0,
            heads=n,
            plain=latent.plain,
            query=latent.query_width,
            rank=latent.rank,
            rank_d=padded(latent.rank),
            key=latent.key_width,
            page=kv.page_tokens,
            by_owner=isinstance(rows, StepRows),
            q8=kv.scales is not None,
        ),
    }
    return TritonLaunch.of(latent_rows_kernel, (m, n + 1), given, num_warps=2)


def store_arguments(kv: LatentKV, latent: LatentHeads, stand_in: Tensor) -> Any:
    """A layer's store as kernels take it; `stand_in` takes the place of scales that there are none of."""
    cells, device = kv.keys.shape[0], stand_in.device
    checked("keys", kv.keys, dtype=kv.keys.dtype, shape=(cells, latent.key_width), device=device)
    if kv.scales is not None:
        if latent.rotated % Q8_BLOCK or latent.rank % Q8_BLOCK:
            raise InternalError(f"q8_0 keys of {latent.rotated} and {latent.rank} numbers are no whole blocks")
        shape = (cells, latent.key_width // Q8_BLOCK)
        checked("scales of keys", kv.scales, dtype=torch.float16, shape=shape, device=device)
    return grouped({"key": kv.keys, "scales": stand_in if kv.scales is None else kv.scales})


def _placed(rows: StepRows | Chunk, m: int, device: torch.device, n_rope_sets: int) -> Any:
    """Where rows are and whose: by slot in a step, by row in a chunk."""
    if isinstance(rows, StepRows):
        found = {"n": rows.n_rows, "owner": rows.row_slot, "position": rows.position}
    else:
        found = {"n": rows.n, "owner": rows.parts, "position": rows.positions}
    if n_rope_sets > 1 and rows.rope_set is not None:
        found["rope_set"] = rows.rope_set
    given = {
        name: checked(name, tensor, dtype=torch.int32, shape=(1 if name == "n" else m,), device=device)
        for name, tensor in found.items()
    }
    pages = checked("pages", rows.pages, dtype=torch.int32, shape=(1, None), device=device, columns=True)
    return grouped({**given, "pages": pages, "table_stride": pages.stride(0)})


@triton.jit
def latent_rows_kernel(heads, row, query, kv, rows, rope, S: tl.constexpr):
    """One program: a query head of a row, or, the last of its row, the key."""
    number, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if number < tl.load(rows.n):
        owner = tl.load(rows.owner + number)
        place = owner if S.by_owner else number
        p = tl.load(rows.position + place)
        frequencies = rope.frequencies
        if S.n_rope_sets > 1:
            frequencies += tl.load(rows.rope_set + place) * (S.n_rotary // 2)
        cos, sin = rope_cos_sin(p, frequencies, rope.amplitude, S)
        one = tl.zeros([1, 1], tl.int32)
        r = tl.arange(0, S.d)[None, :]
        mask = r < S.width
        if part < S.heads:
            at = heads + number * (S.heads * S.query) + part * S.query + S.plain
            x = rotated(at + one, mask, rope.norm, cos, sin, rope.eps, S)
            to = query + number * (S.heads * S.key) + part * S.key
            tl.store(to + r, rounded(x, query.dtype.element_ty), mask=mask)
        else:
            line = row + number * S.key
            x = rotated(line + S.rank + one, mask, rope.norm, cos, sin, rope.eps, S)
            d = tl.arange(0, S.rank_d)[None, :]
            compressed = tl.load(line + d, mask=d < S.rank, other=0.0).to(tl.float32)
            compressed *= tl.rsqrt(tl.sum(compressed * compressed, 1) / S.rank + rope.eps)[:, None]
            compressed *= tl.load(rope.norm + d, mask=d < S.rank, other=0.0).to(tl.float32)
            page = tl.load(rows.pages + owner.to(tl.int64) * rows.table_stride + p // S.page).to(tl.int64)
            cell = page * S.page + p % S.page
            put_key(kv, cell, x, 0, S.width, S.d, S)
            put_key(kv, cell, compressed, S.width, S.rank, S.rank_d, S)


@triton.jit
def put_key(kv, cell, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, S: tl.constexpr):
    """Numbers FIRST to FIRST + WIDTH of a cell's key become x [1, D], rounded to the store's type."""
    d = tl.arange(0, D)[None, :]
    to = kv.key + cell * S.key + FIRST + d
    if S.q8:
        # Divisions are rounded correctly, and quotients to even, as the twin's: the bytes are the same.
        blocks = tl.reshape(x, [D // 32, 32])
        scale = tl.div_rn(tl.max(tl.abs(blocks), 1), 127.0).to(tl.float16)
        divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)
        quotients = tl.div_rn(blocks, divisor[:, None] + tl.zeros([D // 32, 32], tl.float32))
        whole = tl.minimum(tl.maximum((quotients + 12582912.0) - 12582912.0, -127.0), 127.0)
        tl.store(to, tl.reshape(whole, [1, D]).to(tl.int8), mask=d < WIDTH)
        b = tl.arange(0, D // 32)
        tl.store(kv.scales + cell * (S.key // 32) + FIRST // 32 + b, scale, mask=b < WIDTH // 32)
    else:
        tl.store(to, rounded(x, kv.key.dtype.element_ty), mask=d < WIDTH)


def bind_heads_product(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    n_rows: Tensor,
    *,
    n_heads: int,
    x_step: int,
    out_step: int,
    step: bool,
    tile: GemmTile | None = None,
    chip: Chip = TUNED,
) -> TritonLaunch:
    """The products of all heads as one call; what they compute is `heads_product_torch`. `step`: rows are a step's, of
    which there are few, else a chunk's."""
    part, device, m = for_a_gpu(weight), x.device, len(x)
    rows, k = shape_of(part)
    if rows % n_heads:
        raise InternalError(f"{rows} rows of heads are not whole matrices of {n_heads} heads")
    n, kind, precision = rows // n_heads, "packed", "ieee"
    if isinstance(part, Tensor):
        kind = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[part.dtype]
        if chip.has_ptx and not INTERPRETED.value:
            precision = {"bf16": "ieee", "f16": "tf32", "f32": "tf32x3"}[kind]
    cut = tile or fitted((STEP_TILES if step else CHUNK_TILES)[kind], part, x, chip)
    widths = {"x": (n_heads - 1) * x_step + k, "out": (n_heads - 1) * out_step + n}
    for name, tensor in (("x", x), ("out", out)):
        if tensor.shape[-1] < widths[name]:
            raise InternalError(f"{name} has {tensor.shape[-1]} columns; the heads touch {widths[name]}")
    given = {
        "x_ptr": checked("x", x, dtype=EITHER, shape=(m, None), device=device, columns=True),
        "out_ptr": checked("out", out, dtype=EITHER, shape=(m, None), device=device, columns=True),
        "n_rows_ptr": checked("n_rows", n_rows, dtype=torch.int32, shape=(1,), device=device),
        **weight_arguments(part, device),
        **{"N": n, "K": k, "X_STRIDE": x.stride(0), "X_STEP": x_step, "OUT_STRIDE": out.stride(0)},
        **{"OUT_STEP": out_step, "PRECISION": precision},
        **{"BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k},
    }
    grid = (triton.cdiv(m, cut.block_m), triton.cdiv(n, cut.block_n), n_heads)
    return TritonLaunch.of(heads_product_kernel, grid, given, num_warps=cut.num_warps, num_stages=cut.num_stages)


def fitted(cut: GemmTile, weight: Tensor | Packed, x: Tensor, chip: Chip) -> GemmTile:
    """The same tile with as many stages as a block's shared memory has room for, those of the table at most."""
    n_bytes = cut.block_k * (cut.block_m * x.element_size() + cut.block_n * weight.dtype.itemsize)
    return replace(cut, num_stages=stages_that_fit(chip, cut.num_stages, n_bytes))


@triton.jit
def heads_product_kernel(
    x_ptr, w_ptr, high_ptr, w_scale_ptr, block_ptr, out_ptr, n_rows_ptr,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, X_STEP: tl.constexpr, OUT_STRIDE: tl.constexpr,
    OUT_STEP: tl.constexpr, TYPE: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr, NARROW: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of BLOCK_N outputs of one head."""
    head, n_rows = tl.program_id(2), tl.load(n_rows_ptr)
    if tl.program_id(0) * BLOCK_M < n_rows:
        rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows and outputs past the end read the last one's, and are never stored.
        x_at = x_ptr + tl.minimum(rows, n_rows - 1)[:, None].to(tl.int64) * X_STRIDE + head * X_STEP
        inside = head * N + tl.minimum(n, N - 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if TYPE == DENSE:
            w_at = w_ptr + inside[:, None].to(tl.int64) * K
            for start in tl.range(0, K, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)[None, :]
                if K % BLOCK_K == 0:
                    x, w = tl.load(x_at + k), tl.load(w_at + k)
                else:
                    x, w = tl.load(x_at + k, mask=k < K, other=0.0), tl.load(w_at + k, mask=k < K, other=0.0)
                acc = tl.dot(operand(x, NARROW), tl.trans(operand(w, NARROW)), acc, input_precision=PRECISION)
        else:
            UNIT: tl.constexpr = W if TYPE == Q8_0 else 2 * W
            quants, high, scales, blocks = places_of_rows(
                w_ptr, high_ptr, w_scale_ptr, block_ptr, inside, K, TYPE, W, RUN
            )  # fmt: skip
            for u in tl.range(0, K // UNIT):
                x = tl.load(x_at + (u * UNIT + tl.arange(0, UNIT))[None, :])
                w = unit_values(quants, high, scales, blocks, u, K, TYPE, W, RUN)
                acc = tl.dot(operand(x, True), tl.trans(narrowed(w)), acc)
        to = out_ptr + rows[:, None].to(tl.int64) * OUT_STRIDE + head * OUT_STEP + n[None, :]
        mask = (rows < n_rows)[:, None] & (n < N)[None, :]
        if out_ptr.dtype.element_ty == tl.bfloat16:
            tl.store(to, narrowed(acc), mask=mask)
        else:
            tl.store(to, acc, mask=mask)
