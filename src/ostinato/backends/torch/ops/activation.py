"""Activation functions of an MLP: SiLU, GELU, tanh-GELU, squared ReLU, plain or gated; and gpt-oss's clamped SwiGLU.

Clamped SwiGLU bounds both of its inputs: g sigmoid(1.702 g) (u + 1) of g = min(gate, 7) and u = up within +-7. Its gate
is `activate_torch`, its other factor `beside_gate_torch`.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.models.shape import Activation

SWIGLU_ALPHA: Final = 1.702
SWIGLU_LIMIT: Final = 7.0


def activate_torch(x: Tensor, activation: Activation) -> Tensor:
    """Elementwise: silu(x) = x * sigmoid(x), GELU by the error function or its tanh formula, relu(x)^2; x.dtype out."""
    if activation == "silu":
        return F.silu(x)
    if activation == "clamped_swiglu":
        bounded = x.clamp(max=SWIGLU_LIMIT)
        return bounded * torch.sigmoid(SWIGLU_ALPHA * bounded)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="none" if activation == "gelu" else "tanh")


def beside_gate_torch(up: Tensor, activation: Activation) -> Tensor:
    """What an activated gate is multiplied by."""
    return up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1 if activation == "clamped_swiglu" else up


def gated_torch(gate_up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up, where gate_up [rows, 2 * width] holds both side by side; gives [rows, width]."""
    gate, up = gate_up.chunk(2, -1)
    return activate_torch(gate, activation) * beside_gate_torch(up, activation)


def activate_rows_torch(x: Tensor, out: Tensor, activation: Activation) -> None:
    """A prompt's rows into a buffer: act(x) in float32, rounded to out.dtype. The kernel: `triton/activation.py`."""
    out.copy_(activate_torch(x.float(), activation))


def gated_rows_torch(gate_up: Tensor, out: Tensor, activation: Activation) -> None:
    """The same for act(gate) * up, gate_up [rows, 2 * width] and out [rows, width]."""
    out.copy_(gated_torch(gate_up.float(), activation))
