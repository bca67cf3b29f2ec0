"""A KV cache written as slowly and plainly as the rules read: one cell at a time, a list of (position, ids, shift)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from ostinato.decoder.batch.ubatch import Ubatch
from tests.vectors.ubatches import seq_lists

Token = tuple[int, list[int]]  # position, ids


@dataclass
class Cell:
    position: int
    ids: set[int]
    shift: int = 0


def masked(kind: str, size: int, key: int, query: int) -> bool:
    """SW-2, one pair at a time."""
    if kind == "standard":
        return query - key >= size
    if kind == "chunked":
        return key < (query // size) * size
    if kind == "symmetric":
        return abs(query - key) > size // 2
    return False


@dataclass
class Stream:
    cells: list[Cell | None]
    head: int = 0
    has_shift: bool = False

    def copy(self) -> Stream:
        cells = [None if c is None else Cell(c.position, set(c.ids), c.shift) for c in self.cells]
        return Stream(cells, self.head, self.has_shift)

    def positions(self, s: int) -> list[int]:
        return [cell.position for cell in self.cells if cell is not None and s in cell.ids]

    def lower_head(self, freed: list[int]) -> None:
        if freed and min(freed) < self.head:
            self.head = min(freed)


@dataclass
class Oracle:
    """The rules KV, SQ and UP over plain lists."""

    size: int
    n_seq_max: int
    unified: bool
    kind: str = "none"
    n_swa: int = 0
    streams: list[Stream] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.streams:
            self.streams = [Stream([None] * self.size) for _ in range(1 if self.unified else self.n_seq_max)]

    def stream_of(self, s: int) -> Stream:
        return self.streams[0 if self.unified else s]

    def pos_min(self, s: int) -> int | None:
        return min(self.stream_of(s).positions(s), default=None)

    def pos_max(self, s: int) -> int | None:
        return max(self.stream_of(s).positions(s), default=None)

    # Slots

    def usable(self, stream: Stream, cell: Cell | None) -> bool:
        if cell is None:
            return True
        if len(cell.ids) != 1:
            return False
        (s,) = cell.ids
        return masked(self.kind, self.n_swa, cell.position, max(stream.positions(s)) + 1)

    def find(self, stream: Stream, n: int) -> list[int] | None:
        used = sum(1 for cell in stream.cells if cell is not None)
        at = 0 if stream.head > used + 2 * n else stream.head
        found: list[int] = []
        for _ in range(self.size):
            at = 0 if at >= self.size else at
            if self.usable(stream, stream.cells[at]):
                found.append(at)
            if len(found) == n:
                return found
            at += 1
        return None

    def groups(self, ubatch: Ubatch) -> list[tuple[int, list[Token]]]:
        tokens: list[Token] = list(zip(ubatch.first_pos.tolist(), seq_lists(ubatch), strict=True))
        if self.unified:
            return [(0, tokens)]
        return [(s, [token for token in tokens if token[1] == [s]]) for s in sorted(set(chain(*seq_lists(ubatch))))]

    def plan(self, ubatches: list[Ubatch]) -> list[list[tuple[int, list[int]]]] | None:
        """The slots of all ubatches, by trying on a copy (KV-8)."""
        scratch = Oracle(self.size, self.n_seq_max, self.unified, self.kind, self.n_swa)
        scratch.streams = [stream.copy() for stream in self.streams]
        slots = []
        for ubatch in ubatches:
            slot = []
            for number, tokens in scratch.groups(ubatch):
                cells = scratch.find(scratch.streams[number], len(tokens))
                if cells is None:
                    return None
                slot.append((number, cells))
            slots.append(slot)
            scratch.apply(ubatch, slot)
        return slots

    def apply(self, ubatch: Ubatch, slot: list[tuple[int, list[int]]]) -> None:
        for (number, tokens), (_, cells) in zip(self.groups(ubatch), slot, strict=True):
            stream = self.streams[number]
            lost: dict[int, int] = {}
            for (position, ids), at in zip(tokens, cells, strict=True):
                old = stream.cells[at]
                if old is not None:
                    (s,) = old.ids
                    lost[s] = max(lost.get(s, -1), old.position)
                stream.cells[at] = Cell(position, set(ids))
            for s, last in lost.items():
                if any(position <= last for position in stream.positions(s)):
                    self.drop(stream, s, 0, last + 1)
            stream.head = cells[-1] + 1

    def drop(self, stream: Stream, s: int, p0: int, p1: int) -> list[int]:
        freed = []
        for at, cell in enumerate(stream.cells):
            if cell is not None and s in cell.ids and p0 <= cell.position < p1:
                cell.ids.discard(s)
                if not cell.ids:
                    stream.cells[at] = None
                    freed.append(at)
        return freed

    def roll_back(self, slot: list[tuple[int, list[int]]]) -> None:
        for number, cells in slot:
            for at in cells:
                self.streams[number].cells[at] = None
            self.streams[number].lower_head(cells)

    # Sequence operations; "invalid" is returned, not raised

    def seq_rm(self, s: int | None, p0: int, p1: int) -> bool:
        for number, stream in enumerate(self.streams):
            ids = range(256) if s is None else [s]
            if s is not None and not self.unified and number != s:
                continue
            stream.lower_head([at for one in ids for at in self.drop(stream, one, p0, p1)])
        return True

    def seq_cp(self, a: int, b: int, p0: int, p1: int) -> str | None:
        if a == b:
            return None
        source, target = self.stream_of(a), self.stream_of(b)
        if source is target:
            for cell in source.cells:
                if cell is not None and a in cell.ids and p0 <= cell.position < p1:
                    cell.ids.add(b)
            return None
        last = self.pos_max(a)
        if p0 > 0 or p1 <= (-1 if last is None else last):
            return "invalid"
        mine = [c if c is not None and a in c.ids else None for c in source.cells]
        target.cells = [None if c is None else Cell(c.position, {b}, c.shift) for c in mine]
        target.head = source.head
        target.has_shift = any(c is not None and c.shift != 0 for c in target.cells)
        self.pending.append((a, b))
        return None

    def seq_keep(self, s: int) -> None:
        for stream in self.streams:
            freed = []
            for at, cell in enumerate(stream.cells):
                if cell is not None:
                    cell.ids &= {s}
                    if not cell.ids:
                        stream.cells[at] = None
                        freed.append(at)
            stream.lower_head(freed)

    def seq_add(self, s: int, p0: int, p1: int, d: int) -> str | None:
        if d == 0 or p0 == p1:
            return None
        stream = self.stream_of(s)
        at = self.chosen(stream, s, p0, p1)
        if any(len(cell.ids) > 1 for _, cell in at):
            return "invalid"
        freed = []
        for i, cell in at:
            cell.position += d
            cell.shift += d
            stream.has_shift = True
            if cell.position < 0:
                stream.cells[i] = None
                freed.append(i)
        stream.head = min(freed, default=0)
        return None

    def seq_div(self, s: int, p0: int, p1: int, d: int) -> str | None:
        if d == 1 or p0 == p1:
            return None
        stream = self.stream_of(s)
        at = self.chosen(stream, s, p0, p1)
        if d < 1 or any(len(cell.ids) > 1 for _, cell in at):
            return "invalid"
        for _, cell in at:
            cell.shift += cell.position // d - cell.position
            cell.position //= d
            stream.has_shift = True
        return None

    def chosen(self, stream: Stream, s: int, p0: int, p1: int) -> list[tuple[int, Cell]]:
        found = [(i, c) for i, c in enumerate(stream.cells) if c is not None and s in c.ids]
        return [(i, c) for i, c in found if p0 <= c.position < p1]

    def clear(self) -> None:
        self.streams = [Stream([None] * self.size) for _ in self.streams]
        self.pending = []

    def update(self) -> str:
        if not self.pending and not any(stream.has_shift for stream in self.streams):
            return "no_update"
        self.pending = []
        for stream in self.streams:
            stream.has_shift = False
            for cell in stream.cells:
                if cell is not None:
                    cell.shift = 0
        return "success"

    def told(self) -> list[tuple[int, bool, list[object]]]:
        """Everything there is to know, for comparing."""
        return [
            (
                stream.head,
                stream.has_shift,
                [None if c is None else [c.position, sorted(c.ids), c.shift] for c in stream.cells],
            )
            for stream in self.streams
        ]
