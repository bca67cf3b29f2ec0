"""Gates on what heads of attention have seen: seen *= sigmoid(gate), or softplus(gate). The twin: `gate_heads_torch`.

A few kilobytes a row: bound by latency in a step, by reading in a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import EITHER, TritonLaunch, checked
from ostinato.backends.cuda.triton.matmul import sigmoid
from ostinato.backends.cuda.triton.runs import store_rows
from ostinato.backends.torch.ops.attend import Heads


def bind_gate_heads(qkv: Tensor, attended: Tensor, heads: Heads, n_rows: Tensor) -> TritonLaunch:
    """As `gate_heads_torch`; a program for each row and head."""
    n, device, width = qkv.shape[0], qkv.device, heads.head_width
    given = {
        "qkv": checked("qkv", qkv, dtype=EITHER, shape=(n, heads.n_columns), device=device),
        "attended": checked("attended", attended, dtype=EITHER, shape=(n, heads.n_heads * width), device=device),
        "n_rows": checked("n_rows", n_rows, dtype=torch.int32, shape=(1,), device=device),
        **{"HEADS": heads.n_heads, "WIDTH": width, "COLUMNS": heads.n_columns},
        **{"FIRST": heads.gates_at, "STEP": heads.gate_step, "EACH": not heads.one_gate},
        "SOFTPLUS": heads.gate_activation == "softplus",
        "BLOCK": triton.next_power_of_2(width),
    }
    return TritonLaunch.of(gate_heads_kernel, (n, heads.n_heads), given, num_warps=1)


@triton.jit
def gate_heads_kernel(
    qkv, attended, n_rows, HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr,
    STEP: tl.constexpr, EACH: tl.constexpr, SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row < tl.load(n_rows):
        at = tl.arange(0, BLOCK)
        there = at < WIDTH
        first = qkv + row * COLUMNS + FIRST + head * STEP
        gate = tl.load(first + (at if EACH else at * 0), mask=there, other=0.0).to(tl.float32)
        # log(1 + e^x) is x itself where that is large: nothing overflows.
        gain = tl.maximum(gate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(gate))) if SOFTPLUS else sigmoid(gate)
        seen = attended + (row * HEADS + head) * WIDTH + at
        value = tl.load(seen, mask=there, other=0.0).to(tl.float32) * gain
        store_rows(seen, value, there)
