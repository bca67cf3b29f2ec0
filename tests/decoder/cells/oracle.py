"""The slow and obvious decoder: it remembers what every sequence has been told, and computes from that alone.

An `Entry` is a token together with everything it could see when it was decoded; what the model makes of it is a pure
function of that, computed row by row with arithmetic of its own (`Truth`). An `Oracle` keeps for every sequence the
entries it holds, and does to these lists what memory operations do to a sequence: no cells, no slots, no ubatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.backends.torch.model import Model
from ostinato.models.blocks import AnyAttention


class Sight(NamedTuple):
    """An entry and the position it had when it was looked at: shifts move entries after they were decoded."""

    entry: Entry
    position: int


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A token that was decoded at a position, and what there was before it."""

    serial: int
    token: int
    position: int
    seen: tuple[Sight, ...]  # what layers that see everything could look at
    near: tuple[Sight, ...]  # what windowed layers still had, inside their window or not
    before: Entry | None  # whose recurrent state it went on from; None: a fresh one


@dataclass(frozen=True, slots=True)
class Computed:
    """What the layers made of an entry: its keys at the position where it was decoded, values, states, last row."""

    keys: dict[int, Tensor]  # [kv_heads, head_width]
    values: dict[int, Tensor]
    states: dict[int, tuple[Tensor, ...]]
    hidden: Tensor


class Truth:
    """What a model says of entries. Nothing is kept but answers given before, each a function of its entry alone."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._known: dict[Entry, Computed] = {}

    def logits(self, entry: Entry) -> Tensor:
        """float32 [vocab]."""
        with torch.inference_mode():
            return self.model.logits(self.of(entry).hidden)[0]

    def key(self, sight: Sight, layer: int) -> Tensor:
        """The key of an entry as if it stood at the position of the sight, float64 [kv_heads, head_width]."""
        key = self.of(sight.entry).keys[layer].double()
        distance = sight.position - sight.entry.position
        rope = self.model.shape.attention[layer].rope
        if rope is None or distance == 0:
            return key
        angles = distance * self.model.frequencies[rope][0].double()
        half = len(angles)
        assert rope.pairing == "halves"
        assert 2 * half == key.shape[-1]
        # A pair is a complex number, and to turn it is to multiply it.
        turned = torch.complex(key[:, :half], key[:, half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    def value(self, sight: Sight, layer: int) -> Tensor:
        return self.of(sight.entry).values[layer].double()

    def of(self, entry: Entry) -> Computed:
        for missing in self._missing(entry):
            row = _Row(self, missing)
            with torch.inference_mode():
                hidden = self.model.hidden(torch.tensor([missing.token]), torch.tensor([missing.position]), row)
            self._known[missing] = Computed(row.keys, row.values, row.kept, hidden)
        return self._known[entry]

    def _missing(self, entry: Entry) -> list[Entry]:
        """The entry and everything it was made from that has no answer yet, oldest first."""
        found: dict[int, Entry] = {}
        open_ends = [entry]
        while open_ends:
            at = open_ends.pop()
            if at in self._known or at.serial in found:
                continue
            found[at.serial] = at
            open_ends += [sight.entry for sight in (*at.seen, *at.near)]
            open_ends += [] if at.before is None else [at.before]
        return [found[serial] for serial in sorted(found)]


@dataclass(slots=True)
class _Row:
    """The memory of one row: what its entry could see, taken from the truth about others."""

    truth: Truth
    entry: Entry
    n_seqs: int = 1
    n_planes: int = 1
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def attend(self, block: AnyAttention, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        layer, scale = block.layer, block.shape.query_scale
        assert k is not None
        assert v is not None
        assert block.shape.softcap is None
        self.keys[layer], self.values[layer] = k[0], v[0]
        sights = self._sights(layer)
        keys = torch.stack([*(self.truth.key(sight, layer) for sight in sights), k[0].double()])
        values = torch.stack([*(self.truth.value(sight, layer) for sight in sights), v[0].double()])
        group = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)  # [cells, heads, width]
        weights = ((q[0].double() * keys).sum(-1) * scale).softmax(0)  # [cells, heads]
        return (weights.unsqueeze(-1) * values).sum(0, keepdim=True).to(q.dtype)

    def _sights(self, layer: int) -> list[Sight]:
        window, here = self.truth.model.shape.attention[layer].window, self.entry.position
        among = self.entry.seen if window is None else self.entry.near
        return [sight for sight in among if here - sight.position < (math.inf if window is None else window)]

    def states(self, layer: int) -> tuple[Tensor, ...]:
        if self.entry.before is None:
            return tuple(torch.zeros(1, *size) for size in self.truth.model.shape.states[layer])
        return self.truth.of(self.entry.before).states[layer]

    def keep(self, layer: int, states: tuple[Tensor, ...]) -> None:
        self.kept[layer] = tuple(planes[:, 0] for planes in states)


class Row(NamedTuple):
    """One token of a batch: its sequences as listed, the first of them the one it is computed for."""

    token: int
    position: int
    ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Held:
    """An entry in the memory of one or several sequences, which share it by holding this very object."""

    entry: Entry
    position: int

    @property
    def sight(self) -> Sight:
        return Sight(self.entry, self.position)


@dataclass(slots=True)
class History:
    """What one sequence holds: for full attention, for windowed attention, and its recurrent state."""

    full: list[Held] = field(default_factory=list)
    near: list[Held] = field(default_factory=list)
    state: Held | None = None

    def copy(self, same: Callable[[Held], Held]) -> History:
        state = None if self.state is None else same(self.state)
        return History([same(held) for held in self.full], [same(held) for held in self.near], state)


Memory = Mapping[int, History]


def anew() -> Callable[[Held], Held]:
    """What makes copies of things held, so that what was shared is shared again."""
    made: dict[Held, Held] = {}
    return lambda held: made.setdefault(held, Held(held.entry, held.position))


def inside(position: int, p0: int | None, p1: int | None) -> bool:
    """Whether a position is in [p0, p1); None or a negative bound is none."""
    return position >= (p0 or 0) and (p1 is None or p1 < 0 or position < p1)


class Oracle:
    """Sequences as lists. `attends`, `recurs` and `window` say which of their parts the model needs."""

    def __init__(self, model: Model, ids: Sequence[int], *, unified: bool) -> None:
        shape = model.shape
        self.truth = Truth(model)
        self.ids, self.unified = tuple(ids), unified
        self.attends, self.recurs = bool(shape.attention), bool(shape.recurrent)
        self.window = next((one.window for one in shape.attention.values() if one.window is not None), None)
        self.of: dict[int, History] = {s: History() for s in ids}
        self._serial = count()

    # Reading

    def pos_max(self, s: int) -> int | None:
        return self._extreme(s, max, min)

    def pos_min(self, s: int) -> int | None:
        return self._extreme(s, min, max)

    def next_position(self, s: int) -> int | None:
        last = self.pos_max(s)
        return None if last is None else last + 1

    def n_full(self, ids: Iterable[int] | None = None) -> int:
        """Entries that these sequences hold together for full attention."""
        return len({held for s in ids or self.ids for held in self.of[s].full})

    def n_near(self, ids: Iterable[int] | None = None) -> int:
        return len({held for s in ids or self.ids for held in self.of[s].near})

    def n_states(self) -> int:
        return len({self.of[s].state for s in self.ids} - {None})

    def is_shared(self, s: int, p0: int | None, p1: int | None) -> bool:
        """Whether something of a sequence in the range is held by another one too, so that it cannot move (SQ-13)."""
        mine = self.of[s]
        held = {one for one in (*mine.full, *mine.near, mine.state) if one and inside(one.position, p0, p1)}
        others = {
            one
            for t in self.ids
            if t != s
            for one in (*self.of[t].full, *self.of[t].near, self.of[t].state)
            if one is not None
        }
        return bool(held & others)

    # Changing

    def decode(self, rows: Iterable[Row]) -> list[Entry]:
        """Tokens that are in memory now, in batch order; what became of each."""
        return [self._decode(row) for row in rows]

    def remove(self, s: int | None, p0: int | None, p1: int | None) -> None:
        """A removal that memory has agreed to."""
        for t in self.ids if s is None else [s]:
            mine = self.of[t]
            mine.full = [held for held in mine.full if not inside(held.position, p0, p1)]
            mine.near = [held for held in mine.near if not inside(held.position, p0, p1)]
            if mine.state is not None and inside(mine.state.position, p0, p1):
                mine.state = _earlier(mine.state, p0 or 0)

    def copy(self, a: int, b: int, p0: int | None, p1: int | None) -> None:
        if a == b:
            return
        source, target = self.of[a], self.of[b]
        if self.unified:
            for mine, theirs in ((target.full, source.full), (target.near, source.near)):
                mine += [held for held in theirs if inside(held.position, p0, p1) and held not in mine]
        else:
            copied = source.copy(anew())
            target.full, target.near = copied.full, copied.near
        target.state = source.state  # states are never copied in part (RM-12)

    def keep(self, s: int) -> None:
        for t in self.ids:
            if t != s:
                self.of[t] = History()

    def shift(self, s: int, p0: int | None, p1: int | None, distance: int) -> None:
        self._move(s, p0, p1, lambda position: position + distance)

    def divide(self, s: int, p0: int | None, p1: int | None, divisor: int) -> None:
        self._move(s, p0, p1, lambda position: position // divisor)

    def forget_near(self, s: int, lost: set[Held]) -> None:
        """Windowed memory was observed to have let go of these."""
        self.of[s].near = [held for held in self.of[s].near if held not in lost]

    # Saving

    def saved(self, s: int) -> History:
        """What a saved state of a sequence holds: what is out of the window of its last position is left out (ST-4)."""
        mine = self.of[s].copy(anew())
        last = max((held.position for held in mine.near), default=0)
        mine.near = [held for held in mine.near if self.window is None or last - held.position < self.window]
        return mine

    def restore(self, s: int, saved: History) -> None:
        self.of[s] = saved.copy(anew())

    def saved_all(self) -> Memory:
        same = anew()
        return {s: history.copy(same) for s, history in self.of.items()}

    def restore_all(self, saved: Memory) -> None:
        same = anew()
        self.of = {s: history.copy(same) for s, history in saved.items()}

    # Inside

    def _decode(self, row: Row) -> Entry:
        first = self.of[row.ids[0]]
        entry = Entry(
            next(self._serial),
            row.token,
            row.position,
            tuple(held.sight for held in first.full if held.position <= row.position),
            tuple(held.sight for held in first.near if held.position <= row.position),
            None if first.state is None else first.state.entry,
        )
        held, state = Held(entry, row.position), Held(entry, row.position)
        for s in row.ids:
            mine = self.of[s]
            mine.full += [held] if self.attends else []
            mine.near += [held] if self.window is not None else []
            mine.state = state if self.recurs else None
        return entry

    def _extreme(self, s: int, side: Callable[..., int], between: Callable[..., int]) -> int | None:
        """Of each part that a model has; where there are two, the one that `between` prefers (HY-6)."""
        mine = self.of[s]
        parts: list[int | None] = []
        if self.attends:
            held = mine.full if self.window is None else mine.near
            parts.append(side((one.position for one in held), default=-1))
        if self.recurs:
            parts.append(-1 if mine.state is None else mine.state.position)
        return None if -1 in parts else between(parts)

    def _move(self, s: int, p0: int | None, p1: int | None, to: Callable[[int], int]) -> None:
        mine = self.of[s]
        state = [] if mine.state is None else [mine.state]
        moved = {held for held in (*mine.full, *mine.near, *state) if inside(held.position, p0, p1)}
        for held in moved:
            held.position = to(held.position)
        mine.full = [held for held in mine.full if held.position >= 0]
        mine.near = [held for held in mine.near if held.position >= 0]


def _earlier(state: Held, p0: int) -> Held | None:
    """The state from before position p0."""
    entry: Entry | None = state.entry
    for _ in range(state.position - p0 + 1):
        entry = None if entry is None else entry.before
    return None if entry is None or p0 == 0 else Held(entry, p0 - 1)
