"""The ranking head of an encoder over weights in tiles: tanh(dense(x)), then out, of one pooled row."""

from __future__ import annotations

import numpy as np

from ostinato.backends.native.tiles import TileMatrix
from ostinato.errors import InternalError
from ostinato.files.unpack import Floats
from ostinato.models.blocks import Linear, RankingHead


def ranked(head: RankingHead, pooled: Floats) -> Floats:
    """A pooled row [hidden] to its scores [classes]."""
    inside = pooled if head.dense is None else np.tanh(_through(head.dense, pooled))
    return inside if head.out is None else _through(head.out, inside)


def _through(linear: Linear, row: Floats) -> Floats:
    if not isinstance(linear.weight, TileMatrix) or linear.scale is not None:
        raise InternalError("the native loop was given a ranking head that it does not know")
    out: Floats = linear.weight.product(row[None], n_threads=1)[0]
    if linear.bias is not None:
        out += np.asarray(linear.bias, np.float32)
    return out
