"""From hidden rows to one vector per sequence: mean, cls, last, rank, or none at all (PL-1..12).

Sums and choices are carried from one piece of a sequence to the next, so it may be spread over any number of ubatches
or chunks. The rows of pooling none are outputs of their own (`cells/output.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ostinato.cache.sequences import Ints
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.errors import BadOption, InternalError, listing
from ostinato.files.unpack import Floats

# The classification head of a ranking model: [n_embd_out] to [classes].
RankHead = Callable[[Floats], Floats]


class Pooling(StrEnum):
    """How the rows of a sequence become one vector."""

    NONE = "none"  # no pooling: one row per output token (PL-2)
    MEAN = "mean"
    CLS = "cls"  # the token with the lowest position
    LAST = "last"  # the token with the highest position
    RANK = "rank"  # mean, cls or last, then a classification head

    def rows_of(self, n: int, first: int = 0) -> range:
        """The rows, of a text of n tokens, that its vector is made of; those before `first` are left out.

        >>> Pooling.MEAN.rows_of(5, 2), Pooling.CLS.rows_of(5, 2), Pooling.LAST.rows_of(5, 2)
        (range(2, 5), range(2, 3), range(4, 5))
        """
        return {Pooling.CLS: range(first, first + 1), Pooling.LAST: range(n - 1, n)}.get(self, range(first, n))


def pooling(name: str, *, ranks: bool = True) -> Pooling:
    """The pooling of that name; BadOption, with the known names, if there is none. `ranks`: the model has a ranking
    head."""
    if name not in tuple(Pooling):
        raise BadOption(f"unknown pooling {name!r}; known: {listing(name, Pooling)}")
    if name == Pooling.RANK and not ranks:
        raise BadOption(
            "pooling 'rank' needs a model with a ranking head, and this one has none; a folder of a language model "
            "that ranks by its answer (Qwen3-Reranker) says so in modules.json: docs/serving.md, Reranking"
        )
    return Pooling(name)


class _Rule(Protocol):
    """Carries one sequence's rows to one float32 vector."""

    def add(self, positions: Ints, rows: NDArray[Any]) -> None:
        """Add rows [n, width] and their positions [n]; at least one."""

    def vector(self) -> Floats:
        """The vector of the rows so far, [width]."""


class _Mean:
    """The mean over all tokens (PL-4). Summed in float64, so that the split into ubatches changes no digit kept."""

    def __init__(self) -> None:
        self._sum: Any = 0.0
        self._count = 0

    def add(self, positions: Ints, rows: NDArray[Any]) -> None:
        self._sum = self._sum + rows.sum(0, dtype=np.float64)
        self._count += len(rows)

    def vector(self) -> Floats:
        mean: Floats = (self._sum / self._count).astype(np.float32)
        return mean


class _Chosen:
    """The row of the token with the lowest position, of equals the earliest (PL-5); or with the highest, of equals the
    latest (PL-6)."""

    def __init__(self, *, last: bool) -> None:
        self._last = last
        self._position: int | None = None
        self._row: Floats = np.empty(0, np.float32)

    def add(self, positions: Ints, rows: NDArray[Any]) -> None:
        at = len(positions) - 1 - int(positions[::-1].argmax()) if self._last else int(positions.argmin())
        position, best = int(positions[at]), self._position
        if best is None or (position >= best if self._last else position < best):
            # A copy: the rows of a ubatch are overwritten by the next.
            self._position, self._row = position, rows[at].astype(np.float32)

    def vector(self) -> Floats:
        return self._row


_RULES: Final[Mapping[Pooling, Callable[[], _Rule]]] = MappingProxyType(
    {Pooling.MEAN: _Mean, Pooling.CLS: partial(_Chosen, last=False), Pooling.LAST: partial(_Chosen, last=True)}
)


class Pooled:
    """The pooled vectors of one batch, by sequence id: `clear`, then `add` every ubatch, then read.

    Rank needs a `head` and may choose its row as `rank_by` says, for models that rank by their last token or by the
    mean (PL-7).
    """

    def __init__(self, kind: Pooling, *, head: RankHead | None = None, rank_by: Pooling = Pooling.CLS) -> None:
        rule = rank_by if kind is Pooling.RANK else kind
        if not isinstance(kind, Pooling) or (rule not in _RULES and kind is not Pooling.NONE):
            raise InternalError(f"pooling {kind!r} (by {rule!r}) was not settled before decoding")  # PL-1
        if (kind is Pooling.RANK) != (head is not None):
            raise InternalError(  # PL-7
                f"pooling {kind} and a head of {head!r}: a head goes with rank and only with it"
            )
        self.kind = kind
        self._head = head
        self.rule = rule  # which rows a vector is made of
        self.clear()

    @property
    def per_token(self) -> bool:
        """Whether rows stay rows, kept with the logits (PL-2)."""
        return self.kind is Pooling.NONE

    def clear(self) -> None:
        """Forget everything: a new batch was accepted (D-13), or a ubatch of this one failed."""
        self._carried: dict[int, _Rule] = {}
        self._vectors: dict[int, Floats] = {}

    def add(self, ubatch: Ubatch, rows: NDArray[Any]) -> None:
        """Add the rows [n_tokens, n_embd_out] of one ubatch, a row for every token (PL-12)."""
        if self.per_token:
            return
        if len(rows) != ubatch.n_tokens:
            raise InternalError(f"{len(rows)} rows to pool for {ubatch.n_tokens} tokens")  # PL-12
        # Looked up token by token: sets may shrink inside a ubatch (PL-8, PL-10).
        token = np.repeat(np.arange(ubatch.n_tokens), ubatch.n_seq_id)
        for sequence in ubatch.seq_id_unq.tolist():
            own = token[ubatch.seq_id == sequence]
            self.add_rows(sequence, ubatch.first_pos[own], rows[own])

    def add_rows(self, sequence: int, positions: Ints, rows: NDArray[Any]) -> None:
        """Add rows [n, n_embd_out] of one sequence, at these positions [n]."""
        carried = self._carried.setdefault(sequence, _RULES[self.rule]())
        carried.add(positions, rows)
        # The head runs here, so that if it fails, the ubatch can still be rolled back.
        vector = carried.vector()
        self._vectors[sequence] = vector if self._head is None else self._head(vector)

    def results(self) -> dict[int, Floats]:
        """Every participating sequence's vector, float32 [n_embd_out], or [classes] for rank (PL-3)."""
        return dict(self._vectors)

    def get(self, sequence: int) -> Floats | None:
        """One sequence's vector; None if it was not in the batch, or with pooling none (PL-11)."""
        return self._vectors.get(sequence)
