"""The definition of multi-head latent attention (`LatentShape`) as kernels compute it, in steps and in prompts.

    latent_rows     queries and the compressed row of a position: rotary positions, norm, append
    heads_product   absorb: the plain part of each query times k_b; expand: what a head has seen times v_b
    attend_latent   softmax(scale * q k^T) v, where v is the last `rank` numbers of k

A position keeps one key for all heads, as `torch/kv_store.py` `ValuesInKeys` has it: its rotated part, then the
compressed row. Everything is computed in float32, and rounded where the kernels round: `triton/latent.py`,
`triton/attend_latent.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.backends.torch.ops.attend import PRODUCT, StepRows
from ostinato.backends.torch.ops.chunk_attention import Chunk
from ostinato.backends.torch.ops.q8_0 import BLOCK, dequantize_q8_0_torch, quantize_q8_0_torch
from ostinato.backends.torch.ops.rms_norm import rms_norm_torch
from ostinato.backends.torch.ops.rope import rope_torch
from ostinato.backends.torch.weight import Weight, dense_of, dtype_of
from ostinato.errors import BadOption
from ostinato.models.rope import Pairing


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """How a layer attends: sizes, scale, rotary positions and the norm of compressed rows."""

    n_heads: int
    rank: int  # of the compressed row
    rotated: int  # width of a key's rotated part, which stands before it
    plain: int  # width of a query's plain part, before its own rotated one
    scale: float
    frequencies: Tensor  # float32 [sets, rotated / 2]
    norm: Tensor  # [rank]
    norm_eps: float
    amplitude: float = 1.0
    pairing: Pairing = "neighbours"

    @property
    def key_width(self) -> int:
        return self.rotated + self.rank

    @property
    def query_width(self) -> int:
        """Of a query before it is absorbed."""
        return self.plain + self.rotated


@dataclass(frozen=True, slots=True)
class LatentKV:
    """The keys of one layer, [cells, rotated + rank]; int8 has scales float16, one for every 32."""

    keys: Tensor
    page_tokens: int
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        if self.keys.dtype not in PRODUCT:
            raise BadOption(f"keys are {self.keys.dtype}; they must be one of {[*PRODUCT]}")
        if self.keys.dtype == torch.int8 and (self.scales is None or self.keys.shape[-1] % BLOCK):
            raise BadOption(f"int8 keys need scales and a width that is a multiple of {BLOCK}")

    def cells(self, pages: Tensor, positions: Tensor) -> Tensor:
        """Where positions [n] lie, by one page table [max_pages] or each by its own [n, max_pages]: int64 [n]."""
        at = (positions // self.page_tokens).long()
        page = pages[at] if pages.dim() == 1 else pages.gather(1, at[:, None])[:, 0]
        return page.long() * self.page_tokens + positions % self.page_tokens

    def append(self, cells: Tensor, keys: Tensor) -> None:
        """Write keys [n, width] to cells [n], rounded to the store's type."""
        if self.scales is None:
            self.keys[cells] = keys.to(self.keys.dtype)
        else:
            self.keys[cells], self.scales[cells] = quantize_q8_0_torch(keys)

    def read(self, cells: Tensor) -> Tensor:
        """Keys of cells [n] as they are multiplied, float32 [n, width]."""
        if self.scales is None:
            return self.keys[cells].float()
        return dequantize_q8_0_torch(self.keys[cells], self.scales[cells], PRODUCT[torch.int8]).float()


@dataclass(frozen=True, slots=True)
class _Placed:
    """The live rows of a step or a chunk: where each is, and whose pages it has."""

    n: int
    positions: Tensor  # [n]
    pages: Tensor  # [n, max_pages]
    rope_set: Tensor | None  # [n]

    @staticmethod
    def of(rows: StepRows | Chunk) -> _Placed:
        if isinstance(rows, StepRows):
            n = int(rows.n_rows)
            slots = rows.row_slot[:n].long()
            rope_set = None if rows.rope_set is None else rows.rope_set[slots]
            return _Placed(n, rows.position[slots].long(), rows.pages[slots], rope_set)
        n = int(rows.n)
        rope_set = None if rows.rope_set is None else rows.rope_set[:n]
        return _Placed(n, rows.positions[:n].long(), rows.pages[rows.parts[:n].long()], rope_set)


def latent_rows_torch(
    heads: Tensor, row: Tensor, query: Tensor, kv: LatentKV, rows: StepRows | Chunk, latent: LatentHeads
) -> None:
    """heads [rows, n_heads * query_width], of each head its plain part, then the one to rotate; row [rows, key_width],
    the compressed row, then the part of its key to rotate.

    The rotated part of each query goes to the first columns of its head in query [rows, n_heads * key_width], and the
    key, rotated part and normed row, to the store. Live rows are written."""
    placed = _Placed.of(rows)
    n = placed.n
    rotary = heads[:n].float().view(n, latent.n_heads, latent.query_width)[..., latent.plain :]
    compressed, key = torch.split(row[:n].float(), [latent.rank, latent.rotated], 1)
    sets = 0 if placed.rope_set is None else placed.rope_set.long()
    angles = placed.positions.float().unsqueeze(-1) * latent.frequencies[sets]
    cos, sin = angles.cos() * latent.amplitude, angles.sin() * latent.amplitude
    rotary, key = (rope_torch(x, cos, sin, latent.pairing) for x in (rotary, key[:, None]))
    out = query[:n].view(n, latent.n_heads, latent.key_width)
    out[..., : latent.rotated] = rotary.to(query.dtype)
    normed = rms_norm_torch(compressed, latent.norm, latent.norm_eps)
    kv.append(kv.cells(placed.pages, placed.positions), torch.cat((key[:, 0], normed), 1))


def heads_product_torch(
    x: Tensor, weight: Weight, out: Tensor, n_rows: Tensor, *, n_heads: int, x_step: int, out_step: int
) -> None:
    """out[row, head * out_step + i] = sum over j of x[row, head * x_step + j] * weight[head, i, j].

    weight is [n_heads * outputs, columns], dense or packed. x and out are float32 or bfloat16 and may be columns of
    wider rows. Rows meet bfloat16 and packed weights rounded to bfloat16, and packed weights are rounded likewise."""
    n, narrow = int(n_rows), dtype_of(weight) == torch.bfloat16
    dense = dense_of(weight, torch.bfloat16 if narrow else torch.float32).float()
    matrices = dense.view(n_heads, -1, dense.shape[1])
    for head, matrix in enumerate(matrices):
        given = x[:n, head * x_step : head * x_step + matrix.shape[1]].float()
        given = given.bfloat16().float() if narrow else given
        out[:n, head * out_step : head * out_step + matrix.shape[0]] = (given @ matrix.T).to(out.dtype)


def attend_latent_torch(query: Tensor, seen: Tensor, kv: LatentKV, rows: StepRows, latent: LatentHeads) -> None:
    """query float32 [n_slots, n_heads * key_width], absorbed, by row to seen float32 [n_slots, n_heads * rank].

    A row sees its own sequence up to its own position, which is in the store already. Live rows are written."""
    placed = _Placed.of(rows)
    for row in range(placed.n):
        keys = _past(kv, placed, row)
        q = (_heads(query[row], latent) * latent.scale).to(PRODUCT[kv.keys.dtype]).float()
        seen[row] = _attended(q, keys, latent)


def attend_latent_chunk_torch(query: Tensor, seen: Tensor, kv: LatentKV, chunk: Chunk, latent: LatentHeads) -> None:
    """The same of a chunk's rows, in float32, bfloat16 or float16; queries are rounded before they are scaled."""
    placed = _Placed.of(chunk)
    for row in range(placed.n):
        keys = _past(kv, placed, row)
        q = _heads(query[row], latent).to(PRODUCT[kv.keys.dtype]).float() * latent.scale
        seen[row] = _attended(q, keys, latent).to(seen.dtype)


def _heads(row: Tensor, latent: LatentHeads) -> Tensor:
    return row.view(latent.n_heads, latent.key_width).float()


def _past(kv: LatentKV, placed: _Placed, row: int) -> Tensor:
    """The keys that a row sees, its own included."""
    positions = torch.arange(int(placed.positions[row]) + 1, device=kv.keys.device)
    return kv.read(kv.cells(placed.pages[row], positions))


def _attended(q: Tensor, keys: Tensor, latent: LatentHeads) -> Tensor:
    """What scaled queries [n_heads, key_width] see of keys [n, key_width]: [n_heads * rank]."""
    return ((q @ keys.T).softmax(-1) @ keys[:, latent.rotated :]).flatten()
