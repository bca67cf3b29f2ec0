"""What a way of decoding must show of itself so that the semantics of a step can be tested, and the decoder's way.

A `StepDecoder` is given a token for each of some sequences and gives back the one that follows each; beside that it
tells, in order, what its layers wrote and read and when it was committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch
from torch import Tensor

from ostinato.backends.torch.kv_store import Half
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.decoder import Decoder
from ostinato.decoder.cells.memory.cursor import PreparedBatch
from ostinato.decoder.cells.memory.forward import ForwardMemory, KVPart
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.ubatch_executor import AppliedMemory, Executed, UbatchExecutor
from ostinato.models.blocks import Attention
from tests.decoder.cells.rig import Kind, small_decoder


class Place(NamedTuple):
    """A token of a sequence."""

    sequence: int
    position: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """A layer wrote an entry of a token: its key, its value, or the recurrent state after it."""

    layer: int
    what: str  # "key", "value" or "state"
    place: Place


@dataclass(frozen=True, slots=True)
class Read:
    """A layer's attention let a token look at the keys and values of these."""

    layer: int
    place: Place
    seen: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """From here on these tokens are in memory."""

    places: frozenset[Place]


Event = Wrote | Read | Committed


class StepDecoder(Protocol):
    """One way of decoding, greedy. Sequences are numbers that the caller chooses; positions begin at 0."""

    tells_reads: bool  # False: events need not have what a step reads, which may take long to find out

    @property
    def windows(self) -> Mapping[int, int | None]:
        """The layers with attention, and how many positions each sees; None: all."""

    @property
    def state_layers(self) -> Sequence[int]:
        """The layers with a recurrent state."""

    @property
    def events(self) -> Sequence[Event]:
        """What has happened since the beginning, in order."""

    def admit(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Take in the prompts of new sequences; the token that follows each."""

    def step(self, tokens: Mapping[int, int]) -> dict[int, int]:
        """One step: a token for each of these sequences; the one that follows each. The others rest."""

    def length(self, sequence: int) -> int:
        """Tokens of a sequence that are in memory."""


class BatchStepper:
    """Steps as batches of the decoder: the host's way."""

    tells_reads = False  # and does all the same

    def __init__(self, kind: Kind, **sizes: Any) -> None:
        self.decoder: Decoder = small_decoder(kind, **{"cells": 128, "n_batch": 64, "n_seq_max": 4, **sizes})
        shape = self.decoder.model.shape
        self.windows = {layer: one.window for layer, one in shape.attention.items()}
        self.state_layers = [*shape.recurrent]
        self.events: list[Event] = []
        self.decoder._ubatches = _Watch(self.events)

    def admit(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        rows = [(s, token) for s, tokens in prompts.items() for token in tokens]
        ends = [i for i, (s, _) in enumerate(rows) if i + 1 == len(rows) or rows[i + 1][0] != s]
        return self._decode(rows, ends)

    def step(self, tokens: Mapping[int, int]) -> dict[int, int]:
        rows = list(tokens.items())
        return self._decode(rows, range(len(rows)))

    def length(self, sequence: int) -> int:
        last = self.decoder.memory.pos_max(sequence)
        return 0 if last is None else last + 1

    def _decode(self, rows: Sequence[tuple[int, int]], outputs: Sequence[int]) -> dict[int, int]:
        batch = Batch(
            token=[token for _, token in rows],
            seq_id=[[s] for s, _ in rows],
            output=[i in set(outputs) for i in range(len(rows))],
        )
        self.decoder.decode(batch)
        return {rows[i][0]: self._best(i) for i in outputs}

    def _best(self, index: int) -> int:
        logits = self.decoder.logits(index)
        assert logits is not None
        return int(logits.argmax())


class _Watch(UbatchExecutor):
    """Runs ubatches and writes down what their layers do."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def execute(self, memory: AppliedMemory, compute: Callable[[], int], *, expected: int) -> Executed:
        assert isinstance(memory, PreparedBatch)
        cursor, places = memory, _places(memory.ubatch)
        attend, write, read, keep = KVPart.attend, Half.write, Half.read, ForwardMemory.keep
        running: list[tuple[int, KVPart]] = []

        def watched_attend(part: KVPart, ops: Any, block: Attention, *rest: Any) -> Tensor:
            running.append((block.layer, part))
            return attend(part, ops, block, *rest)

        def watched_write(half: Half, stream: int, cells: Tensor, rows: Tensor) -> None:
            layer, part = running[-1]
            what = "key" if half is part.store.keys[layer] else "value"
            held = _held(_cache(cursor, part), stream, cells.tolist())
            self.events += [Wrote(layer, what, place) for cell in cells.tolist() for place in held[cell]]
            write(half, stream, cells, rows)

        def watched_read(half: Half, stream: int, cells: slice | Tensor, dtype: torch.dtype) -> Tensor:
            layer, part = running[-1]
            if half is part.store.keys[layer]:  # values are looked at through the same mask
                self.events += _reads(_cache(cursor, part), part, layer, stream, cells, places)
            return read(half, stream, cells, dtype)

        def watched_keep(forward: ForwardMemory, layer: int, states: tuple[Tensor, ...]) -> None:
            self.events += [Wrote(layer, "state", place) for place in places]
            keep(forward, layer, states)

        with (
            patch.object(KVPart, "attend", watched_attend),
            patch.object(Half, "write", watched_write),
            patch.object(Half, "read", watched_read),
            patch.object(ForwardMemory, "keep", watched_keep),
        ):
            executed = super().execute(memory, compute, expected=expected)
        self.events.append(Committed(frozenset(places)))
        return executed


def _places(ubatch: Ubatch) -> list[Place]:
    return [Place(s, p) for s, p in zip(ubatch.primary.tolist(), ubatch.first_pos.tolist(), strict=True)]


def _cache(cursor: PreparedBatch, part: KVPart) -> KVCache:
    """The cache whose tensors a part has."""
    for cache, _ in cursor._places:
        if isinstance(cache, KVCache) and cache._tensors is part.store:
            return cache
    raise AssertionError("keys and values of no cache")


def _held(cache: KVCache, stream: int, wanted: Sequence[int]) -> dict[int, list[Place]]:
    """What each of these cells of a stream is: a place for every sequence that has it; nothing for an empty cell."""
    cells = cache.streams[stream].cells
    return {cell: [Place(s, int(cells.position[cell])) for s in cells.ids(cell)] for cell in wanted}


def _reads(
    cache: KVCache, part: KVPart, layer: int, stream: int, cells: slice | Tensor, places: list[Place]
) -> list[Event]:
    """What each row of a stream sees of the cells that were read for it."""
    read = list(range(cache.size))[cells] if isinstance(cells, slice) else cells.tolist()
    held = _held(cache, stream, read)
    (view,) = (view for view in part.views if view.stream == stream)
    events: list[Event] = []
    for row in range(view.rows.stop - view.rows.start):
        mine = places[view.rows.start + row]
        visible = read if view.mask is None else [cell for cell, seen in zip(read, view.mask[row], strict=True) if seen]
        seen = sorted(_as_seen_by(mine.sequence, held[cell]) for cell in visible)
        events.append(Read(layer, mine, tuple(seen)))
    return events


def _as_seen_by(sequence: int, owners: list[Place]) -> Place:
    """A cell that several sequences have is the reader's own; a cell of no sequence is the place -1 of sequence -1."""
    return next((place for place in owners if place.sequence == sequence), owners[0] if owners else Place(-1, -1))
