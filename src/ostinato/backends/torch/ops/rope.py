"""Rotary positions: each pair (a, b) of a head turns by its angle into (a cos - b sin, b cos + a sin).

Which two elements make a pair is how a file stored its query and key rows: `halves` pairs element i with
i + width/2, `neighbours` pairs 2i with 2i + 1. The two are the same model with rows permuted.
"""

from typing import Literal

import torch
from torch import Tensor

Pairing = Literal["halves", "neighbours"]


def rope_torch(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """Turn the first 2*half elements of each head of x [rows, heads, width] by cos, sin [rows, half]; the rest pass.

    Computes in float32; gives a new tensor in x.dtype.
    """
    half = cos.shape[-1]
    part = x[..., : 2 * half].float()
    # As complex numbers a pair turns by one product: (a + ib)(cos + i sin).
    rotation = torch.complex(cos, sin).unsqueeze(1)
    if pairing == "neighbours":
        rotated = torch.view_as_complex(part.reshape(*part.shape[:-1], half, 2)) * rotation
        out = torch.view_as_real(rotated).flatten(-2)
    else:
        rotated = torch.complex(part[..., :half], part[..., half:]) * rotation
        out = torch.cat((rotated.real, rotated.imag), -1)
    out = out.to(x.dtype)
    return out if 2 * half == x.shape[-1] else torch.cat((out, x[..., 2 * half :]), -1)
