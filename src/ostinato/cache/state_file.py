"""Saved states: all of memory, or one sequence, as bytes from which another memory can continue (ST-1..12).

If a load is refused because the bytes are no state, or one of another kind or architecture, nothing has changed; after
any other failure the target is empty in every part of memory (ST-1, ST-8, HY-8). The memory kinds say what their parts
save, and `state_bytes.py` is the format of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.cache.sequences import MAX_SEQ
from ostinato.cache.state_block import DAMAGED, Form, StateBlock, StateSelection
from ostinato.cache.state_bytes import (
    MAX_OVERHEAD_BYTES,
    Section,
    StateHeader,
    StateKind,
    StreamCounts,
    identify,
    pack,
    unpack,
)
from ostinato.cache.window import Window
from ostinato.errors import BadFile


class StatePart(Protocol):
    """A part of memory. `s` is a sequence, or None for everything that the part holds."""

    @property
    def n_streams(self) -> int: ...

    @property
    def form(self) -> Form: ...

    @property
    def layout(self) -> dict[str, Any]:
        """The properties, as JSON, that a part must have to load the bytes of this one."""

    def check_ready(self, s: int | None) -> None:
        """InternalError while copies or shifts are pending (ST-10), InvalidBatch for a sequence out of range."""

    def choose(self, s: int | None) -> list[StateSelection]:
        """The cells to save: for each stream, or for the stream of the sequence."""

    def check(self, s: int | None, number: int, block: StateBlock) -> None:
        """BadFile for a block, of this stream, that the part cannot load."""

    def empty(self, s: int | None) -> None:
        """Remove the sequence, or everything."""

    def load(self, s: int | None, blocks: Sequence[StateBlock]) -> None:
        """Load checked blocks; what they replace has been removed."""


def attention_layout(
    layers: Iterable[int], window: Window, form: Form, *, rope_set: int | None = None
) -> dict[str, Any]:
    """The layout of a part with the keys and values of these layers. `rope_set`: of a model that has several."""
    seen = {"window": f"{window.kind} {window.size}", "grid": form.grid}
    rotated = {} if rope_set is None else {"rope_set": rope_set}
    return {"part": "attention", **seen, **rotated, "layers": list(layers), "tensors": list(map(str, form.cells))}


def recurrent_layout(layers: Iterable[int], form: Form) -> dict[str, Any]:
    """The layout of a part with the states of these layers."""
    return {"part": "recurrent", "layers": list(layers), "tensors": list(map(str, form.cells))}


class AttentionPart(StatePart, Protocol):
    """A part with keys and values."""

    @property
    def forgets_nothing(self) -> bool:
        """Whether partial states leave it out: it keeps all positions while other parts drop old ones (ST-12)."""

    def end_at(self, s: int, last: int) -> None:
        """Remove positions after the end of a partial state; BadFile where the part does not reach that far."""


@dataclass(frozen=True, slots=True)
class StateParts:
    """All parts of a memory, and the architecture whose memory it is."""

    architecture: str
    kv: tuple[AttentionPart, ...] = ()
    recurrent: StatePart | None = None

    @property
    def all(self) -> list[StatePart]:
        return [*self.kv, *([] if self.recurrent is None else [self.recurrent])]

    @property
    def left_out(self) -> list[AttentionPart]:
        """The parts that a partial state leaves out: full attention, where there are other parts (ST-12)."""
        full = [part for part in self.kv if part.forgets_nothing]
        return full if len(full) < len(self.all) else []

    def kept(self, partial: bool) -> list[StatePart]:
        """The parts that a state holds."""
        return [part for part in self.all if not partial or part not in self.left_out]

    def empty(self, s: int | None) -> None:
        """Forget a sequence, or everything, in every part."""
        for part in self.all:
            part.empty(s)

    def check(self, s: int | None) -> None:
        """Whether a state can be saved or loaded now; an error where not, and nothing has changed."""
        for part in self.all:
            part.check_ready(s)


def save(
    parts: StateParts, s: int | None = None, *, partial: bool = False, note: Mapping[str, Any] | None = None
) -> bytes:
    """Save the whole memory, or one sequence, with the application's own note (JSON).

    `partial` leaves out full attention, for a load into a memory that still has it (ST-4, ST-12).
    """
    parts.check(s)
    chosen = [(part, part.choose(s)) for part in parts.kept(partial)]
    sections = tuple(Section(part.layout, tuple(stream.counts for stream in streams)) for part, streams in chosen)
    pieces = (piece for _, streams in chosen for stream in streams for piece in stream.pieces())
    return pack(_kind(s), parts.architecture, StateHeader(sections, partial, note), pieces)


def largest(parts: StateParts) -> int:
    """An upper bound for the bytes of a state that these parts can load: the limit for `read`."""
    cells = [(part.n_streams, part.form) for part in parts.all]
    n_bytes = sum(n * form.n_bytes(StreamCounts(form.size, form.size * MAX_SEQ)) for n, form in cells)
    return n_bytes + MAX_OVERHEAD_BYTES


def load(parts: StateParts, s: int | None, data: bytes) -> None:
    """Replace the whole memory (ST-7), or sequence s by a saved one of any id; the others stay.

    NoSlot when they leave no room (ST-5). A partial state needs the rest of its sequence in memory; positions after its
    end are removed (ST-12).
    """
    kind = _kind(s)
    parts.check(s)
    identity = identify(data)
    if identity.kind != kind:
        raise BadFile(f"the saved state is one of kind {identity.kind!r}, and {kind!r} is wanted here")  # ST-1
    if identity.architecture != parts.architecture:
        raise BadFile(
            f"the saved state is of the architecture {identity.architecture!r}, and this model's is "
            f"{parts.architecture!r}: load it with the model that saved it"  # ST-1
        )
    try:
        header, payload = unpack(data, identity)
        partial = header.partial and s is not None
        blocks = _blocks(parts.kept(partial), s, header.sections, payload)
        if partial and s is not None:
            _end_left_out(parts, s, blocks)
        for part, _ in blocks:
            part.empty(s)
        for part, streams in blocks:
            part.load(s, streams)
    except BaseException:  # any exception: a half-loaded state must not stay
        parts.empty(s)
        raise


def _kind(s: int | None) -> StateKind:
    return "whole" if s is None else "sequence"


def _blocks(
    kept: Sequence[StatePart], s: int | None, sections: Sequence[Section], payload: memoryview
) -> list[tuple[StatePart, list[StateBlock]]]:
    """The blocks for each part. All checks of the state happen here, before anything is changed."""
    if len(sections) != len(kept):
        raise BadFile(f"the saved state has {len(sections)} parts and this memory {len(kept)}; load it as it was saved")
    pairs = list(zip(kept, sections, strict=True))
    for part, section in pairs:
        _check_like(part, s, section)
    promised = sum(part.form.n_bytes(counts) for part, section in pairs for counts in section.streams)
    if promised != len(payload):
        raise BadFile(f"the saved state has {len(payload)} bytes of cells and promises {promised}; {DAMAGED}")
    found: list[tuple[StatePart, list[StateBlock]]] = []
    for part, section in pairs:
        form, streams = part.form, []
        for number, counts in enumerate(section.streams):
            n_bytes = form.n_bytes(counts)
            block, payload = form.read(counts, payload[:n_bytes]), payload[n_bytes:]
            part.check(s, number, block)
            streams.append(block)
        found.append((part, streams))
    return found


def _check_like(part: StatePart, s: int | None, section: Section) -> None:
    """The state must come from a part like this one: its bytes mean nothing to another (ST-8)."""
    for name, mine in part.layout.items():
        saved = section.layout.get(name)
        if saved != mine:
            raise BadFile(
                f"the saved state does not fit this memory: {_difference(name, saved, mine)}; load it with the model "
                "and the options that saved it"  # ST-8
            )
    wanted = part.n_streams if s is None else 1
    if len(section.streams) != wanted:
        raise BadFile(
            f"the saved state has {len(section.streams)} streams and this memory takes {wanted}: allow as many "
            "sequences, with a stream for each or one for all, as where it was saved"  # ST-7
        )


def _difference(name: str, saved: Any, mine: Any) -> str:
    if isinstance(saved, list) and isinstance(mine, list):
        if len(saved) != len(mine):
            return f"it has {len(saved)} {name}, not {len(mine)}"
        k = next(k for k, (theirs, ours) in enumerate(zip(saved, mine, strict=True)) if theirs != ours)
        return _difference(f"{name}[{k}]", saved[k], mine[k])
    return f"its {name} is {str(saved)[:80]}, not {mine}"


def _end_left_out(parts: StateParts, s: int, blocks: Sequence[tuple[StatePart, Sequence[StateBlock]]]) -> None:
    """Cut the parts that a partial state left out at its end; if it is empty, they become empty too (ST-6)."""
    lasts = [int(block.rows.position.max()) for _, streams in blocks for block in streams if block.n_cells]
    for part in parts.left_out:
        if lasts:
            part.end_at(s, max(lasts))
        else:
            part.empty(s)
