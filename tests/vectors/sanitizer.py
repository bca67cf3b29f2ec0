"""Vectors of the batch sanitizer (S), and how a batch of the vector file is read: other components use both."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.batch.clean import CleanBatch
from ostinato.decoder.batch.sanitizer import sanitize
from ostinato.errors import DecodeError, InvalidBatch

N_VOCAB = 128
WIDTH = 4
CLASSES = {0: "ok", 1: "no_slot", 2: "aborted", -1: "invalid", -2: "alloc", -3: "compute"}


@dataclass(frozen=True, slots=True)
class View:
    """A memory that holds these extremes: id -> [lowest position, highest position]."""

    extremes: dict[str, list[int]]

    def pos_min(self, s: int) -> int | None:
        return self.extremes[str(s)][0] if str(s) in self.extremes else None

    def pos_max(self, s: int) -> int | None:
        return self.extremes[str(s)][1] if str(s) in self.extremes else None


def batch_of(given: dict[str, Any], width: int = WIDTH) -> Batch:
    """The batch of a vector; one without `token` has the batch index as token id, or embeddings of the width asked."""
    lengths = (len(given[key]) for key in ("token", "seq_id", "pos", "output") if key in given)
    n_tokens = given.get("n_tokens", next(lengths, 0))
    token, embd = given.get("token"), None
    if given.get("embd"):
        embd = np.linspace(-1, 1, n_tokens * width, dtype=np.float32).reshape(n_tokens, width)
    elif token is None and not given.get("no_input"):
        token = list(range(n_tokens))
    return Batch(
        token=token,
        embd=embd,
        pos=given.get("pos"),
        seq_id=given.get("seq_id"),
        n_seq_id=given.get("n_seq_id"),
        output=given.get("output"),
        n_tokens=n_tokens,
    )


def refused(error: DecodeError) -> dict[str, Any]:
    """The result of a call that raised."""
    return {"ok": False, "class": CLASSES[error.code], "reason": error.reason}


def lists_of(ids: Any, start: Any) -> list[list[int]]:
    return [ids[a:b].tolist() for a, b in pairwise(start)]


def sanitized(given: dict[str, Any]) -> CleanBatch:
    memory = given.get("memory")
    return sanitize(
        batch_of(given["batch"]),
        n_vocab=given.get("n_vocab", N_VOCAB),
        n_seq_limit=given["n_seq_max"],
        output_all=given.get("output_all", False),
        n_pos_per_embd=given.get("n_pos_per_embd", 1),
        memory=None if memory is None else View(memory),
    )


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    if op != "init":
        raise ValueError(f"{op!r} is no operation of the sanitizer")
    try:
        clean = sanitized(given)
    except InvalidBatch as error:
        return refused(error)
    return {
        "ok": True,
        # A token batch has one position per token, whatever the number of dimensions.
        "pos": clean.pos.reshape(-1, clean.n_tokens)[: 1 if clean.token is not None else None].ravel(),
        "seq_id": lists_of(clean.seq_id, clean.seq_start),
        "output": clean.output.astype(int),
        "n_outputs": clean.n_outputs,
        "unique": clean.unique,
        "has_coupling": clean.has_coupling,
        "seqs": clean.spans,
    }
