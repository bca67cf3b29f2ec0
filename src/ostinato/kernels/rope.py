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
    turned = x[..., : 2 * half].float()
    if pairing == "halves":
        a, b = turned[..., :half], turned[..., half:]
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    pair = (a * c - b * s, b * c + a * s)
    out = torch.cat(pair, -1) if pairing == "halves" else torch.stack(pair, -1).flatten(-2)
    out = out.to(x.dtype)
    return out if 2 * half == x.shape[-1] else torch.cat((out, x[..., 2 * half :]), -1)
