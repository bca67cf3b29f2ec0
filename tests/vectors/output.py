"""Vectors of the output rows (OUT): `map` out_ids to rows, `reorder` rows, `resolve` an index."""

from collections.abc import Sequence
from typing import Any

import torch

from ostinato.decoder.cells.output import Outputs, resolve
from tests.vectors.compare import plain

ABSENT = -1


def numbers(ids: Sequence[int | None]) -> list[int]:
    return [ABSENT if row is None else row for row in ids]


def published(out_ids: list[int], n_batch: int) -> Outputs:
    """Outputs whose row r holds, as its only logit, r."""
    outputs = Outputs(n_vocab=1, n_embd_out=1, n_batch=n_batch, n_seq_max=1)
    outputs.reserve(len(out_ids), embeddings=False, sampling=False)
    outputs.write_logits(0, torch.arange(len(out_ids)).unsqueeze(1))
    outputs.publish(out_ids, len(out_ids))
    return outputs


def raw_written(outputs: Outputs, n: int) -> list[bool]:
    """For each of the first n rows in batch order, whether the last decode extracted its raw logits (SR-7)."""
    rows = outputs._in_order()
    return [False] * n if rows is None else [bool(count) for count in rows["logits"].counts[:n]]


def map_ids(given: dict[str, Any]) -> dict[str, Any]:
    outputs = published(given["out_ids"], given["n_batch"])
    return {"output_ids": numbers(outputs.ids), "swaps": outputs.swaps}


def reorder(given: dict[str, Any]) -> dict[str, Any]:
    """Rows named after their place in the batch are brought into that order by the swaps of the vector."""
    rows = given["rows"]
    outputs = published([sorted(rows).index(name) for name in rows], len(rows))
    if plain(outputs.swaps) != given["swaps"]:
        raise ValueError(f"rows {rows} are ordered by {outputs.swaps}, not by {given['swaps']}")
    read = [outputs.logits(index).value for index in range(len(rows))]
    return {"rows": [None if row is None else rows[int(row)] for row in read], "swaps": outputs.swaps}


def resolve_index(given: dict[str, Any]) -> dict[str, Any]:
    ids = [None if row == ABSENT else row for row in given["output_ids"]]
    found = resolve(given["i"], ids, given["n_outputs"])
    return {"row": found.value} if found.reason is None else {"error": found.reason.value}


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    return {"map": map_ids, "reorder": reorder, "resolve": resolve_index}[op](given)
