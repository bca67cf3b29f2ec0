"""Activation functions over a prompt's rows: out = act(x), or act(gate) * up; twins in `torch/ops`.

float32 or bfloat16 in and out, computed in float32, `out` written. In a step the product before does this on its way
out (`matmul.py`). Bound by reading its input.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import EITHER, TritonLaunch, checked
from ostinato.backends.cuda.triton.matmul import ACTIVATIONS, activate, beside_gate
from ostinato.backends.cuda.triton.unpack import narrowed
from ostinato.models.shape import Activation

BLOCK: Final = 1024  # columns of a program


def bind_activate(x: Tensor, out: Tensor, activation: Activation) -> TritonLaunch:
    """act(x) of x [rows, width] into out, as `activate_rows_torch` has it."""
    return _bound(x, out, activation, gated=False)


def bind_gated(gate_up: Tensor, out: Tensor, activation: Activation) -> TritonLaunch:
    """act(gate) * up of gate_up [rows, 2 * width] into out [rows, width], as `gated_rows_torch` has it."""
    return _bound(gate_up, out, activation, gated=True)


def _bound(x: Tensor, out: Tensor, activation: Activation, *, gated: bool) -> TritonLaunch:
    rows, width = out.shape
    checked("out", out, dtype=EITHER, shape=(rows, width), device=x.device)
    checked("x", x, dtype=EITHER, shape=(rows, 2 * width if gated else width), device=x.device)
    constants = {"WIDTH": width, "GATED": gated, "ACTIVATION": ACTIVATIONS[activation], "BLOCK": BLOCK, "num_warps": 4}
    return TritonLaunch(activation_kernel, (rows, triton.cdiv(width, BLOCK)), (x, out), constants)


@triton.jit
def activation_kernel(
    x, out, WIDTH: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < WIDTH
    first = x + row * (2 * WIDTH if GATED else WIDTH) + at
    value = activate(tl.load(first, mask=there, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        value *= beside_gate(tl.load(first + WIDTH, mask=there, other=0.0).to(tl.float32), ACTIVATION)
    to = out + row * WIDTH + at
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(to, narrowed(value), mask=there)
    else:
        tl.store(to, value, mask=there)
