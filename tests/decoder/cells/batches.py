"""Random batches for a decoder whose memory an oracle knows: good ones of every shape, and bad ones of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from hypothesis import strategies as st

from ostinato.decoder.batch.batch import Batch
from tests.decoder.cells.oracle import Oracle, Row
from tests.decoder.cells.rig import N_VOCAB, Rig

MAX_START, LONGEST = 12, 5

Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch that a memory in the oracle's state must take, if it has room."""

    rows: tuple[Row, ...]
    outputs: tuple[bool, ...]
    generated: bool = False  # positions are left to the decoder
    last_only: bool = False  # output flags too

    @property
    def batch(self) -> Batch:
        return Batch(
            token=[row.token for row in self.rows],
            pos=None if self.generated else [row.position for row in self.rows],
            seq_id=[list(row.ids) for row in self.rows],
            output=None if self.last_only else list(self.outputs),
        )

    @property
    def coupled(self) -> bool:
        return any(len(row.ids) > 1 for row in self.rows)

    def of(self, s: int) -> list[int]:
        """The indices of a sequence's tokens."""
        return [index for index, row in enumerate(self.rows) if s in row.ids]


def draw_batch(draw: Draw, rig: Rig, *, n_outputs_max: int, coupled: bool = True) -> Drawn:
    """Tokens of one to three sequences, ragged and in any order, some of them shared where memory takes that."""
    random = Random(draw(st.integers(0, 1 << 16)))
    members = draw(st.lists(st.sampled_from(rig.oracle.ids), min_size=1, max_size=3, unique=True))
    starts = _starts(draw, rig.oracle, members)
    outputs_kind = draw(st.sampled_from(["last", "all", "none", "some"]))
    lanes: list[list[Row]] = []
    group = _in_step(rig.oracle, members, starts)
    if coupled and len(group) > 1 and rig.takes_coupling and draw(st.booleans()):
        shared, tails = _coupled(random, draw, group, starts)
        members = [s for s in members if s not in group]
        lanes += [shared, *tails]
    # One sequence may come alone with as much as three have together: longer than its window.
    longest = LONGEST if lanes or len(members) > 1 else 3 * LONGEST
    lengths = [draw(st.integers(1, longest)) for _ in members]
    lanes += [_lane(random, (s,), starts[s], n) for s, n in zip(members, lengths, strict=True)]
    rows = tuple(_merged(random, draw(st.sampled_from(["one by one", "in turns", "any"])), lanes))
    outputs = _outputs(random, outputs_kind, len(rows), n_outputs_max)
    from_zero = all(rig.oracle.pos_max(s) is not None or starts[s] == 0 for row in rows for s in row.ids)
    return Drawn(rows, outputs, from_zero and draw(st.booleans()), outputs_kind == "last")


def _starts(draw: Draw, oracle: Oracle, members: Sequence[int]) -> dict[int, int]:
    """Where each goes on; an empty sequence may begin anywhere."""
    empty = draw(st.sampled_from([0, 0, 1, MAX_START]))
    following = {s: oracle.next_position(s) for s in members}
    return {s: empty if position is None else position for s, position in following.items()}


def _in_step(oracle: Oracle, members: Sequence[int], starts: dict[int, int]) -> list[int]:
    """The members that may share tokens with the first: memory holds the same stretch of positions (S-15)."""
    first = members[0]
    stretch = {s: (oracle.pos_min(s), oracle.pos_max(s), starts[s]) for s in members}
    return [s for s in members if stretch[s] == stretch[first]]


def _lane(random: Random, ids: tuple[int, ...], start: int, n: int) -> list[Row]:
    return [Row(random.randrange(N_VOCAB), start + k, ids) for k in range(n)]


def _coupled(random: Random, draw: Draw, group: list[int], starts: dict[int, int]) -> tuple[list[Row], list[list[Row]]]:
    """Tokens of all of a group, then fewer and fewer of it: {0, 1, 2}, {0, 1}, {0} and {1} and {2}."""
    shared: list[Row] = []
    at = starts[group[0]]
    ends: dict[int, int] = {}
    for size in range(len(group), 1, -1):
        n = draw(st.integers(1 if size == len(group) else 0, 2))
        ids = group[:size]
        shared += _lane(random, tuple(random.sample(ids, size)), at, n)
        at += n
        ends |= dict.fromkeys(ids, at)
    return shared, [_lane(random, (s,), ends[s], draw(st.integers(0, 2))) for s in group]


def _merged(random: Random, how: str, lanes: list[list[Row]]) -> list[Row]:
    """All rows; those of a sequence stay in their order."""
    left = [lane for lane in lanes if lane]
    if how == "one by one":
        return [row for lane in left for row in lane]
    merged: list[Row] = []
    while left:
        # A lane waits until the positions before it, which may be in a shared lane, are there.
        ready = [lane for lane in left if not _waits(lane[0], left, lane)]
        lane = ready[len(merged) % len(ready)] if how == "in turns" else random.choice(ready)
        merged.append(lane.pop(0))
        left = [lane for lane in left if lane]
    return merged


def _waits(row: Row, lanes: list[list[Row]], mine: list[Row]) -> bool:
    return any(
        set(row.ids) & set(other.ids) and other.position < row.position
        for lane in lanes
        if lane is not mine
        for other in lane
    )


def _outputs(random: Random, kind: str, n: int, most: int) -> tuple[bool, ...]:
    if kind == "last":
        return (*[False] * (n - 1), True)
    flags = [kind == "all" or (kind == "some" and random.random() < 0.5) for _ in range(n)]
    while sum(flags) > most:
        flags[flags.index(True)] = False
    return tuple(flags)


# Bad batches


@dataclass(frozen=True, slots=True)
class Bad:
    """A batch to be refused, for that reason, at that token."""

    batch: Batch
    reason: str
    index: int | None


def spoil(draw: Draw, rig: Rig, good: Drawn, limit: int) -> Bad:
    """A good batch with one thing wrong in it."""
    i = draw(st.integers(0, len(good.rows) - 1))
    batch = replace(good.batch, pos=[row.position for row in good.rows])
    makers = [_bad_token, _no_sequence, _unknown_sequence, _twice, _negative, _shape, _nothing, _gap, _hole, _down]
    found = [bad for make in makers if (bad := make(batch, good, i, rig, limit)) is not None]
    found += _bad_sharing(rig) + _too_much(rig)
    chosen: Bad = draw(st.sampled_from(found))
    return chosen


def _at(values: Any, i: int, value: Any) -> list[Any]:
    return [*values[:i], value, *values[i + 1 :]]


def _bad_token(batch: Batch, good: Drawn, i: int, rig: Rig, limit: int) -> Bad | None:
    return Bad(replace(batch, token=_at(batch.token, i, N_VOCAB if i % 2 else -1)), "token_range", i)


def _no_sequence(batch: Batch, good: Drawn, i: int, rig: Rig, limit: int) -> Bad | None:
    return Bad(replace(batch, seq_id=_at(batch.seq_id, i, [])), "seq_empty", i)


def _unknown_sequence(batch: Batch, good: Drawn, i: int, rig: Rig, limit: int) -> Bad | None:
    return Bad(replace(batch, seq_id=_at(batch.seq_id, i, [limit if i % 2 else -1])), "seq_range", i)


def _twice(batch: Batch, good: Drawn, i: int, rig: Rig, limit: int) -> Bad | None:
    ids = list(good.rows[i].ids)
    return Bad(replace(batch, seq_id=_at(batch.seq_id, i, [*ids, ids[0]])), "seq_duplicate", i)


def _negative(batch: Batch, good: Drawn, i: int, rig: Rig, limit: int) -> Bad | None:
    return Bad(replace(batch, pos=_at(batch.pos, i, -1)), "pos_negative", i)


def _shape(batch: Batch, good: Drawn, i: int, rig: Rig, limit: int) -> Bad | None:
    return Bad(replace(batch, output=[1] * (len(good.rows) + 1)), "shape", None)


def _nothing(batch: Batch, good: Drawn, i: int, rig: Rig, limit: int) -> Bad | None:
    return Bad(Batch(token=[]), "empty", None)


def _gap(batch: Batch, good: Drawn, i: int, rig: Rig, limit: int) -> Bad | None:
    """A sequence that memory knows goes on one position too late."""
    s = good.rows[i].ids[0]
    if good.coupled or rig.oracle.pos_max(s) is None:
        return None
    pos = [row.position + (s in row.ids) for row in good.rows]
    return Bad(replace(batch, pos=pos), "pos_memory_gap", good.of(s)[0])


def _hole(batch: Batch, good: Drawn, i: int, rig: Rig, limit: int) -> Bad | None:
    indices = good.of(good.rows[i].ids[0])
    if good.coupled or len(indices) < 2:
        return None
    last = indices[-1]
    return Bad(replace(batch, pos=_at(batch.pos, last, good.rows[last].position + 1)), "pos_not_contiguous", last)


def _down(batch: Batch, good: Drawn, i: int, rig: Rig, limit: int) -> Bad | None:
    indices = good.of(good.rows[i].ids[0])
    if good.coupled or len(indices) < 2:
        return None
    a, b = indices[-2:]
    pos = _at(_at(batch.pos, a, good.rows[b].position), b, good.rows[a].position)
    return Bad(replace(batch, pos=pos), "pos_decreasing", b)


def _too_much(rig: Rig) -> list[Bad]:
    """More tokens than a batch holds, or more outputs (D-7)."""
    s, sizes = rig.oracle.ids[0], rig.decoder.settings
    many = sizes.n_batch + 1
    return [
        Bad(Batch(token=[1] * many, seq_id=[[s]] * many), "n_batch", None),
        Bad(
            Batch(token=[1] * sizes.n_batch, seq_id=[[s]] * sizes.n_batch, output=[1] * sizes.n_batch),
            "n_outputs",
            None,
        ),
    ]


def _bad_sharing(rig: Rig) -> list[Bad]:
    """Tokens of several sequences that must not be: out of step, growing sets, or no memory for them at all."""
    oracle = rig.oracle
    empty = [s for s in oracle.ids if oracle.pos_max(s) is None]
    known = [s for s in oracle.ids if s not in empty]
    found: list[Bad] = []
    if empty and known:
        at = oracle.next_position(known[0]) or 0
        out_of_step = Batch(token=[1], pos=[at], seq_id=[[known[0], empty[0]]], output=[1])
        found.append(Bad(out_of_step, "coupled_diverged", 0))
    if len(empty) > 1:
        a, b = empty[:2]
        growing = Batch(token=[1, 2], pos=[0, 1], seq_id=[[a], [a, b]], output=[1, 1])
        found.append(Bad(growing, "subset_diverged", 1))
        if not rig.takes_coupling:
            shared = Batch(token=[1, 2], pos=[0, 1], seq_id=[[a, b], [a]], output=[0, 1])
            found.append(Bad(shared, "coupled_unsupported", 0))
    return found
