"""The definition of a layer's attention in a decode step: softmax(scale * q k^T) v over each row's own pages.

For every live row, QK norm and RoPE are applied, k and v are appended at its position, and it attends to the positions
that it may see, its own included, as stored. Everything is computed in float32; K and V are written in place in the
type of their store, and q is scaled and rounded to what the fast kernel multiplies: `triton/attend.py`, which is bound
by reading K and V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from ostinato.backends.torch.ops.q8_0 import BLOCK, dequantize_q8_0_torch, quantize_q8_0_torch
from ostinato.backends.torch.ops.rms_norm import rms_norm_torch
from ostinato.backends.torch.ops.rope import query_factor, rope_torch
from ostinato.errors import BadOption
from ostinato.loop.layout import Arena
from ostinato.models.rope import Pairing

GateActivation: TypeAlias = Literal["sigmoid", "softplus"]

# What q and K, and the weights and V, are multiplied in, by the type of the store. Sums are float32 always.
PRODUCT: Final = {
    torch.bfloat16: torch.bfloat16,
    torch.int8: torch.bfloat16,
    torch.float16: torch.float16,
    torch.float32: torch.float32,
}


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer attends: sizes, scale, caps, rotary positions and QK norm; frequencies are float32."""

    n_heads: int
    n_kv_heads: int
    head_width: int
    scale: float
    softcap: float | None = None
    window: int | None = None  # a row at position p sees positions above p - window
    frequencies: Tensor | None = None  # [sets, rotary / 2], the angle of each pair per position; None: no RoPE
    amplitude: float = 1.0
    pairing: Pairing = "halves"
    q_norm: Tensor | None = None  # [head_width], with k_norm or not at all
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6
    norm_last: bool = False  # after the rotation
    value_norm: bool = False  # each head of values, without a weight
    reads_kv: bool = False  # rows have queries only: keys and values are there already, that of its own position too
    temperature: tuple[float, int] | None = None  # scale and span of `QueryTemperature`
    gated: bool = False  # behind each query stands a gate, of what its head will have seen (`gate_heads_torch`)
    gates_apart: bool = False  # or all of them behind all queries
    one_gate: bool = False  # of gates apart: a head has one number for all of its output
    gate_activation: GateActivation = "sigmoid"
    sinks: Tensor | None = None  # float32 [n_heads]: of each head, one more score in its softmax, of no position

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise BadOption(f"{self.n_heads} heads cannot share {self.n_kv_heads} key and value heads evenly")
        if (self.q_norm is None) != (self.k_norm is None) and not self.reads_kv:
            raise BadOption("queries and keys are normed both or neither: give q_norm and k_norm together")

    @property
    def group(self) -> int:
        """Query heads that share a key and value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def n_columns(self) -> int:
        """Width of a row of q, k and v side by side."""
        return self.keys_at + 2 * self.n_new_heads * self.head_width

    @property
    def n_new_heads(self) -> int:
        """Heads of keys that a row brings."""
        return 0 if self.reads_kv else self.n_kv_heads

    @property
    def keys_at(self) -> int:
        """The column of the first key, behind queries and gates."""
        return self.n_heads * (self.head_width + self.gate_width)

    @property
    def gate_width(self) -> int:
        """Of a head's gate; 0 where there is none."""
        return 0 if not self.gated else 1 if self.one_gate else self.head_width

    @property
    def query_step(self) -> int:
        """From one query to the next in such a row."""
        return 2 * self.head_width if self.gated and not self.gates_apart else self.head_width

    @property
    def gates_at(self) -> int:
        """The column of the first gate."""
        return self.n_heads * self.head_width if self.gates_apart else self.head_width

    @property
    def gate_step(self) -> int:
        """From one gate to the next."""
        return self.gate_width if self.gates_apart else self.query_step


@dataclass(frozen=True, slots=True)
class PagedKV:
    """K and V of one layer, [cells, kv_heads, head_width] each; int8 has scales float16, one for every 32."""

    keys: Tensor
    values: Tensor
    page_tokens: int
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        width = self.keys.shape[-1]
        if self.keys.dtype not in PRODUCT or self.keys.dtype != self.values.dtype:
            raise BadOption(
                f"keys are {self.keys.dtype} and values {self.values.dtype}; both must be one of {[*PRODUCT]}"
            )
        if self.keys.dtype == torch.int8 and (self.key_scales is None or self.value_scales is None or width % BLOCK):
            raise BadOption(f"int8 keys and values need scales and a width that is a multiple of {BLOCK}, not {width}")

    def cells(self, pages: Tensor, positions: Tensor) -> Tensor:
        """Where positions [n] of the sequence with this row of the page table lie, int64 [n]."""
        return pages[positions // self.page_tokens].long() * self.page_tokens + positions % self.page_tokens

    def append(self, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v [n, kv_heads, head_width] to cells [n], rounded to the store's type."""
        for rows, store, scales in ((k, self.keys, self.key_scales), (v, self.values, self.value_scales)):
            if scales is None:
                store[cells] = rows.to(store.dtype)
            else:
                store[cells], scales[cells] = quantize_q8_0_torch(rows)

    def read(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of cells [n] as they are multiplied, float32 [n, kv_heads, head_width]."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys[cells].float(), self.values[cells].float()
        product = PRODUCT[self.keys.dtype]
        keys = dequantize_q8_0_torch(self.keys[cells], self.key_scales[cells], product)
        return keys.float(), dequantize_q8_0_torch(self.values[cells], self.value_scales[cells], product).float()


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of the step: views of the slot table, all int32."""

    n_rows: Tensor  # [1]
    row_slot: Tensor  # [n_slots]
    position: Tensor  # [n_slots], by slot
    pages: Tensor  # [n_slots, max_pages], by slot: the page table of one group of layers
    rope_set: Tensor | None = None  # [n_slots], by slot: of the frequencies; None: the first

    @staticmethod
    def of(table: Arena, group: int = 0) -> StepRows:
        """The rows as a slot table has them, for the layers of a group."""
        pages = table["pages"][:, group]
        return StepRows(table["n_rows"], table["row_slot"], table["position"], pages, table["rope_set"])

    @property
    def n_slots(self) -> int:
        return self.row_slot.shape[0]


def attend_torch(qkv: Tensor, attended: Tensor, kv: PagedKV, rows: StepRows, heads: Heads) -> None:
    """qkv float32 [n_slots, (heads + 2 kv_heads) * width] by row to seen float32 [n_slots, heads * width].

    Writes `attended` of live rows and appends to `kv`; nothing else is touched.
    """
    for row in range(int(rows.n_rows)):
        slot = int(rows.row_slot[row])
        position = rows.position[slot : slot + 1].long()
        rope_set = None if rows.rope_set is None else rows.rope_set[slot : slot + 1]
        q, k, v = rotate_qk_torch(qkv[row : row + 1], position, heads, rope_set)
        pages = rows.pages[slot]
        if not heads.reads_kv:
            kv.append(kv.cells(pages, position), k, v)
        keys, values = kv.read(kv.cells(pages, visible(int(position), heads.window, qkv.device)))
        q = (q * heads.scale).to(PRODUCT[kv.keys.dtype]).float()
        attended[row] = attend_row_torch(q[0], keys, values, heads).flatten()


def rotate_qk_torch(
    qkv: Tensor, positions: Tensor, heads: Heads, rope_set: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of q, k and v side by side at positions [n], of rope sets [n], to q, k, v float32 [n, heads, width], normed,
    with RoPE."""
    n_keys = heads.n_new_heads * heads.head_width
    q, k, v = torch.split(qkv.float(), [heads.keys_at, n_keys, n_keys], -1)
    q = q[:, : heads.n_heads * heads.query_step].view(len(qkv), heads.n_heads, -1)[..., : heads.head_width]
    k, v = (each.view(len(qkv), heads.n_new_heads, heads.head_width) for each in (k, v))
    if heads.value_norm:
        v = rms_norm_torch(v, torch.ones(heads.head_width, device=v.device), heads.norm_eps)
    if not heads.norm_last:
        q, k = _normed(q, k, heads)
    if heads.frequencies is not None:
        angles = positions.float().unsqueeze(-1) * heads.frequencies[0 if rope_set is None else rope_set.long()]
        cos, sin = angles.cos() * heads.amplitude, angles.sin() * heads.amplitude
        q, k = (rope_torch(x, cos, sin, heads.pairing) for x in (q, k))
    if heads.norm_last:
        q, k = _normed(q, k, heads)
    if heads.temperature is not None:
        q = q * query_factor(positions, *heads.temperature)
    return q, k, v


def gate_heads_torch(qkv: Tensor, attended: Tensor, heads: Heads, n_rows: Tensor) -> None:
    """attended [rows, heads * width] by the gates in qkv [rows, n_columns], in place, for live rows."""
    n = int(n_rows)
    gates = qkv[:n, heads.gates_at :].unfold(1, heads.gate_width, heads.gate_step)[:, : heads.n_heads]
    seen = attended[:n].float().view(n, heads.n_heads, heads.head_width)
    attended[:n] = (seen * opened(gates.float(), heads.gate_activation)).flatten(1).to(attended.dtype)


def opened(gates: Tensor, activation: GateActivation) -> Tensor:
    """By how much gates let through what stands behind them."""
    return torch.sigmoid(gates) if activation == "sigmoid" else torch.nn.functional.softplus(gates)


def _normed(q: Tensor, k: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    if heads.q_norm is not None:
        q = rms_norm_torch(q, heads.q_norm, heads.norm_eps)
    return q, k if heads.k_norm is None else rms_norm_torch(k, heads.k_norm, heads.norm_eps)


def visible(position: int, window: int | None, device: torch.device) -> Tensor:
    """The positions that a row at this one sees."""
    return torch.arange(0 if window is None else max(0, position - window + 1), position + 1, device=device)


def attend_row_torch(q: Tensor, keys: Tensor, values: Tensor, heads: Heads) -> Tensor:
    """One row's q [heads, width], scaled already, over the keys and values [n, kv_heads, width] that it sees."""
    keys, values = (x.repeat_interleave(heads.group, 1) for x in (keys, values))
    scores = torch.einsum("hw,nhw->hn", q, keys)
    if heads.softcap is not None:
        scores = torch.tanh(scores / heads.softcap) * heads.softcap
    if heads.sinks is not None:
        scores = torch.cat((scores, heads.sinks.float()[:, None]), -1)
    return torch.einsum("hn,nhw->hw", scores.softmax(-1)[:, : len(values)], values)
