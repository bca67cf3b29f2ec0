"""Rotary embedding (RoPE): rotates each pair (a, b) of a head by its angle to (a cos - b sin, b cos + a sin)."""

import torch
from torch import Tensor

from ostinato.models.rope import Pairing, Rope


def cos_sin(rope: Rope, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions [rows] or [dimensions, rows], float32 [rows, width / 2], amplified; frequencies
    for all or by row. Each pair turns by one dimension of a position (`Rope.dimensions`)."""
    if positions.dim() == 2:
        by_pair = positions[torch.tensor(rope.dimensions, device=positions.device)].T
    else:
        by_pair = positions.unsqueeze(-1)
    angles = by_pair.float() * frequencies
    return angles.cos() * rope.amplitude, angles.sin() * rope.amplitude


def rope_torch(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """Turn the first 2*half elements of each head of x [rows, heads, width] by cos, sin [rows, half]; the rest pass.

    Computes in float32; gives a new tensor in x.dtype.
    """
    half = cos.shape[-1]
    part = x[..., : 2 * half].float()
    # As complex numbers, a pair is rotated by one product: (a + ib)(cos + i sin).
    rotation = torch.complex(cos, sin).unsqueeze(1)
    if pairing == "neighbours":
        rotated = torch.view_as_complex(part.reshape(*part.shape[:-1], half, 2)) * rotation
        out = torch.view_as_real(rotated).flatten(-2)
    else:
        rotated = torch.complex(part[..., :half], part[..., half:]) * rotation
        out = torch.cat((rotated.real, rotated.imag), -1)
    out = out.to(x.dtype)
    return out if 2 * half == x.shape[-1] else torch.cat((out, x[..., 2 * half :]), -1)


def query_factor(positions: Tensor, scale: float, span: int) -> Tensor:
    """What queries at positions p, int64 [rows], are multiplied by, float32 [rows, 1, 1]."""
    return (1 + scale * torch.log(1 + (positions // span).float())).view(-1, 1, 1)
