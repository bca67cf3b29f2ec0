"""Decoders under test: small memories that fill up, wrap and evict soon, and faults that strike where they are told.

A `Rig` is a decoder with its oracle beside it; `check` compares what both hold, to the last cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args
from unittest.mock import patch

import numpy as np
from torch import Tensor

from ostinato.backends.torch.kv_store import KVStore
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.table import TWINS, Ops
from ostinato.cache.sequences import MAX_SEQ
from ostinato.decoder.cells.decoder import Decoder, never
from ostinato.decoder.cells.memory.cursor import PreparedBatch
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.decoder.cells.ubatch_executor import AppliedMemory, Executed, UbatchExecutor
from tests.decoder.cells.memory.makers import digest
from tests.decoder.cells.oracle import Held, Oracle
from tests.random_model import MemoryKind, random_model

N_VOCAB, HIDDEN, WINDOW = 32, 32, 6
CELL_STEP = 8
TOLERANCE = 1e-4

Kind = Literal["kv", "kv-streams", "swa", "swa-streams", "recurrent", "hybrid", "hybrid-streams"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MODEL_KINDS: dict[str, MemoryKind] = {"kv": "kv", "swa": "swa", "recurrent": "recurrent", "hybrid": "hybrid"}


class Strike(Exception):
    """What a fault raises: an exception of no class that the package knows."""


class Faults:
    """Ops that can be told to fail: the n-th call from now raises."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.error: BaseException = Strike("an op failed")
        self.watch: Callable[[], None] = lambda: None  # called before every op

    def ops(self) -> Ops:
        """Every op, watched."""
        return Ops(**{f.name: self._watched(getattr(TWINS, f.name)) for f in fields(TWINS)})

    def _watched(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.watch()
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise self.error
            return op(*args, **kwargs)

        return call


@cache
def model_of(kind: Kind) -> tuple[Model, Faults]:
    """A tiny model for the kind of memory, and the faults of its ops."""
    faults = Faults()
    with patch("tests.random_model.WINDOW", WINDOW):
        model = random_model(MODEL_KINDS[kind.removesuffix("-streams")], n_vocab=N_VOCAB, hidden=HIDDEN, seed=7)
    return replace(model, ops=faults.ops()), faults


@contextmanager
def small_cells(step: int = CELL_STEP) -> Iterator[None]:
    """Memories made inside come in steps of a few cells, not of 256: full and evicting after a handful of tokens."""
    with ExitStack() as stack:
        for module in ("decoder.cells.settings", "cache.window", "decoder.cells.memory.kv_cache"):
            stack.enter_context(patch(f"ostinato.{module}.CELL_STEP", step))
        yield


def small_decoder(kind: Kind, *, cells: int = 32, **sizes: Any) -> Decoder:
    """A decoder with that many cells in every stream."""
    unified = not kind.endswith("-streams")
    n_seq_max = sizes.setdefault("n_seq_max", 3)
    with small_cells():
        return Decoder(
            model_of(kind)[0],
            n_ctx=cells if unified else cells * n_seq_max,
            unified=unified,
            **{"n_ubatch": 4, **sizes},
        )


class RecordingExecutor(UbatchExecutor):
    """Remembers which batch indices are in memory: those of the ubatches that ran, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[list[int]] = []

    def execute(self, memory: AppliedMemory, compute: Callable[[], int], *, expected: int) -> Executed:
        assert isinstance(memory, PreparedBatch)
        index = memory.ubatch.index.tolist()
        executed = super().execute(memory, compute, expected=expected)
        self.done.append(index)
        return executed


@dataclass(frozen=True, slots=True)
class Contents:
    """Every byte that a memory keeps: bookkeeping, and tensors, cells that no sequence owns included."""

    integers: tuple[object, ...]
    tensors: tuple[bytes, ...]


def contents(decoder: Decoder) -> Contents:
    parts = decoder.parts
    caches = [part for part in (parts.full, parts.windowed) if part is not None]
    integers: list[object] = [digest(cache) for cache, _ in caches]
    tensors = [part for _, store in caches for half in store.halves for part in half.parts]
    if parts.recurrent is not None:
        memory, states = parts.recurrent
        integers.append(memory.state.copy())
        tensors += [state for layer in states.layers.values() for state in layer]
    return Contents(tuple(integers), tuple(tensor.numpy().tobytes() for tensor in tensors))


@dataclass(slots=True)
class Rig:
    """A decoder and its oracle. Mutable: a whole restore gives the oracle other histories."""

    kind: Kind
    decoder: Decoder
    oracle: Oracle
    faults: Faults
    record: RecordingExecutor

    @staticmethod
    def of(kind: Kind, ids: Sequence[int], **sizes: Any) -> Rig:
        model, faults = model_of(kind)
        decoder = small_decoder(kind, **sizes)
        record = RecordingExecutor()
        decoder._ubatches = record
        return Rig(kind, decoder, Oracle(model, ids, unified=decoder.settings.unified), faults, record)

    @property
    def n_snapshots(self) -> int:
        return self.decoder.settings.n_rs_seq

    @property
    def embeds(self) -> bool:
        """Whether every token is an output, and has a hidden row beside its logits."""
        return self.decoder._embeddings

    @property
    def takes_coupling(self) -> bool:
        """Whether tokens of several sequences are possible in this memory (RM-5, SP-15)."""
        return self.oracle.unified and (self.kind != "recurrent" or self.embeds)

    # What both hold

    def observe(self) -> None:
        """Windowed memory may forget what no later token can see; what it did forget is forgotten here too."""
        window, parts = self.oracle.window, self.decoder.parts
        if window is None:
            return
        assert parts.windowed is not None
        for s in self.oracle.ids:
            held = set(_positions(parts.windowed[0], s))
            lost = {one for one in self.oracle.of[s].near if one.position not in held}
            last = max(held, default=-1)
            for one in lost:
                assert last + 1 - one.position >= window, f"position {one.position} of {s} is lost, {last} is its last"
            self.oracle.forget_near(s, lost)

    def check(self) -> None:
        """Positions, owners and counts are those of the oracle, and nothing else is in memory."""
        self.observe()
        memory, oracle, parts = self.decoder.memory, self.oracle, self.decoder.parts
        for s in oracle.ids:
            assert (memory.pos_min(s), memory.pos_max(s)) == (oracle.pos_min(s), oracle.pos_max(s)), f"sequence {s}"
        if parts.full is not None:
            self._check_cache(parts.full[0], lambda s: oracle.of[s].full, oracle.n_full)
        if parts.windowed is not None:
            self._check_cache(parts.windowed[0], lambda s: oracle.of[s].near, oracle.n_near)
        if parts.recurrent is not None:
            self._check_states(parts.recurrent[0])

    def check_tensors(self) -> None:
        """Keys, values and states are what the oracle computes from the histories, in every layer."""
        self.decoder._update()
        self.check()
        parts, oracle = self.decoder.parts, self.oracle
        for s in oracle.ids:
            if parts.full is not None:
                _check_keys(oracle, oracle.of[s].full, *parts.full, s)
            if parts.windowed is not None:
                _check_keys(oracle, oracle.of[s].near, *parts.windowed, s)
            state = oracle.of[s].state
            if parts.recurrent is not None and state is not None:
                source = parts.recurrent[0].source_of(s)
                assert source is not None
                for layer, kept in oracle.truth.of(state.entry).states.items():
                    for mine, theirs in zip(parts.recurrent[1].layers[layer], kept, strict=True):
                        assert_close(mine[source.row, source.plane], theirs[0], f"state of {s} in layer {layer}")

    def _check_cache(
        self, cache: KVCache, held: Callable[[int], list[Held]], n_held: Callable[[Sequence[int]], int]
    ) -> None:
        oracle = self.oracle
        for s in range(MAX_SEQ) if cache.unified else range(len(cache.streams)):
            wanted = sorted(one.position for one in held(s)) if s in oracle.ids else []
            assert sorted(_positions(cache, s)) == wanted, f"sequence {s}"
        owners = [oracle.ids] if cache.unified else [[s] for s in range(len(cache.streams))]
        for stream, ids in zip(cache.streams, owners, strict=True):
            cells = stream.cells
            assert cells.used == n_held(ids) == np.count_nonzero(cells.position >= 0)
            assert ((cells.position >= 0) == (cells.n_owners > 0)).all()
            assert (cells.member.sum(0) == cells.n_owners).all()
            assert 0 <= stream.head <= cells.size

    def _check_states(self, memory: RecurrentMemory) -> None:
        oracle, state = self.oracle, memory.state
        assert state.used == oracle.n_states()
        for s in range(memory.size):
            mine = oracle.of[s].state if s in oracle.ids else None
            tail = state.tail[s]
            assert (tail is None) == (mine is None)
            sharing = {t for t in oracle.ids if mine is not None and oracle.of[t].state is mine}
            assert tail is None or state.ids[tail] == sharing


def _positions(cache: KVCache, s: int) -> list[int]:
    cells = cache.streams[0 if cache.unified else s].cells
    found: list[int] = cells.position[cells.member[s]].tolist()
    return found


def _check_keys(oracle: Oracle, held: list[Held], cache: KVCache, store: KVStore, s: int) -> None:
    """What the cells of a sequence hold; where two of them have the same position, one cannot tell which is which."""
    number = 0 if cache.unified else s
    cells = cache.streams[number].cells
    by_position = {int(cells.position[cell]): int(cell) for cell in np.flatnonzero(cells.member[s])}
    positions = [one.position for one in held]
    for one in held:
        if positions.count(one.position) > 1:
            continue
        cell = by_position[one.position]
        for layer in store.keys:
            where = f"sequence {s}, position {one.position}, layer {layer}"
            assert_close(store.keys[layer].values[number, cell], oracle.truth.key(one.sight, layer), f"key of {where}")
            value = oracle.truth.value(one.sight, layer)
            assert_close(store.values[layer].parts[0][number, cell], value, f"value of {where}")


def assert_close(mine: Tensor | None, theirs: Tensor, what: str) -> None:
    assert mine is not None, f"{what} is absent"
    apart = (mine.double() - theirs.double()).abs().max().item()
    assert apart <= TOLERANCE, f"{what} is {apart} away from the oracle's"


# Faults


Fault = Literal["abort", "op", "interrupt", "outputs", "graph", "graph memory", "apply", "extract", "rows", "commit"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


def lasting(n: int) -> Callable[[], bool]:
    """An abort signal that is given from its n-th question on."""
    calls = iter(range(n))
    return lambda: next(calls, None) is None


def nth(n: int, error: BaseException, work: Callable[..., Any]) -> Callable[..., Any]:
    """The work for n calls; those after that raise."""
    left = n

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        return work(*args, **kwargs)

    return call


@contextmanager
def induced(rig: Rig, fault: Fault | None, n: int) -> Iterator[Callable[[], bool]]:
    """The n-th chance of a fault is taken inside; gives the abort signal to decode with."""
    decoder, parts = rig.decoder, rig.decoder.parts
    no_memory = MemoryError("no memory")
    strike = Strike(fault)
    signal: Callable[[], bool] = never
    with ExitStack() as stack:

        def breaks(owner: Any, name: str, error: BaseException) -> None:
            stack.enter_context(patch.object(owner, name, nth(n, error, getattr(owner, name))))

        if fault == "abort":
            signal = lasting(n)
        elif fault in ("op", "interrupt"):
            rig.faults.left = n
            rig.faults.error = strike if fault == "op" else KeyboardInterrupt()
        elif fault == "outputs":
            decoder.outputs._items = None  # so that it must ask for memory again
            breaks(decoder.outputs, "_allocate", no_memory)
        elif fault in ("graph", "graph memory"):
            decoder._graphs.invalidate()
            breaks(decoder._graphs, "_build", strike if fault == "graph" else no_memory)
        elif fault == "apply":
            last = parts.recurrent or parts.windowed or parts.full
            assert last is not None
            breaks(last[0], "apply", strike)
        elif fault == "extract":
            breaks(decoder.outputs, "write_logits", strike)
        elif fault == "rows":
            stack.enter_context(patch.object(decoder, "_extractor", _Miscounting(decoder._extractor, n)))
        elif fault == "commit" and parts.recurrent is not None:
            breaks(parts.recurrent[1], "commit", strike)
        try:
            yield signal
        finally:
            rig.faults.left = None


class _Miscounting:
    """An extractor whose n-th answer is one row too many."""

    def __init__(self, real: Any, n: int) -> None:
        self._real, self._left = real, n

    def extract(self, *args: Any, **kwargs: Any) -> int:
        self._left -= 1
        rows: int = self._real.extract(*args, **kwargs)
        return rows + (self._left == -1)
