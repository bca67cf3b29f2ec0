"""One slice of a batch, as a single forward runs it (rules U-1 to U-5).

A ubatch owns its arrays: the splitter makes it once, and later changes of the batch do not affect it.
Sequence ids are flat with offsets, so that memory and masks can be computed without a loop over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.cache.sequences import MAX_SEQ, Ints
from ostinato.decoder.batch.clean import CleanBatch


@dataclass(frozen=True, slots=True, eq=False)
class Ubatch:
    """Tokens of one forward, in ubatch order: grouped by set where `equal_seqs` (U-2)."""

    index: Ints  # [n] where each token stands in the batch
    n_seqs: int  # number of sequence sets
    equal_seqs: bool
    token: Ints | None  # [n]
    embd: NDArray[Any] | None  # [n, width]
    pos: Ints  # [n], or [dimensions, n]
    seq_id: Ints  # [ids] the ids of all tokens, one token after the other; the first of a token is its primary id
    seq_start: Ints  # [n + 1] token i has seq_id[seq_start[i] : seq_start[i + 1]]
    seq_id_unq: Ints  # [n_seqs_unq] every id that occurs, ascending
    output: NDArray[np.bool_]  # [n]
    segment: Ints | None = None  # [n]

    @property
    def n_tokens(self) -> int:
        return len(self.index)

    @property
    def n_seq_tokens(self) -> int:
        """Tokens per set; the sets of one ubatch are equally long."""
        return self.n_tokens // self.n_seqs

    @property
    def n_seqs_unq(self) -> int:
        return len(self.seq_id_unq)

    @property
    def n_outputs(self) -> int:
        return int(np.count_nonzero(self.output))

    @property
    def n_seq_id(self) -> Ints:
        """How many ids each token has, [n]."""
        return np.diff(self.seq_start)

    @property
    def primary(self) -> Ints:
        """The first listed id of each token, [n]."""
        return self.seq_id[self.seq_start[:-1]]

    @property
    def first_pos(self) -> Ints:
        """The first dimension of the positions, [n]: the one that orders tokens."""
        return self.pos if self.pos.ndim == 1 else self.pos[0]

    @property
    def seq_idx(self) -> dict[int, int]:
        """Where each id that occurs stands in `seq_id_unq`."""
        return {s: place for place, s in enumerate(self.seq_id_unq.tolist())}

    def ids_of(self, place: int) -> list[int]:
        """The sequence ids of one token, as listed."""
        ids: list[int] = self.seq_id[self.seq_start[place] : self.seq_start[place + 1]].tolist()
        return ids

    @property
    def seq_lists(self) -> list[list[int]]:
        """The sequence ids of every token, as listed."""
        ids, edges = self.seq_id.tolist(), self.seq_start.tolist()
        return [ids[a:b] for a, b in pairwise(edges)]


def take(batch: CleanBatch, index: Ints, *, n_seqs: int, equal_seqs: bool) -> Ubatch:
    """The ubatch of the tokens at `index`, in that order; every array in it is a copy (U-5)."""
    first = batch.seq_start[index]
    counts = batch.seq_start[index + 1] - first
    start = np.zeros(len(index) + 1, np.int64)
    np.cumsum(counts, out=start[1:])
    # Entry e of the ubatch is as far from its token's first id here as in the batch.
    ids = batch.seq_id[np.repeat(first - start[:-1], counts) + np.arange(start[-1])]
    return Ubatch(
        index=index,
        n_seqs=n_seqs,
        equal_seqs=equal_seqs,
        token=None if batch.token is None else batch.token[index],
        embd=None if batch.embd is None else batch.embd[index],
        pos=batch.pos[..., index],
        seq_id=ids,
        seq_start=start,
        seq_id_unq=np.flatnonzero(np.bincount(ids, minlength=MAX_SEQ)),
        output=batch.output[index],
        segment=None if batch.segment is None else batch.segment[index],
    )
