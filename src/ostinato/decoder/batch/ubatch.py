"""One slice of a batch, as a single forward runs it (rules U-1 to U-5).

A ubatch owns its arrays: the splitter makes it once, and later changes of the batch do not affect it.
Sequence ids are flat with offsets, so that memory and masks can be computed without a loop over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ostinato.cache.sequences import MAX_SEQ, Ints
from ostinato.decoder.batch.clean import CleanBatch, TokenRows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ubatch(TokenRows):
    """Tokens of one forward, in ubatch order: grouped by set where `equal_seqs` (U-2)."""

    index: Ints  # [n] where each token stands in the batch
    n_seqs: int  # number of sequence sets
    equal_seqs: bool
    seq_id_unq: Ints  # [n_seqs_unq] every id that occurs, ascending

    @property
    def n_seq_tokens(self) -> int:
        """Tokens per set; the sets of one ubatch are equally long."""
        return self.n_tokens // self.n_seqs

    @property
    def n_seqs_unq(self) -> int:
        return len(self.seq_id_unq)

    @property
    def first_pos(self) -> Ints:
        """The first dimension of the positions, [n]: the one that orders tokens."""
        return self.pos if self.pos.ndim == 1 else self.pos[0]


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
