"""The ways of decoding that are loops over a slot table, step by step, as tests/decoder/test_semantics.py sees them.

A loop may be native code, nodes in torch, the CUDA plans by their references, or the tape in its emulator: none is
watched from inside, so it is found out. What a step wrote, by comparing memory before and after; what a row read, by
disturbing entries and running the same step again. A row's own entry is written in the step itself, before it could be
disturbed: that it is read is shown by each loop's comparison with full forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from ostinato.backends.base import Settled
from ostinato.backends.cuda.chunks import FusedChunks
from ostinato.backends.cuda.plan import FusedPlan
from ostinato.backends.native.pages import NativePages
from ostinato.backends.runner import Runner
from ostinato.backends.torch.arrays import as_tensor
from ostinato.backends.torch.backend import TWIN
from ostinato.backends.torch.kernels import twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.start import CpuLoop
from ostinato.engine.choose import settle_model
from ostinato.engine.open import open_runner
from ostinato.loop.mode import DecodeMode
from ostinato.loop.plan import Plan
from ostinato.models.shape import Shape
from tests.backends.native.tiled import tiled
from tests.backends.tape.loop import EmulatedLoop
from tests.backends.tape.models import shape_of, small
from tests.decoder.stepping import Committed, Event, Place, Read, Wrote
from tests.engine.rig import Driver
from tests.random_model import MemoryKind, random_model

N_SLOTS, PAGES_EACH, PAGE, N_VOCAB = 4, 3, 16, 32

Cells = dict[tuple[int, str], Tensor]  # by layer and what it is, key or value: [pages, cells, heads, width]


@cache
def model_of(kind: MemoryKind) -> Model:
    return random_model(kind, n_vocab=N_VOCAB)


def settled_for(model: Model, mode: str, threads: int | None = None) -> Settled:
    return settle_model(
        model,
        mode,
        context=PAGES_EACH * PAGE,
        n_pages=N_SLOTS * PAGES_EACH,
        n_slots=N_SLOTS,
        n_tokens=N_VOCAB,
        kv_type="f32",
        threads=threads,
    )


def opened(model: Model, mode: str, threads: int | None = None) -> Runner:
    return open_runner(model, settled_for(model, mode, threads), outbox_entries=64)  # small: it is copied each step


def native(kind: MemoryKind, threads: int) -> Runner:
    return opened(tiled(model_of(kind)), "loop", threads)


def eager(kind: MemoryKind) -> Runner:
    return opened(model_of(kind), "eager")


def fused(kind: MemoryKind) -> Runner:
    """The CUDA plan, steps and prompts by its references."""
    runner = opened(model_of(kind), TWIN)
    inside = runner.model, runner.memory, runner.tables, N_VOCAB
    runner.chunks = FusedChunks(*inside, twin_kernels())
    return replanned(runner, FusedPlan(*inside, twin_kernels()).plan())


def replanned(runner: Runner, plan: Plan) -> Runner:
    runner.start.close()
    runner.plan, runner.start = plan, CpuLoop(plan, runner.tables, runner.guard, runner.changed.set)
    runner.decode_mode = DecodeMode(plan, runner.start, runner.tables, runner.guard)
    runner.decode_mode.enter()  # leaves the plan's hash and epoch where the step boundary looks for them
    runner.decode_mode.exit()
    return runner


def tape(window: int | None) -> Runner:
    """The persistent kernel in its emulator, a block and a few fibers smaller than any card's."""
    sizes = {"hidden": 64, "n_heads": 2, "n_kv_heads": 1, "ff_width": 64, "vocab": N_VOCAB}
    model = small(shape_of("llama", windows=(window, None), **sizes))
    return EmulatedLoop(model, settled_for(model, TWIN), outbox_entries=64, n_blocks=2)


class LoopStepper:
    """Sequences are slots; each has its own pages. The host says who is in a step by writing the rows of the table."""

    def __init__(self, opened: Callable[[], Runner]) -> None:
        runner = opened()
        self._driver = Driver(runner)
        shape = runner.model.shape
        self.windows: Mapping[int, int | None] = {layer: one.window for layer, one in shape.attention.items()}
        self.events: list[Event] = []
        self.tells_reads = False
        self._table, self._logits = runner.tables.table, as_tensor(runner.plan.buffer("logits").tensor)
        is_native = isinstance(runner.memory, NativePages)
        self._cells = native_cells(runner.memory) if is_native else paged_cells(runner.memory, shape)
        states = None if is_native else runner.memory.states
        self._states: dict[int, tuple[Tensor, ...]] = {} if states is None else dict(states.layers)
        self.state_layers: Sequence[int] = tuple(self._states)

    def __del__(self) -> None:
        self._driver.close()

    def admit(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        self._table["n_rows"][0] = 0
        before = self._saved()
        for slot, prompt in prompts.items():
            pages = range(slot * PAGES_EACH, (slot + 1) * PAGES_EACH)
            self._driver.admit(slot, list(prompt), most=PAGES_EACH * PAGE - len(prompt), pages=pages)
        self.events += self._written(before, {slot: range(len(prompt)) for slot, prompt in prompts.items()})
        self._driver.step()
        self.events.append(Committed(frozenset(Place(s, p) for s, ids in prompts.items() for p in range(len(ids)))))
        return self._said(prompts)

    def step(self, tokens: Mapping[int, int]) -> dict[int, int]:
        positions = {slot: self.length(slot) for slot in tokens}
        kept = self._saved()
        self._run(tokens)
        self.events += self._written(kept, {slot: [position] for slot, position in positions.items()})
        if self.tells_reads:
            after, logits = self._saved(), self._logits[: len(tokens)].clone()
            self.events += self._reads(tokens, positions, kept, logits)
            self._restore(after)
        self.events.append(Committed(frozenset(Place(s, p) for s, p in positions.items())))
        self._driver.entries = []
        self._driver._collect()
        return self._said(tokens)

    def length(self, sequence: int) -> int:
        return int(self._table["position"][sequence])

    def _run(self, tokens: Mapping[int, int]) -> None:
        self._table["n_rows"][0] = len(tokens)
        for row, (slot, token) in enumerate(tokens.items()):
            self._table["row_slot"][row] = slot
            self._table["token"][slot] = token
        self._driver.runner.decode_mode.step()

    def _said(self, asked: Mapping[int, object]) -> dict[int, int]:
        found = {entry.slot: entry.token for entry in self._driver.entries if entry.token is not None}
        self._driver.entries = []
        return {slot: found[slot] for slot in asked}

    def _written(self, before: list[Tensor], asked: Mapping[int, Iterable[int]]) -> list[Event]:
        """What is another one than before; a state stands for all positions that it was asked to take in."""
        was = dict(zip(self._cells, before, strict=False))
        events: list[Event] = []
        for (layer, what), cells in self._cells.items():
            changed = (cells != was[layer, what]).flatten(2).any(2)
            events += [Wrote(layer, what, place_of(page, cell)) for page, cell in changed.nonzero().tolist()]
        at = len(self._cells)
        for layer, parts in self._states.items():
            changed = torch.zeros(len(parts[0]), dtype=torch.bool)
            for part in parts:
                changed |= (part != before[at]).flatten(1).any(1)
                at += 1
            slots = changed[:N_SLOTS].nonzero().flatten().tolist()
            events += [Wrote(layer, "state", Place(slot, p)) for slot in slots for p in asked.get(slot, [-1])]
        return events

    def _reads(
        self, tokens: Mapping[int, int], positions: Mapping[int, int], kept: list[Tensor], logits: Tensor
    ) -> list[Event]:
        """Who reads which entries of the past: whose logits change when they are others.

        All of one sequence at once shows who reads another's; then one of each sequence at once, which of its own.
        """
        self._restore(kept)
        lengths = {slot: self.length(slot) for slot in range(N_SLOTS)}
        own = {(layer, slot): [Place(slot, positions[slot])] for layer in self.windows for slot in tokens}
        for layer in self.windows:
            for slot, length in lengths.items():
                everything = [Place(slot, position) for position in range(length)]
                for reader in self._disturbed_by(layer, everything, tokens, kept, logits) - {slot}:
                    own[layer, reader] += everything
            for position in range(max(lengths.values())):
                some = [Place(slot, position) for slot, length in lengths.items() if position < length]
                for reader in self._disturbed_by(layer, some, tokens, kept, logits):
                    own[layer, reader].append(Place(reader, position))
        return [
            Read(layer, Place(slot, positions[slot]), tuple(sorted(places))) for (layer, slot), places in own.items()
        ]

    def _disturbed_by(
        self, layer: int, places: Sequence[Place], tokens: Mapping[int, int], kept: list[Tensor], logits: Tensor
    ) -> set[int]:
        """Whose logits are others when these entries are."""
        self._restore(kept)
        for what in ("key", "value"):
            for place in places:
                self._cells[layer, what][cell_of(place)].mul_(-2).add_(1)
        self._run(tokens)
        return {slot for row, slot in enumerate(tokens) if not torch.equal(self._logits[row], logits[row])}

    def _memories(self) -> list[Tensor]:
        tables = self._driver.runner.tables
        states = [part for parts in self._states.values() for part in parts]
        arenas = [as_tensor(arena.memory) for arena in (tables.table, tables.rings)]
        return [*self._cells.values(), *states, *arenas]

    def _saved(self) -> list[Tensor]:
        return [memory.clone() for memory in self._memories()]

    def _restore(self, saved: list[Tensor]) -> None:
        for memory, kept in zip(self._memories(), saved, strict=True):
            memory.copy_(kept)


def native_cells(memory: NativePages) -> Cells:
    """Views of a native loop's pages, which order keys with cells side by side and values by heads."""
    cells: Cells = {}
    for layer, pages in memory.layers.items():
        cells[layer, "key"] = torch.as_tensor(pages.keys).permute(0, 3, 1, 2)
        cells[layer, "value"] = torch.as_tensor(pages.values).permute(0, 2, 1, 3)
    return cells


def paged_cells(memory: PagedMemory, shape: Shape) -> Cells:
    """Views of pages in torch, which hold one cell after the other."""
    if memory.kv is None:
        return {}
    halves = (("key", memory.kv.keys), ("value", memory.kv.values))
    return {
        (layer, what): half.parts[0].view(
            -1, PAGE, shape.attention[layer].n_kv_heads, shape.attention[layer].head_width
        )
        for what, layers in halves
        for layer, half in layers.items()
    }


def cell_of(place: Place) -> tuple[int, int]:
    return place.sequence * PAGES_EACH + place.position // PAGE, place.position % PAGE


def place_of(page: int, cell: int) -> Place:
    return Place(page // PAGES_EACH, page % PAGES_EACH * PAGE + cell)
