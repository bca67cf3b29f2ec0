"""Cut a clean batch into ubatches: simple, equal or sequence by sequence (rules SP-1 to SP-16).

Each sequence set is a queue of its tokens in batch order, and every kind of split takes tokens from the heads of
queues; so the state is one head per queue, and no call looks at used tokens. A memory's coordinator chooses the kind
of split (SP-15).
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from ostinato.cache.sequences import Ints
from ostinato.decoder.batch.clean import CleanBatch
from ostinato.decoder.batch.ubatch import Ubatch, take
from ostinato.errors import InvalidBatch


class Splitter:
    """One attempt to split a batch; a call returns None when no tokens are left (SP-2)."""

    def __init__(self, batch: CleanBatch) -> None:
        self.batch = batch
        # [n] tokens by set, in batch order within one; numpy sorts short integers by counting them.
        self._queued = np.argsort(batch.set_of.astype(np.min_scalar_type(len(batch.sets))), kind="stable")
        size = np.bincount(batch.set_of, minlength=len(batch.sets))
        self._end: Ints = np.cumsum(size)
        self._begin: Ints = self._end - size
        self.reset()

    def reset(self) -> None:
        """Mark all tokens as unused and clear the output ids (SP-1)."""
        self._head = self._begin.copy()  # [sets] where in _queued the next unused token of each set is
        self._unused = np.ones(self.batch.n_tokens, bool)
        self._first = 0  # the first unused token; every kind of split begins with it
        self._out_ids: list[Ints] = []
        self.n_used = 0

    @property
    def complete(self) -> bool:
        return self.n_used == self.batch.n_tokens

    @property
    def out_ids(self) -> Ints:
        """The batch indices of all outputs so far, in the order of the ubatches that hold them (U-4)."""
        return np.concatenate([np.zeros(0, np.int64), *self._out_ids])

    def simple(self, n_ubatch: int) -> Ubatch | None:
        """The next unused tokens in batch order, whatever their sequences (SP-4)."""
        _check_limit(n_ubatch)
        index = self._first + np.flatnonzero(self._unused[self._first :])[:n_ubatch]
        if len(index) == 0:
            return None
        self._head += np.bincount(self.batch.set_of[index], minlength=len(self._head))
        return self._make(index, n_seqs=len(index), equal_seqs=False)

    def equal(self, n_ubatch: int, *, sequential: bool, n_keep_tail: int = 0) -> Ubatch | None:
        """Equally many tokens of several disjoint sets (SP-5 to SP-13).

        `sequential`: the sets are single sequences with ids one after the other. `n_keep_tail`: that many last tokens
        of a sequence are never divided over two ubatches.
        """
        _check_limit(n_ubatch, n_keep_tail)
        if self.complete or (sequential and self.batch.has_coupling):
            return None
        chosen = np.array(self._follow(n_ubatch) if sequential else self._disjoint(n_ubatch))
        left = self._end[chosen] - self._head[chosen]
        n_each = min(int(left.min()), n_ubatch // len(chosen))
        if n_keep_tail > 0:
            n_sets, n_each = _spare_tails(left, n_each, n_ubatch, n_keep_tail)
            chosen = chosen[:n_sets]
        index = self._queued[self._head[chosen][:, None] + np.arange(n_each)].ravel()
        self._head[chosen] += n_each
        return self._make(index, n_seqs=len(chosen), equal_seqs=True)

    def seq(self, n_ubatch: int) -> Ubatch | None:
        """The tokens of one set and then of ever smaller subsets of it (SP-14)."""
        _check_limit(n_ubatch)
        if self.complete:
            return None
        parts: list[Ints] = []
        current, room = int(self.batch.set_of[self._first]), n_ubatch
        while True:
            nearest, smaller = self._next_smaller(current)
            queue = self._queued[self._head[current] : self._end[current]]
            part = queue[: min(room, int(np.searchsorted(queue, nearest)))]
            self._head[current] += len(part)
            parts.append(part)
            room -= len(part)
            if room == 0 or smaller is None:
                return self._make(np.concatenate(parts), n_seqs=1, equal_seqs=True)
            current = smaller

    def _in_order(self) -> list[int]:
        """The sets that have unused tokens, ordered by their first one."""
        live = np.flatnonzero(self._head < self._end)
        in_order: list[int] = live[np.argsort(self._queued[self._head[live]])].tolist()
        return in_order

    def _disjoint(self, limit: int) -> list[int]:
        """Sets in batch order, each disjoint from those before it (SP-6)."""
        chosen: list[int] = []
        covered = 0
        for number in self._in_order():
            if len(chosen) == limit:
                break
            if not self.batch.sets[number] & covered:
                chosen.append(number)
                covered |= self.batch.sets[number]
        return chosen

    def _follow(self, limit: int) -> list[int]:
        """Sequences with ids one after the other, each named by a token after the one that named its predecessor.

        A sequence is passed over where its id does not follow, and may be met again at a later token (SP-7).
        """
        number, named_at = int(self.batch.set_of[self._first]), self._first
        chosen = [number]
        sets, heads, ends = self.batch.sets, self._head.tolist(), self._end.tolist()
        # Without coupling sets are numbered by ascending id, so the id that follows can only be the next number.
        while len(chosen) < limit and number + 1 < len(sets) and sets[number + 1] == sets[number] << 1:
            number += 1
            place = bisect_right(self._queued, named_at, heads[number], ends[number])
            if place == ends[number]:
                break
            chosen.append(number)
            named_at = int(self._queued[place])
        return chosen

    def _next_smaller(self, current: int) -> tuple[int, int | None]:
        """The first unused token whose set is a proper subset of the current one, and that set."""
        mask = self.batch.sets[current]
        if self.batch.has_coupling:
            for number in self._in_order():
                if number != current and not self.batch.sets[number] & ~mask:
                    return int(self._queued[self._head[number]]), number
        return self.batch.n_tokens, None

    def _make(self, index: Ints, *, n_seqs: int, equal_seqs: bool) -> Ubatch:
        self._unused[index] = False
        self.n_used += len(index)
        self._first = self.batch.n_tokens if self.complete else self._first + int(self._unused[self._first :].argmax())
        self._out_ids.append(index[self.batch.output[index]])
        return take(self.batch, index, n_seqs=n_seqs, equal_seqs=equal_seqs)


def _check_limit(n_ubatch: int, n_keep_tail: int = 0) -> None:
    if n_ubatch < 1:
        raise InvalidBatch(f"n_ubatch is {n_ubatch}; a ubatch holds at least one token", reason="n_ubatch")  # SP-3
    if n_keep_tail > 0 and n_ubatch <= n_keep_tail:
        raise InvalidBatch(
            f"n_ubatch is {n_ubatch}; it must be above {n_keep_tail}, the tokens to keep together",  # SP-10
            reason="n_ubatch",
        )


def _spare_tails(left: Ints, n_each: int, n_ubatch: int, n_keep_tail: int) -> tuple[int, int]:
    """How many sets to take, and how many tokens of each, so that no tail is divided (SP-10, SP-11)."""
    rest = left - n_each
    cut = (rest > 0) & (rest < n_keep_tail)
    n_whole = int(cut.argmax()) if cut.any() else len(cut)
    if n_whole > 0:
        return n_whole, n_each
    first = int(left[0])
    return 1, first if first <= n_ubatch else first - n_keep_tail
