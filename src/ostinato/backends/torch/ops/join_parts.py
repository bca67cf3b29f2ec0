"""What each layer takes in of a second embedding: parts = (given / rms(given) * weight + own) * sqrt(1/2).

given and own are float32 [rows, n_parts * width], each part of `width` columns normed alone; parts float32 [n_parts,
rows or more, width]. The fast kernel is `triton/join_parts.py`, bound by its latency.
"""

from __future__ import annotations

from torch import Tensor

from ostinato.backends.torch.ops.rms_norm import rms_norm_torch


def join_parts_torch(given: Tensor, own: Tensor, parts: Tensor, weight: Tensor, eps: float, n_rows: Tensor) -> None:
    """weight [width]; the first `n_rows` int32 [1] rows of every part are written."""
    n = int(n_rows)
    size = (n, len(parts), len(weight))
    joined = (rms_norm_torch(given[:n].view(size), weight, eps) + own[:n].view(size)) * 0.5**0.5
    parts[:, :n] = joined.transpose(0, 1)
