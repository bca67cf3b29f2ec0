"""Vectors of pooling (PL). Row r of the hidden rows is the r-th unit vector, so the pooled vector tells the weights."""

from typing import Any

import numpy as np

from ostinato.decoder.pooling import Pooled, Pooling, pooling
from tests.vectors.ubatches import ubatches_of


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    if op != "select":
        raise ValueError(f"{op!r} is no operation of pooling")
    kind = pooling(given["type"])
    head = (lambda rows: rows) if kind is Pooling.RANK else None
    pooled = Pooled(kind, head=head, rank_by=Pooling.LAST if given["rank_last"] else Pooling.CLS)
    ubatches = ubatches_of(given)
    lengths = [ubatch.n_tokens for ubatch in ubatches]
    for ubatch, rows in zip(ubatches, np.split(np.eye(sum(lengths)), np.cumsum(lengths)[:-1]), strict=True):
        pooled.add(ubatch, rows)
    weights = {
        sequence: {row: round(weight, 4) for row, weight in enumerate(vector.tolist()) if weight}
        for sequence, vector in pooled.results().items()
    }
    if kind is Pooling.MEAN:
        return {"weights": weights}
    return {"select": {sequence: next(iter(rows)) for sequence, rows in weights.items()}}
