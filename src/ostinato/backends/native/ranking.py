"""What one pooled row goes through, over weights in tiles: a ranking head, or projections."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ostinato.backends.native.tiles import TileMatrix
from ostinato.errors import InternalError
from ostinato.files.unpack import Floats
from ostinato.models.blocks import Linear, Norm, RankingHead


def ranked(head: RankingHead, pooled: Floats) -> Floats:
    """A pooled row [hidden] to its scores [classes]."""
    inside = pooled
    if head.dense is not None:
        inside = _through(head.dense, pooled)
        inside = np.tanh(inside) if head.activation == "tanh" else _gelu(inside)
    inside = inside if head.norm is None else _normed(head.norm, inside)
    return inside if head.out is None else _through(head.out, inside)


def projected(projections: Sequence[Linear], pooled: Floats) -> Floats:
    """A pooled row [hidden] to the vector of its text."""
    for linear in projections:
        pooled = _through(linear, pooled)
    return pooled


def _gelu(row: Floats) -> Floats:
    return np.array([x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in row.tolist()], np.float32)


def _normed(norm: Norm, row: Floats) -> Floats:
    """A layer norm; its sums in double, as there is but one row."""
    wide = row.astype(np.float64) - row.mean(dtype=np.float64)
    scaled = wide / np.sqrt(np.square(wide).mean() + norm.eps) * np.asarray(norm.weight, np.float64)
    shifted: Floats = (scaled if norm.bias is None else scaled + np.asarray(norm.bias, np.float64)).astype(np.float32)
    return shifted


def _through(linear: Linear, row: Floats) -> Floats:
    if not isinstance(linear.weight, TileMatrix) or linear.scale is not None:
        raise InternalError("the native loop was given a ranking head that it does not know")
    out: Floats = linear.weight.product(row[None], n_threads=1)[0]
    if linear.bias is not None:
        out += np.asarray(linear.bias, np.float32)
    return out
