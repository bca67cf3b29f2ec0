"""The native loop's way of decoding, step by step, as tests/decoder/test_semantics.py wants to see it.

Native code cannot be watched from Python, so it is found out: what a step wrote, by comparing memory before and after;
what a row read, by disturbing one entry at a time and playing the same step again. A row's own entry is written in the
step itself, before it could be disturbed: that it is read is shown by the comparison with full forwards in
tests/backends/native/test_loop.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ostinato.engine.choose import settle_model
from ostinato.engine.open import open_runner
from tests.backends.native.tiled import tiled
from tests.decoder.stepping import Committed, Event, Place, Read, Wrote
from tests.engine.rig import Driver
from tests.random_model import MemoryKind, random_model

N_SLOTS, PAGES_EACH, PAGE = 4, 3, 16


class NativeStepper:
    """Sequences are slots; each has its own pages. The host says who is in a step by writing the rows of the table."""

    state_layers: Sequence[int] = ()

    def __init__(self, kind: MemoryKind, *, n_vocab: int, threads: int) -> None:
        model = tiled(random_model(kind, n_vocab=n_vocab))
        n_pages = N_SLOTS * PAGES_EACH
        settled = settle_model(
            model,
            "loop",
            context=PAGES_EACH * PAGE,
            n_pages=n_pages,
            n_slots=N_SLOTS,
            n_tokens=n_vocab,
            threads=threads,
        )
        self._driver = Driver(open_runner(model, settled, outbox_entries=64))  # small: it is copied for every step
        self.windows: Mapping[int, int | None] = dict(enumerate(model.shape.windows))
        self.events: list[Event] = []
        loop = self._driver.loop
        self._table, self._logits = loop.tables.table, loop.plan.buffer("logits").tensor
        # As attention.h orders a page: keys with positions side by side, values one position after the other.
        self._halves: dict[tuple[int, str], np.ndarray] = {}
        for layer, pages in enumerate(loop.memory.layers):
            self._halves |= {(layer, "key"): pages.keys, (layer, "value"): pages.values}

    def __del__(self) -> None:
        self._driver.close()

    def admit(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        self._table["n_rows"][0] = 0
        before = self._entries()
        for slot, prompt in prompts.items():
            pages = range(slot * PAGES_EACH, (slot + 1) * PAGES_EACH)
            self._driver.admit(slot, list(prompt), most=PAGES_EACH * PAGE - len(prompt), pages=pages)
        self.events += self._written(before)
        self._driver.step()
        self.events.append(Committed(frozenset(Place(s, p) for s, ids in prompts.items() for p in range(len(ids)))))
        return self._said(prompts)

    def step(self, tokens: Mapping[int, int]) -> dict[int, int]:
        positions = {slot: int(self._table["position"][slot]) for slot in tokens}
        before, kept = self._entries(), self._saved()
        self._play(tokens)
        wrote = self._written(before)
        after, logits = self._saved(), self._logits[: len(tokens)].copy()
        reads = self._reads(tokens, positions, kept, logits)
        self._restore(after)
        self.events += [*wrote, *reads, Committed(frozenset(Place(s, p) for s, p in positions.items()))]
        self._driver.entries = []
        self._driver._collect()
        return self._said(tokens)

    def length(self, sequence: int) -> int:
        return int(self._table["position"][sequence])

    def _play(self, tokens: Mapping[int, int]) -> None:
        self._table["n_rows"][0] = len(tokens)
        for row, (slot, token) in enumerate(tokens.items()):
            self._table["row_slot"][row] = slot
            self._table["token"][slot] = token
        self._driver.loop.mode.step()

    def _said(self, asked: Mapping[int, object]) -> dict[int, int]:
        found = {entry.slot: entry.token for entry in self._driver.entries if entry.token is not None}
        self._driver.entries = []
        return {slot: found[slot] for slot in asked}

    def _reads(
        self, tokens: Mapping[int, int], positions: Mapping[int, int], kept: list[np.ndarray], logits: np.ndarray
    ) -> list[Event]:
        """Who reads which entry of the past: whose logits change when it is another one."""
        seen: dict[tuple[int, int], list[Place]] = {
            (layer, slot): [Place(slot, positions[slot])] for layer in self.windows for slot in tokens
        }
        lengths = {slot: self._length_in(kept, slot) for slot in range(N_SLOTS)}
        for layer in self.windows:
            for slot, length in lengths.items():
                for position in range(length):
                    self._restore(kept)
                    for what in ("key", "value"):
                        cell = self._cell(layer, what, Place(slot, position))
                        cell[:] = cell * -2 + 1
                    self._play(tokens)
                    for row, reader in enumerate(tokens):
                        if not np.array_equal(self._logits[row], logits[row]):
                            seen[layer, reader].append(Place(slot, position))
        return [
            Read(layer, Place(slot, positions[slot]), tuple(sorted(places))) for (layer, slot), places in seen.items()
        ]

    def _length_in(self, kept: list[np.ndarray], slot: int) -> int:
        self._restore(kept)
        return int(self._table["position"][slot])

    def _cell(self, layer: int, what: str, place: Place) -> np.ndarray:
        page, cell = place.sequence * PAGES_EACH + place.position // PAGE, place.position % PAGE
        half: np.ndarray = self._halves[layer, what]
        return half[page, :, :, cell] if what == "key" else half[page, :, cell]

    def _entries(self) -> dict[tuple[int, str], np.ndarray]:
        return {name: half.copy() for name, half in self._halves.items()}

    def _written(self, before: Mapping[tuple[int, str], np.ndarray]) -> list[Event]:
        events: list[Event] = []
        for (layer, what), half in self._halves.items():
            axes = (1, 2) if what == "key" else (1, 3)
            changed = (half != before[layer, what]).any(axes[1]).any(axes[0])  # [pages, cells]
            for page, cell in np.argwhere(changed).tolist():
                place = Place(page // PAGES_EACH, page % PAGES_EACH * PAGE + cell)
                events.append(Wrote(layer, what, place))
        return events

    def _memories(self) -> list[np.ndarray]:
        tables = self._driver.loop.tables
        return [tables.table.memory, tables.rings.memory, *self._halves.values()]

    def _saved(self) -> list[np.ndarray]:
        return [memory.copy() for memory in self._memories()]

    def _restore(self, saved: list[np.ndarray]) -> None:
        for memory, kept in zip(self._memories(), saved, strict=True):
            memory[:] = kept
