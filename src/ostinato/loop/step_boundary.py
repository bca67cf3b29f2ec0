"""The step boundary between steps: commit the sampled tokens, take the inbox, pause and wake slots, continue or end.

This is the twin of `loop/step_boundary.h`, phase by phase, and what `eager` runs on the CPU; the CPU's native loop
calls the header's version, and on a GPU that version is one kernel. It touches the three arenas of `layout.py` and
nothing else: no model, no pages, no text. docs/ring.md says which side may write which word, and when.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final

import numpy as np

from ostinato.loop.layout import (
    GRANT_PAGES,
    Arena,
    End,
    Fault,
    Finish,
    InboxKind,
    InboxWord,
    Layout,
    OutboxWord,
    SlotState,
    Tables,
    Word,
)
from ostinato.loop.sources import source
from ostinato.text.walk import FOLDER as WALK

Clock = Callable[[], int]

_ALL_BITS: Final = (1 << 64) - 1
_OCCUPIED: Final = (SlotState.LIVE, SlotState.PAUSED)


@dataclass(frozen=True, slots=True)
class _Choices:
    """A sampler's results: by row after a step, by slot after prefill."""

    token: memoryview[int]
    logprob_bits: memoryview[int]
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @staticmethod
    def of(table: Arena, token: str, logprob: str, top: str) -> _Choices:
        return _Choices(
            table.host(token).data,
            table.host(logprob).view(np.int32).data,
            table.host(f"{top}_ids"),
            table.host(f"{top}_logprobs"),
        )


class StepBoundary:
    """A step boundary over these tables, to be called once before the first step and after every step.

    It keeps views of the arenas and no state of its own, so any number of them may be made over the same tables.
    Host memory only.
    """

    def __init__(
        self, tables: Tables, *, plan_hash: int, epoch: int, page_tokens: int, clock: Clock = time.perf_counter_ns
    ) -> None:
        self._built_with = (plan_hash & _ALL_BITS, epoch & _ALL_BITS)
        self._page_tokens = page_tokens
        self._clock = clock
        self._layout = tables.layout

        # Single elements go by memoryview, several times faster than by numpy; whole rows by numpy, below.
        table, rings = tables.table, tables.rings
        self._table = SimpleNamespace(**{name: table.host(name).data for name in table.names})
        self._step = _Choices.of(table, "chosen", "chosen_logprob", "top")
        self._first = _Choices.of(table, "first_token", "first_logprob", "first_top")

        self._admissions = [
            (table.host(field.name), tables.admissions.host(field.name)) for field in tables.layout.admission_fields
        ]
        self._count_rows = table.host("counts")
        self._pages = table.host("pages")
        self._mask_bits = table.host("mask_bits")
        self._grammars, self._grammar_positions = tables.grammars, table.host("grammar_position")
        self._admission_mask_bits = tables.admissions.host("mask_bits")

        self._words = rings.host("words")[:, 0].data
        self._inbox = rings.host("inbox")
        self._outbox = rings.host("outbox").data
        self._outbox_ns = rings.host("outbox").view(np.int64)[:, OutboxWord.TIME // 2].data
        self._outbox_top_ids = rings.host("outbox_top_ids")
        self._outbox_top_logprobs = rings.host("outbox_top_logprobs")

    def __call__(self) -> None:
        """Run the step boundary once; `words[GO]` says whether a step follows."""
        words = self._words
        fault = words[Word.FAULT] or self._drift()
        if fault:
            self._refuse(fault)
            return
        self._table.step_ns[0] = self._clock()
        read = words[Word.OUTBOX_TAIL]

        n_steps, head = self._commit_step(words[Word.OUTBOX_HEAD])
        taken, head, ends = self._take_inbox(words[Word.INBOX_TAIL], head, read)
        self._pause_and_wake()
        n_live = self._gather_rows()

        if ends is None:
            if self._room(head, read) < 2 * self._layout.n_slots:
                ends = End.OUTBOX_FULL
            elif words[Word.YIELD]:
                ends = End.YIELD
            elif n_live == 0:
                ends = End.IDLE
        if ends is not None:
            self._table.n_rows[0] = 0  # the step boundary of the next trigger must not commit this step again

        words[Word.OUTBOX_HEAD] = head
        words[Word.INBOX_TAIL] = taken
        words[Word.STEPS] += n_steps
        words[Word.LIVE] = n_live
        if ends is None:
            words[Word.GO] = 1
            return
        if ends is End.FAULT:
            words[Word.FAULT] = Fault.INBOX
        words[Word.GO] = 0
        words[Word.WHY] = ends
        words[Word.ENDS] += 1  # last: a reader that sees it change finds all other words written

    # --- phase 0: check plan and epoch ---

    def _drift(self) -> Fault:
        plan_hash, epoch = self._built_with
        if self._table.plan_hash[0] & _ALL_BITS != plan_hash:
            return Fault.PLAN
        return Fault.EPOCH if self._table.epoch[0] & _ALL_BITS != epoch else Fault.NONE

    def _refuse(self, fault: int) -> None:
        """End with a fault and commit nothing: after a drift the step's results must not be used."""
        words = self._words
        self._table.n_rows[0] = 0
        words[Word.FAULT] = fault
        words[Word.LIVE] = 0
        words[Word.GO] = 0
        words[Word.WHY] = End.FAULT
        words[Word.ENDS] += 1

    # --- phase 1: the step just run ---

    def _commit_step(self, head: int) -> tuple[int, int]:
        """Commit every row; returns the steps run, 0 or 1, and the outbox's head."""
        table, n_rows = self._table, self._table.n_rows[0]
        for row in range(n_rows):
            slot = table.row_slot[row]
            table.position[slot] += 1
            self._commit(slot, self._step, row, head + row, none=table.grammar[slot] and not table.mask_ready[slot])
        return int(n_rows > 0), head + n_rows

    def _commit(self, slot: int, choices: _Choices, at: int, head: int, *, none: bool = False) -> None:
        """Make the sampled token the slot's next token; the slot's position is already that of the token. `none`: its
        grammar allows no token, and none was chosen."""
        table, token = self._table, -1 if none else choices.token[at]
        table.made[slot] += 1
        table.left[slot] -= 1
        if table.constrained[slot] and not table.grammar[slot]:
            table.mask_ready[slot] = 0
        finish = Finish.NONE
        if token < 0:
            finish = Finish.GRAMMAR
        elif any(table.stop_ids[slot, i] == token for i in range(table.n_stop[slot])):
            finish = Finish.STOP
        elif table.left[slot] <= 0:
            finish = Finish.LENGTH
        elif table.grammar[slot] and not self._follow(slot, token):
            finish, token = Finish.GRAMMAR, -1
        table.token[slot] = token
        if table.penalised[slot] and 0 <= token < self._layout.vocab:
            table.counts[slot, token] += 1
        if finish:
            table.state[slot] = SlotState.FINISHED
        self._write(head, slot, token, finish, 0 if none else choices.logprob_bits[at])
        if table.n_logprobs[slot] > 0 and not none:
            place = head % self._layout.outbox_entries
            self._outbox_top_ids[place] = choices.top_ids[at]
            self._outbox_top_logprobs[place] = choices.top_logprobs[at]

    def _follow(self, slot: int, token: int) -> bool:
        """Advance the slot's position in its grammar; False where the token is not allowed."""
        assert self._grammars is not None
        return self._grammars.follow(self._table.grammar[slot], self._grammar_positions[slot], token)

    def _write(self, head: int, slot: int, token: int, finish: Finish, logprob_bits: int) -> None:
        place = head % self._layout.outbox_entries
        outbox = self._outbox
        outbox[place, OutboxWord.SLOT] = slot
        outbox[place, OutboxWord.GENERATION] = self._table.generation[slot]
        outbox[place, OutboxWord.TOKEN] = token
        outbox[place, OutboxWord.POSITION] = self._table.position[slot]
        outbox[place, OutboxWord.FINISH] = finish
        outbox[place, OutboxWord.LOGPROB] = logprob_bits
        self._outbox_ns[place] = self._table.step_ns[0]

    # --- phase 2: take the inbox ---

    def _take_inbox(self, tail: int, head: int, read: int) -> tuple[int, int, End | None]:
        """Take entries in order; returns the inbox's tail, the outbox's head, and why to end, if an entry says so."""
        published = self._words[Word.INBOX_HEAD]
        if not 0 <= published - tail <= self._layout.inbox_entries:
            return tail, head, End.FAULT
        while tail < published:
            entry: list[int] = self._inbox[tail % self._layout.inbox_entries].tolist()
            kind, slot, generation = entry[InboxWord.KIND], entry[InboxWord.SLOT], entry[InboxWord.GENERATION]
            if kind == InboxKind.STOP:
                return tail + 1, head, End.STOP
            if not self._is_ours(entry):
                return tail, head, End.FAULT
            if kind == InboxKind.ADMIT:
                # One outbox place per slot stays free, so that the end of a cancelled sequence can always be written.
                if self._room(head, read) <= self._layout.n_slots:
                    break
                self._admit(slot)
                self._commit(slot, self._first, slot, head)
                head += 1
            elif self._table.generation[slot] == generation and self._table.state[slot] in _OCCUPIED:
                if kind == InboxKind.CANCEL:
                    self._table.state[slot] = SlotState.FINISHED
                    self._write(head, slot, -1, Finish.CANCELLED, 0)
                    head += 1
                elif kind == InboxKind.GRANT:
                    self._grant(slot, entry[InboxWord.FIRST], entry[InboxWord.COUNT], entry[InboxWord.PAGES :])
                elif kind == InboxKind.MASK:
                    self._mask_bits[slot] = self._admission_mask_bits[slot]
                    self._table.mask_ready[slot] = 1
            tail += 1
        return tail, head, None

    def _is_ours(self, entry: list[int]) -> bool:
        """Whether `HostSide` could have written this entry; later phases do not check it again."""
        kind, slot = entry[InboxWord.KIND], entry[InboxWord.SLOT]
        if not (InboxKind.ADMIT <= kind <= InboxKind.MASK and 0 <= slot < self._layout.n_slots):
            return False
        if kind == InboxKind.ADMIT:
            return self._table.state[slot] not in _OCCUPIED
        if kind == InboxKind.GRANT:
            first, count = entry[InboxWord.FIRST], entry[InboxWord.COUNT]
            return 0 <= count <= GRANT_PAGES and 0 <= first <= self._layout.max_pages - count
        return True

    def _admit(self, slot: int) -> None:
        """Copy the slot's whole row, so that nothing of its previous sequence is left (E-71)."""
        for row, admission in self._admissions:
            row[slot] = admission[slot]
        if self._table.penalised[slot]:
            self._count_rows[slot] = 0
        self._table.made[slot] = 0
        self._table.mask_ready[slot] = 1
        self._table.state[slot] = SlotState.LIVE

    def _grant(self, slot: int, first: int, count: int, pages: list[int]) -> None:
        self._pages[slot, 0, first : first + count] = pages[:count]
        self._table.granted[slot] = (first + count) * self._page_tokens

    def _room(self, head: int, read: int) -> int:
        return self._layout.outbox_entries - (head - read)

    # --- phases 3 and 4: which slots are in the next step ---

    def _pause_and_wake(self) -> None:
        table = self._table
        for slot in range(self._layout.n_slots):
            if table.state[slot] in _OCCUPIED:
                unpaged = table.position[slot] >= table.granted[slot]
                unmasked = table.constrained[slot] and not table.mask_ready[slot]
                table.state[slot] = SlotState.PAUSED if unpaged or unmasked else SlotState.LIVE

    def _gather_rows(self) -> int:
        table, n_rows = self._table, 0
        for slot in range(self._layout.n_slots):
            if table.state[slot] == SlotState.LIVE:
                table.row_slot[n_rows] = slot
                n_rows += 1
        table.n_rows[0] = n_rows
        return n_rows


def native_headers(layout: Layout, page_tokens: int) -> dict[str, str]:
    """The headers that a GPU's step boundary and masks include, by name, for these sizes."""
    names = ("step_boundary.h", "grammar_step.h", "step_masks.h")
    walk = {name: (WALK / name).read_text("utf-8") for name in ("grammar_walk.h", "grammar_masks.h")}
    return {"layout.h": layout.header(page_tokens), **{name: source(name) for name in names}, **walk}
