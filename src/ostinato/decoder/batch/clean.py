"""A batch after its checks: every field is present, and no rule is broken.

`sanitizer.py` makes it and `splitter.py` splits it; it is immutable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.cache.sequences import Ints


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenRows:
    """Tokens with everything that is known of each: a whole batch, or the ubatch of one forward."""

    token: Ints | None  # [n]
    embd: NDArray[Any] | None  # [n, width]
    pos: Ints  # [n], or [dimensions, n] for models with several position dimensions (U-3)
    seq_id: Ints  # [ids] the ids of all tokens, one token after the other; the first of a token is its primary id
    seq_start: Ints  # [n + 1] token i has seq_id[seq_start[i] : seq_start[i + 1]]
    output: NDArray[np.bool_]  # [n]
    segment: Ints | None = None  # [n] which of two texts each token belongs to

    @property
    def n_tokens(self) -> int:
        return len(self.output)

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

    def ids_of(self, index: int) -> list[int]:
        """The sequence ids of one token, as listed."""
        ids: list[int] = self.seq_id[self.seq_start[index] : self.seq_start[index + 1]].tolist()
        return ids


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CleanBatch(TokenRows):
    """A normalised batch with its statistics (S-12); `embd` is the caller's own array, the rest are copies."""

    set_of: Ints  # [n] the number of each token's sequence set; equal sets have equal numbers
    sets: tuple[int, ...]  # the sets by number, as bit masks of ids
    spans: dict[int, tuple[int, int]]  # id -> (lowest, highest) position in the batch; ids ascending

    @property
    def unique(self) -> tuple[int, ...]:
        """The sequence ids of the batch, ascending."""
        return tuple(self.spans)

    @property
    def has_coupling(self) -> bool:
        """Whether any token belongs to two or more sequences."""
        return len(self.seq_id) > self.n_tokens
