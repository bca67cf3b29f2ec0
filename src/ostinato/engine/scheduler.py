"""The engine's own thread: it assigns slots, runs prompts, feeds the loop's inbox and drains its outbox.

Scores and embeddings (`work.py`) wait in the same queue; their chunks and those of prompts take turns.
Only this thread touches the loop, and no step needs it: the device samples the tokens. Other threads reach it through
`queue.py` and get answers through their requests. It sleeps while the engine is idle; while the loop runs, it looks
again when the wake event is set, or after a bounded sleep where the device cannot set that event.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from ostinato.backends.memory_rows import snapshot_bytes
from ostinato.backends.runner import Runner
from ostinato.cache.reserve import RECENT_PROMPTS, Reserve
from ostinato.cache.snapshots import StateSnapshots
from ostinato.decoder.flow import PagedFlow, PendingChunk
from ostinato.decoder.paged import PagedSequence, PagedSequences
from ostinato.engine.active_work import ActiveWork
from ostinato.engine.constraint import Constraint, Masks, compiled_grammar
from ostinato.engine.queue import RequestQueue
from ostinato.engine.request import NOT_NUMBERS, FinishReason, Request, Token
from ostinato.engine.stats import GapMeter, SlotView
from ostinato.engine.work import Work
from ostinato.errors import BadInput, DecodeInvariantError, EngineDead, InternalError, NotNumbers, OstinatoError
from ostinato.loop.grammars import StagedGrammar
from ostinato.loop.host import Admission, OutEntry
from ostinato.loop.layout import Finish, Word
from ostinato.loop.mode import MUST_RESTART
from ostinato.text.grammar import NO_TOKEN

# How long to sleep beside a loop that cannot set the wake event, and beside one that sets it but may die silently.
POLL_S: Final = 0.0005
LONG_POLL_S: Final = 0.05
# Longest wait for a loop that has passed its last step boundary, or for a chunk when the engine closes.
END_S: Final = 60.0
# A step or a chunk that takes longer counts as stalled: a large model on a slow CPU takes minutes for both.
STALLED_S: Final = 900.0

_REASONS: Final[dict[Finish, FinishReason]] = {Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(slots=True, eq=False)
class ActiveSequence:
    """A request in a slot; mutable, because it changes with every token."""

    request: Request
    slot: int
    generation: int
    paged: PagedSequence  # its prompt, which is computed into its pages
    last: int = 0  # the position of its last token that was received
    last_ns: int = 0  # and when that token was generated
    admit_queued: bool = False  # whether its ADMIT entry was sent to the inbox, or waits for room in it
    answer: list[int] = field(default_factory=list)  # its tokens, if the sequence is to be kept
    mask_asked_at: float = 0.0  # when a mask was last asked for, by the host's clock
    grammar: int | None = None  # the region of its grammar, which the loop follows; leased


@dataclass(frozen=True, slots=True, eq=False)
class ChunkUnderWay:
    """A chunk of a prompt or of work that the device computes."""

    owner: ActiveSequence | ActiveWork
    pending: PendingChunk
    began_at: float = field(default_factory=time.monotonic)


class Scheduler:
    """Everything between the queue and the loop. `run` is the thread; other threads may read the counters."""

    def __init__(self, runner: Runner, queue: RequestQueue, *, share_prefixes: bool) -> None:
        self._runner, self._queue = runner, queue
        self._host, self._decode_mode = runner.host, runner.decode_mode
        options, shape = runner.settled, runner.model.shape
        self._recurs = bool(shape.recurrent)
        # What a recurrent model computes again must be what it computed before, wherever the prompt was cut then.
        takes_snapshots = self._recurs and share_prefixes and runner.chunks.any_cut
        self.reserve = Reserve(
            runner.groups,
            runner.page_tokens,
            chunk_rows=runner.chunks.rows,
            share_prefixes=bool(shape.attention) and takes_snapshots if self._recurs else share_prefixes,
            kind=runner.chunks.rows_for,
            recent=max(RECENT_PROMPTS, 2 * options.n_slots),
        )
        snapshots = StateSnapshots(snapshot_bytes(shape)) if takes_snapshots else None
        self._memory = PagedSequences(
            self.reserve, recurs=self._recurs, snapshots=snapshots, attends=bool(shape.attention)
        )
        copy = None if snapshots is None else runner.sequence_copy()
        self._flow = PagedFlow(self._memory, runner.chunks, runner.beside, copy)
        self._poll_s = POLL_S if runner.settled.kind == "cuda" else LONG_POLL_S
        self._slots: list[ActiveSequence | None] = [None] * options.n_slots
        self._by_id: dict[int, ActiveSequence] = {}
        self._prompts: deque[ActiveSequence] = deque()  # sequences with unfinished prompts; the first runs
        self._works: deque[ActiveWork] = deque()  # they take turns, a chunk each
        self._work_slots: set[int] = set()  # slots that texts of work occupy, for a recurrent model
        self._chunk: ChunkUnderWay | None = None
        self._work_is_next = True  # where both a prompt and work are ready
        self._unsent: deque[Callable[[], bool]] = deque()  # entries for the inbox, in order
        self._masks: Masks[ActiveSequence] = Masks(runner.changed.set)
        self._generations = count(1)
        self._progress, self._progress_at = (0, 0), 0.0  # triggers and steps, and when they last changed
        self._loop_active = False  # whether the loop may still write entries, as far as is known
        self._ends = 0  # how often the loop had ended when it was last triggered
        self._first_does_not_fit = False  # whether pages were refused, and none were freed since
        self._queue_is_next = False  # whether they were refused to the first request of the queue, not to work
        self.fault: str | None = None  # why it is dead
        self.gaps = GapMeter()
        self.n_ended: Counter[str] = Counter()
        self.n_tokens = self.n_prompt_tokens = self.n_cached_tokens = 0

    @property
    def n_live(self) -> int:
        return sum(sequence is not None and sequence.admit_queued for sequence in self._slots)

    @property
    def n_prefilling(self) -> int:
        return len(self._prompts)

    def slots(self) -> list[SlotView]:
        """A snapshot of every slot; from any thread, so slots may change while it is taken."""
        return [_view(slot, sequence) for slot, sequence in enumerate(self._slots.copy())]

    # The thread

    def run(self) -> None:
        """Serve until the queue closes. Every request gets an end, whatever fails."""
        try:
            while self._is_wanted():
                if self.fault is None:
                    self._run_once()
                self._runner.changed.wait(self._wait_s())
        except Exception as error:
            # Any call may be the first to fail on a dead device: report the device's own fault first.
            found = self._decode_mode.fault()
            self._die(found or f"the engine's thread failed: {error!r}; open the model again", error)
            while self._is_wanted():
                self._runner.changed.wait()
        finally:
            self._close()

    def _is_wanted(self) -> bool:
        # Cleared before anything is looked at: an event that is set from now on causes another look.
        self._runner.changed.clear()
        return not self._queue.closing

    def _run_once(self) -> None:
        """Do every part of the scheduler's work once."""
        for part in (
            self._drain,
            self._check_alive,
            self._cancel,
            self._finish_chunk,
            self._assign_slots,
            self._begin_chunk,
            self._grant_pages,
            self._send_masks,
            self._send,
            self._ensure_running,
        ):
            part()
            if self.fault is not None:
                return

    def _wait_s(self) -> float | None:
        """How long to sleep unless the wake event is set; None, for ever, while nothing runs."""
        if self.fault is not None:
            return None
        if self._unsent or (self._chunk is not None and self._chunk.pending.returned):
            return POLL_S  # a full inbox, or a chunk whose host part is done: neither lasts long
        if self._loop_active:
            return self._poll_s
        return None if self._chunk is None else LONG_POLL_S  # a chunk may be stuck, and never set the event

    # Out of the loop

    def _drain(self) -> None:
        while entries := self._host.drain():
            for entry in entries:
                self._receive(entry)

    def _receive(self, entry: OutEntry) -> None:
        sequence = self._slots[entry.slot]
        if sequence is None or sequence.generation != entry.generation:
            raise InternalError(
                f"the loop sent an entry for slot {entry.slot}, generation {entry.generation}: no such sequence runs"
            )
        request = sequence.request
        if entry.token is not None and math.isnan(entry.logprob) and not request.ended:
            self._end(request, NotNumbers(NOT_NUMBERS))
            if entry.finish is Finish.NONE:
                self._post_cancel(sequence)
        if entry.token is not None:
            if sequence.last_ns:
                self.gaps.add(entry.time_ns - sequence.last_ns)
            sequence.last, sequence.last_ns = entry.position, entry.time_ns
            if not request.ended:
                self.n_tokens += 1
                if request.spec.keep:
                    sequence.answer.append(entry.token)
                reason = _REASONS.get(entry.finish)
                token = Token(entry.token, entry.logprob, entry.top, entry.position, entry.time_ns, reason)
                if reason is not None:
                    self.n_ended[reason] += 1
                if reason is None and request.grammar == "host" and request.spec.constraint is not None:
                    sequence.mask_asked_at = time.perf_counter()
                    self._masks.compute(sequence, request.spec.constraint, entry.token)
                request.put(token)
        if entry.finish is not Finish.NONE:
            error = BadInput(NO_TOKEN) if entry.finish is Finish.GRAMMAR else None
            self._end(request, error)  # no effect if it has a finish reason
            self._release(sequence)

    # Cancelling

    def _cancel(self) -> None:
        for one in self._queue.take_cancelled():
            if one.ended:
                continue
            if self._queue.remove(one):
                self._first_does_not_fit = False  # perhaps it was the first in the queue
            elif isinstance(one, Work):
                self._cancel_work(one)
            else:
                self._cancel_sequence(one)
            self._end(one)

    def _cancel_sequence(self, request: Request) -> None:
        sequence = self._by_id.get(request.id)
        if sequence is None:
            raise InternalError(f"request {request.id} is neither in the queue nor in a slot, and has not ended")
        if sequence.admit_queued:
            self._post_cancel(sequence)
        elif self._chunk is None or self._chunk.owner is not sequence:
            self._prompts.remove(sequence)
            self._release(sequence)  # else released when its chunk is done: the device writes to its pages until then

    def _cancel_work(self, work: Work) -> None:
        active = next(active for active in self._works if active.work is work)
        if self._chunk is None or self._chunk.owner is not active:
            self._drop(active)

    def _end(self, one: Request | Work, error: Exception | None = None) -> None:
        """End a request or work with an error, or as cancelled; no effect after its end."""
        if one.ended:
            return
        if isinstance(one, Request):
            self.n_ended["cancelled" if error is None else "error"] += 1
        one.end(error)

    # Slots and pages

    def _assign_slots(self) -> None:
        """Assign slots and pages in the order of the queue. If a request gets no pages, it keeps its place, and no
        later one gets any. Work needs no slot, and may overtake requests that wait for one; when pages are scarce,
        texts of work and the queue take turns."""
        while not self._first_does_not_fit:
            if not self._queue_is_next and not all(active.lease(self._free_slot) for active in self._works):
                self._first_does_not_fit = True
                return
            one = self._queue.first(has_slot=self._free_slot() is not None)
            if one is None and not self._queue_is_next:
                return
            self._queue_is_next = False
            if isinstance(one, Work):
                self._queue.remove(one)
                slots, whole = self._work_slots if self._recurs else None, not self._runner.model.shape.causal
                self._works.append(ActiveWork(one, self._flow, slots, whole=whole))
            elif one is not None and not self._assign_slot(one):
                self._first_does_not_fit = self._queue_is_next = True

    def _free_slot(self, preferred: int | None = None) -> int | None:
        """A free slot: `preferred` if it is free, else the first free one; None where there is none."""
        free = [slot for slot, taken in enumerate(self._slots) if taken is None and slot not in self._work_slots]
        return preferred if preferred in free else free[0] if free else None

    def _assign_slot(self, request: Request) -> bool:
        """Give a request a free slot and pages; False where too few pages are free."""
        spec, all_now = request.spec, len(self._queue) == 1  # it is still in the queue, and alone there
        slot = self._free_slot(self._memory.kept_slot if spec.resume else None)
        assert slot is not None
        least_left = 1 if spec.resume else None
        paged = self._memory.open(
            spec.prompt, spec.n_positions, slot=slot, all_now=all_now, least_left=least_left, rope_set=spec.rope_set
        )
        if paged is None:
            return False
        self._queue.take_slot(request)
        sequence = ActiveSequence(request, slot, next(self._generations), paged)
        self._slots[slot] = self._by_id[request.id] = sequence
        self._prompts.append(sequence)
        return True

    def _release(self, sequence: ActiveSequence) -> None:
        """Free a sequence's slot and pages, which neither loop nor prefill touches any more."""
        # No step has read the last token of an answer that ended by itself; otherwise a recurrent state may be further.
        if sequence.answer and (not self._recurs or sequence.request.finish_reason in ("stop", "length")):
            self._memory.keep(sequence.paged, (*sequence.paged.tokens, *sequence.answer[:-1]), sequence.last + 1)
        else:
            self._memory.close(sequence.paged)
        if sequence.grammar is not None and self._runner.grammars is not None:
            self._runner.grammars.release(sequence.grammar)
        self._slots[sequence.slot] = None
        del self._by_id[sequence.request.id]
        self._first_does_not_fit = False
        self._queue.free_slot()

    def _drop(self, active: ActiveWork) -> None:
        """Close work and release its pages and slots."""
        active.close()
        self._works.remove(active)
        self._first_does_not_fit = False

    def _grant_pages(self) -> None:
        """Grant more pages to every sequence that has used half of the positions granted beyond its prompt."""
        for sequence in self._slots:
            if sequence is None or not sequence.admit_queued or self.reserve.is_complete(sequence.paged.lease):
                continue
            n_prompt, lease = len(sequence.request.spec.prompt), sequence.paged.lease
            granted = self.reserve.granted(lease) - n_prompt
            if 2 * (sequence.last + 1 - n_prompt) >= granted:
                beyond = len(lease.pages) - self.reserve.pages_for(n_prompt)
                first = len(lease.pages)
                pages = self.reserve.extend(lease, max(1, beyond) if len(self._queue) else lease.short)
                if pages:
                    self._post_grant(sequence, first, pages)

    def _send_masks(self) -> None:
        """Send computed masks to their slots, which wait for them; end the request of a constraint that failed."""
        for sequence, bits, error in self._masks.take():
            request = sequence.request
            if request.ended or self._slots[sequence.slot] is not sequence:
                continue
            request.mask_s += time.perf_counter() - sequence.mask_asked_at
            if bits is not None:
                self._unsent.append(partial(self._host.mask, sequence.slot, sequence.generation, bits))
            else:
                self._end(request, error or InternalError("there is no mask, and no reason"))
                self._post_cancel(sequence)

    # Prompts and work

    def _begin_chunk(self) -> None:
        """Start the next chunk of the first unfinished prompt, or of work, beside the loop; where both are ready, they
        take turns."""
        if self._chunk is not None:
            return
        work = next((active for active in self._works if active.ready), None)
        if work is not None and (self._work_is_next or not self._prompts):
            self._work_is_next = False
            self._works.rotate(-1)
            self._begin(work, work.begin)
        elif self._prompts:
            self._work_is_next = True
            sequence = self._prompts[0]
            self._begin(sequence, lambda: self._begin_prompt(sequence))

    def _begin(self, owner: ActiveSequence | ActiveWork, begin: Callable[[], PendingChunk]) -> None:
        if self._runner.start.alone:
            self._host.set_yield(True)  # until the next trigger, which is queued after this chunk
        try:
            self._chunk = ChunkUnderWay(owner, begin())
        except Exception as error:  # a start may run the host's part of a job inside this call
            self._fail_chunk(owner, error)

    def _begin_prompt(self, sequence: ActiveSequence) -> PendingChunk:
        request, paged = sequence.request, sequence.paged
        if request.prefill_began is None:
            # Found only now, because pages of prompts that were computed since it got its slot may be cached.
            request.cached_tokens = self._memory.find(paged)
            request.prefill_began = time.perf_counter()
            self.n_cached_tokens += request.cached_tokens
        rows = self._flow.chunks.rows_for(len(paged.tokens))
        part = self._memory.part_of(paged, rows)
        is_last = part.n == paged.n_left
        if is_last:
            self._stage(sequence)
        return self._flow.begin((part,), rows, first=sequence.slot if is_last else None)

    def _finish_chunk(self) -> None:
        """Process the running chunk if it is done."""
        chunk = self._chunk
        if chunk is None or not chunk.pending.done:
            if chunk is not None and time.monotonic() - chunk.began_at > STALLED_S:
                self._die(f"a chunk of a prompt or text has run for {STALLED_S:.0f} s; {MUST_RESTART}")
            return
        self._chunk = None
        owner = chunk.owner
        try:
            if isinstance(owner, ActiveWork):
                owner.finish(chunk.pending)
            else:
                self._flow.finish(chunk.pending)
        except Exception as error:
            self._fail_chunk(owner, error)
            return
        self._first_does_not_fit = False  # the first request of the queue may begin with pages that are cached now
        if isinstance(owner, ActiveWork):
            if owner.work.ended or owner.done:  # cancelled in the meantime, or complete
                self._drop(owner)
                owner.work.end(complete=True)
        else:
            self._go_on(owner, chunk.pending.parts[0].n)

    def _go_on(self, sequence: ActiveSequence, n: int) -> None:
        """Count `n` more prompt tokens that are in memory; after the last one, ask for its admission."""
        request = sequence.request
        self.n_prompt_tokens += n
        if request.ended:  # cancelled in the meantime
            self._prompts.popleft()
            self._release(sequence)
        elif not sequence.paged.n_left:
            self._prompts.popleft()
            request.prefill_ended = time.perf_counter()
            sequence.last = len(request.spec.prompt) - 1
            sequence.admit_queued = True
            self._unsent.append(partial(self._host.admit, sequence.slot, sequence.generation))

    def _fail_chunk(self, owner: ActiveSequence | ActiveWork, error: Exception) -> None:
        """End the request or work of a failed chunk, and no other, unless the device is dead."""
        self._check_alive()
        if self.fault is not None:
            return
        if not isinstance(error, OstinatoError):
            what = "text" if isinstance(owner, ActiveWork) else "prompt"
            wrapped = InternalError(f"the {what} could not be computed: {error!r}")
            wrapped.__cause__ = error
            error = wrapped
        if isinstance(owner, ActiveWork):
            self._drop(owner)
            self._end(owner.work, error)
        else:
            self._prompts.popleft()
            self._end(owner.request, error)
            self._release(owner)
        self._runner.changed.set()  # look again: the next prompt may begin

    def _stage(self, sequence: ActiveSequence) -> None:
        spec, paged = sequence.request.spec, sequence.paged
        staged = None if spec.constraint is None else self._stage_grammar(sequence, spec.constraint)
        admission = Admission(
            generation=sequence.generation,
            prompt=spec.prompt,
            left=spec.most,
            page_tables=self._memory.stage(paged, spec.n_positions),
            granted=self.reserve.granted(paged.lease),
            sampling=spec.sampling,
            stop_ids=spec.stop_ids,
            mask=None if spec.constraint is None else spec.constraint.mask(),
            grammar=staged,
            rope_set=spec.rope_set,
        )
        self._host.stage(sequence.slot, admission)

    def _stage_grammar(self, sequence: ActiveSequence, constraint: Constraint) -> StagedGrammar | None:
        """Place a constraint where the loop can follow it; None where the host computes its masks."""
        memory, compiled = self._runner.grammars, compiled_grammar(constraint)
        region = None if memory is None or compiled is None else memory.lease(compiled)
        if compiled is None or region is None:
            sequence.request.grammar = "host"
            return None
        sequence.grammar = region
        sequence.request.grammar = "device" if compiled.automaton.depth == 0 else "device+stack"
        return compiled.staged(region, len(constraint.ends))

    # Into the loop

    def _post_cancel(self, sequence: ActiveSequence) -> None:
        self._unsent.append(partial(self._host.cancel, sequence.slot, sequence.generation))

    def _post_grant(self, sequence: ActiveSequence, first: int, pages: list[int]) -> None:
        n_sent = 0

        def grant() -> bool:
            nonlocal n_sent
            n_sent += self._host.grant(sequence.slot, sequence.generation, first + n_sent, pages[n_sent:])
            return n_sent == len(pages)

        self._unsent.append(grant)

    def _send(self) -> None:
        """Publish entries in order, as many as the inbox has room for."""
        while self._unsent and self._unsent[0]():
            self._unsent.popleft()

    def _ensure_running(self) -> None:
        """Trigger the loop if it has ended and there are live slots, or inbox entries that it has not taken.

        An entry may be published just after the loop has ended, so this is checked every time.
        """
        # Set here and not when going to sleep: a loop that cannot set the wake event may end in between.
        self._loop_active = True
        if self._decode_mode.running:
            if self._host.word(Word.ENDS) == self._ends:
                self._check_progress()
                return
            # It has passed its last step boundary and set the wake event; it returns in a moment.
            if not self._runner.start.wait(END_S):
                self._die(f"the loop ended its last step and did not return within {END_S:.0f} s; restart the process")
                return
        if self._host.waiting:
            self._runner.changed.set()  # it wrote entries after the drain: drain them first, then look again
            return
        if self._host.all_taken and not self._host.word(Word.LIVE):
            self._loop_active = False
            return
        self._ends = self._host.word(Word.ENDS)
        self._host.set_yield(False)
        try:
            self._decode_mode.trigger()
        except (DecodeInvariantError, EngineDead) as error:
            self._die(self._decode_mode.fault() or str(error))

    def _check_progress(self) -> None:
        """A loop that neither steps nor ends within the deadline is dead, and all requests get an error."""
        now = self._decode_mode.n_triggers, self._host.word(Word.STEPS)
        if now != self._progress:
            self._progress, self._progress_at = now, time.monotonic()
        elif time.monotonic() - self._progress_at > STALLED_S:
            self._die(f"the loop has made no step for {STALLED_S:.0f} s; {MUST_RESTART}")

    # Ends

    def _check_alive(self) -> None:
        why = self._decode_mode.fault()
        if why is not None:
            self._die(why)

    def _die(self, why: str, cause: Exception | None = None) -> None:
        """End all running and waiting requests and work with an error each, and refuse new ones."""
        self.fault = why
        self._decode_mode.die(why)

        def error() -> EngineDead:
            dead = EngineDead(why)
            dead.__cause__ = cause
            return dead

        for one in [*self._queue.refuse_all(error), *self._active()]:
            self._end(one, error())

    def _close(self) -> None:
        """Cancel all running and waiting requests and work; then end the loop and release everything."""
        left = self._queue.refuse_all(lambda: BadInput("this engine is closed; open it again to ask more"))
        for one in [*left, *self._active()]:
            self._end(one)
        self._masks.close()
        self._host.set_yield(True)
        if self._chunk is not None and self._chunk.pending.work is not None:
            with suppress(Exception):
                self._chunk.pending.work.result(END_S)
        try:
            self._runner.close()
        except (DecodeInvariantError, EngineDead) as error:  # waiting requests already have their errors
            self.fault = self.fault or str(error)
        for sequence in filter(None, tuple(self._slots)):  # the counters of a closed engine say that nothing runs
            sequence.answer.clear()  # a closed engine keeps no sequence
            self._release(sequence)
        for active in tuple(self._works):
            self._drop(active)
        self._prompts.clear()

    def _active(self) -> list[Request | Work]:
        running = [sequence.request for sequence in self._slots if sequence is not None]
        return [*running, *(active.work for active in self._works)]


def _view(slot: int, sequence: ActiveSequence | None) -> SlotView:
    if sequence is None:
        return SlotView(slot, "free")
    spec = sequence.request.spec
    n_prompt = len(spec.prompt)
    if not sequence.admit_queued:
        return SlotView(slot, "prefill", sequence.request.id, n_prompt, sequence.paged.n_held, 0, spec.most)
    return SlotView(slot, "live", sequence.request.id, n_prompt, n_prompt, sequence.last + 1 - n_prompt, spec.most)
