"""What a backend opens: tables, memory, plan, start, decode mode and chunks of one model, built together.

Each backend has a runner of its own that says what memory it keeps and makes plan, start and chunks; the rest is the
same for all. A runner is built when it is opened, so that a mode that fails at that is known there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.backends.base import Chunks, SequenceCopy, Settled
from ostinato.files.unpack import Floats
from ostinato.loop.grammars import GrammarMemory
from ostinato.loop.guard import Guard, chain_of
from ostinato.loop.host import HostSide
from ostinato.loop.layout import OUTBOX_ENTRIES, Layout, Tables
from ostinato.loop.memory import read_only_parts
from ostinato.loop.mode import DecodeMode
from ostinato.loop.plan import Plan
from ostinato.loop.start import PendingWork, Start
from ostinato.loop.wake import WakeEvent

if TYPE_CHECKING:
    from ostinato.models.blocks import ModelBlocks


class Runner:
    """The running half of an engine. `changed` is set when the scheduler should look again. `plain_model` is the
    one that was given, or the same on the tape alone: a caller that uses this one can free the other. It is for code
    that computes with the weights, such as a decoder beside the loop; `model` is for callers that read them."""

    def __init__(self, model: ModelBlocks, settled: Settled, *, outbox_entries: int | None = None) -> None:
        self.guard = Guard()
        self.settled = settled
        self.plain_model: Any = model  # over weights in the backend's layout
        self.page_tokens = settled.page_tokens
        self.n_tokens = settled.tokens_of(model.shape)
        self.groups = settled.groups(model.shape)
        self._kept: Any = self._memory()
        # As the device and `HostSide` write them.
        self._shared = self._tables(settled.tables_layout(model.shape, outbox_entries or OUTBOX_ENTRIES))
        self._seen = self._shared.read_only()
        self.host = HostSide(self._shared)
        self.changed: WakeEvent = self._wake_event()
        self.plan, self.start, self.chunks = self._made()
        self._seen_model = read_only_parts(self.plain_model)
        self.decode_mode = DecodeMode(self.plan, self.start, self._shared, self.guard, self.chunks.captured)
        self._seal()
        try:
            # Enter decode mode and leave it: then the executable is built, its words are in the table, and the device's
            # health has been checked (E-2).
            self.decode_mode.enter()
            self.decode_mode.exit()
        except BaseException:
            self.close()
            raise

    def __setattr__(self, name: str, value: object) -> None:
        """No part is replaced while decode mode is on (I-7)."""
        if "guard" in self.__dict__:
            self.guard.allow("I-7", f"replacing {name} of a runner")
        super().__setattr__(name, value)

    @property
    def model(self) -> Any:
        """The model; over read-only views of its weights while decode mode is on (I-5)."""
        return self._seen_model if self.guard.locked else self.plain_model

    @property
    def tables(self) -> Tables:
        """Slot table, admissions and rings; read-only while decode mode is on (I-4, I-5)."""
        return self._seen if self.guard.locked else self._shared

    @property
    def plan(self) -> Plan:
        """What a step is; its nodes refuse to be run while decode mode is on (I-8)."""
        return self._seen_plan if self.guard.locked else self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan, self._seen_plan = plan, plan.guarded(self.guard)

    @property
    def memory(self) -> Any:
        """What `_memory` gives; not to be had while decode mode is on, where the plan's buffers show what is in it."""
        self.guard.allow("I-5", "taking the memory of keys and values")
        return self._kept

    def _seal(self) -> None:
        """Lock the host's own arrays: weights from now on (E-15), the rest while decode mode is on."""
        weights = {id(buffer) for buffer in self.plan.weights}
        for buffer in self.plan.weights:
            for array in () if buffer.array is None else chain_of(buffer.array):
                array.flags.writeable = False
        parts = [buffer.array for buffer in self.plan.buffers if id(buffer) not in weights]
        parts += [part for arena in self._shared.arenas for part in arena.parts]
        self.guard.seal(part for part in parts if isinstance(part, np.ndarray))

    # A backend's own

    def _memory(self) -> Any:
        """Keys and values in pages and states of slots, as this backend keeps them."""
        raise NotImplementedError

    def _tables(self, layout: Layout) -> Tables:
        """The loop's tables, zeroed, as memory of the kind that its plan reads."""
        return Tables.of(layout, self.settled.grammar_bytes)

    def _made(self) -> tuple[Plan, Start, Chunks]:
        """The plan, the start of the settled mode, not built yet, and what runs chunks."""
        raise NotImplementedError

    def sequence_copy(self) -> SequenceCopy:
        """Copies sequences between this memory and the host."""
        raise NotImplementedError

    def ranked(self, pooled: Floats) -> Floats:
        """A pooled row [hidden] of a ranking model to its scores [classes]."""
        raise NotImplementedError

    def projected(self, pooled: Floats) -> Floats:
        """A pooled row [hidden] to the vector of its text, for a model that has projections."""
        raise NotImplementedError

    def _wake_event(self) -> WakeEvent:
        return threading.Event()

    # The same for every backend

    @property
    def grammars(self) -> GrammarMemory | None:
        """Where the loop reads the grammars that it follows; None where it follows none."""
        return self._shared.grammars

    @property
    def why_not(self) -> tuple[str, ...]:
        """Why no higher mode runs, a sentence for each."""
        return self.settled.why_not

    @property
    def fallen_back(self) -> tuple[str, ...]:
        """What runs otherwise than it was meant to, a sentence for each: to be said (E-57, E-58)."""
        steps = () if self.settled.fell_back is None else (self.settled.fell_back,)
        failures = self.chunks.failures.items()
        return (*steps, *(f"prompts of {rows} rows are launched node by node: {why}" for rows, why in failures))

    def beside(self, job: Callable[[], None]) -> PendingWork:
        """Run a job on the device, beside the loop. On the CPU `changed` is set when it has ended; on a GPU
        its host's part has then, and the device's is asked for."""
        work = self.start.beside(job)
        if isinstance(work, Future):
            work.add_done_callback(lambda _: self.changed.set())
        else:
            self.changed.set()
        return work

    def close(self) -> None:
        """Wait for the loop to end, leave decode mode and release threads and memory. A loop that runs no step
        for its deadline raises EngineDead; its own thread alone is then left behind."""
        try:
            self.decode_mode.exit()
        finally:
            self.guard.unlock()
            self.start.close()
