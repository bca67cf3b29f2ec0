"""The bends between two matrices of a feed-forward block."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


def activate_torch(x: Tensor, activation: Activation) -> Tensor:
    """Elementwise silu(x) = x * sigmoid(x), or GELU by its tanh formula; x.dtype out."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


def gated_torch(gate_up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up, where gate_up [rows, 2 * width] holds both side by side; gives [rows, width]."""
    gate, up = gate_up.chunk(2, -1)
    return activate_torch(gate, activation) * up
