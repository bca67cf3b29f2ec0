"""A ubatch made by hand, for vectors and tests that begin after the split."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from ostinato.decoder.batch.ubatch import Ubatch


def ubatch_of(
    seq_id: Sequence[Sequence[int]],
    pos: Sequence[int] | None = None,
    output: Sequence[int] | None = None,
    *,
    n_seqs: int | None = None,
    equal_seqs: bool = False,
) -> Ubatch:
    """Tokens of these sequences; at positions 0, 1, ... and all outputs unless told otherwise."""
    n = len(seq_id)
    ids = list(chain.from_iterable(seq_id))
    return Ubatch(
        index=np.arange(n),
        n_seqs=n if n_seqs is None else n_seqs,
        equal_seqs=equal_seqs,
        token=np.arange(n),
        embd=None,
        pos=np.array(range(n) if pos is None else pos, np.int64),
        seq_id=np.array(ids, np.int64),
        seq_start=np.cumsum([0, *map(len, seq_id)]),
        seq_id_unq=np.unique(np.array(ids, np.int64)),
        output=np.array([1] * n if output is None else output, bool),
    )


def seq_lists(ubatch: Ubatch) -> list[list[int]]:
    """The sequence ids of every token, as listed."""
    return [ubatch.ids_of(place) for place in range(ubatch.n_tokens)]


def ubatches_of(given: dict[str, Any]) -> list[Ubatch]:
    """The ubatches of a vector."""
    return [ubatch_of(**fields) for fields in given["ubatches"]]
