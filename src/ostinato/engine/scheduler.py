"""The engine's own thread: it admits who waits, runs their prompts, feeds the loop's inbox and drains its outbox.

It alone touches the loop below it, and takes no part in any step: tokens are the device's. Other threads speak to it
through `queue.py` and hear of it through their requests. It sleeps while nothing happens; while the loop runs it looks
again when told to, or after a bounded nap where the device cannot tell.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np
import torch

from ostinato.backends.runner import Runner
from ostinato.cache.reserve import Lease, Reserve
from ostinato.engine.constraint import Masks
from ostinato.engine.queue import RequestQueue
from ostinato.engine.request import FinishReason, Request, Token
from ostinato.engine.stats import GapMeter, SlotView
from ostinato.errors import BadInput, DecodeInvariantError, EngineDead, InternalError, OstinatoError
from ostinato.loop.host import Admission, OutEntry
from ostinato.loop.layout import Finish, Word
from ostinato.loop.mode import MUST_RESTART
from ostinato.loop.start import PendingWork

# How long to sleep beside a loop that cannot ring, and beside one that rings but might die without a sound.
POLL_S: Final = 0.0005
LONG_POLL_S: Final = 0.05
# Longest wait for what has passed its last step boundary, or for a chunk when the engine closes.
END_S: Final = 60.0
# Longest step that is believed: a large model on a slow CPU takes minutes, with a prompt's chunk before it.
STALLED_S: Final = 900.0

_REASONS: Final[dict[Finish, FinishReason]] = {Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(slots=True, eq=False)
class ActiveSequence:
    """A request in a slot; mutable, because it moves on from token to token."""

    request: Request
    slot: int
    generation: int
    lease: Lease
    n_done: int = 0  # positions of the prompt that are in memory
    last: int = 0  # the position of its last token that was heard of
    last_ns: int = 0  # and when that one was made
    admitted: bool = False
    mask_asked_at: float = 0.0  # when a mask was last asked for, by the host's clock

    @property
    def prompt_left(self) -> int:
        return len(self.request.spec.prompt) - self.n_done


@dataclass(slots=True, eq=False)
class PromptChunk:
    """A part of a prompt on its way through the device."""

    sequence: ActiveSequence
    n: int
    returned: bool = False  # its host's part is over; on a GPU the device's may not be
    work: PendingWork | None = None


class Scheduler:
    """Everything between the queue and the loop. `run` is the thread; `stats` words may be read from others."""

    def __init__(self, loop: Runner, queue: RequestQueue, *, reuse: bool) -> None:
        self._loop, self._queue = loop, queue
        self._host, self._mode = loop.host, loop.mode
        options = loop.settled
        self.reserve = Reserve(options.n_pages, loop.page_tokens, reuse=reuse, kind=loop.prefill.rows_for)
        self._poll_s = POLL_S if loop.model.device.type == "cuda" else LONG_POLL_S
        self._slots: list[ActiveSequence | None] = [None] * options.n_slots
        self._by_id: dict[int, ActiveSequence] = {}
        self._prompts: deque[ActiveSequence] = deque()  # whose prompts are not done; the first has a chunk under way
        self._chunk: PromptChunk | None = None
        self._unsent: deque[Callable[[], bool]] = deque()  # entries for the inbox, in order
        self._masks: Masks[ActiveSequence] = Masks(loop.changed.set)
        self._generations = count(1)
        self._progress, self._progress_at = (0, 0), 0.0  # triggers and steps, and when they were last seen to change
        self._loop_active = False  # whether the loop may speak, as far as is known
        self._ends = 0  # how often the loop had ended when it was last triggered
        self._first_does_not_fit = False  # whether the first in queue was refused, and nothing has changed since
        self.fault: str | None = None  # why it is dead
        self.gaps = GapMeter()
        self.n_ended: Counter[str] = Counter()
        self.n_tokens = self.n_prompt_tokens = self.n_cached_tokens = 0

    @property
    def n_live(self) -> int:
        return sum(sequence is not None and sequence.admitted for sequence in self._slots)

    @property
    def n_prefilling(self) -> int:
        return len(self._prompts)

    def slots(self) -> list[SlotView]:
        """Every slot as it is now; from any thread, and as true as a glance can be."""
        return [_view(slot, sequence) for slot, sequence in enumerate(self._slots.copy())]

    # The thread

    def run(self) -> None:
        """Serve until told to close; whatever goes wrong, nobody is left without an end."""
        with torch.inference_mode():
            try:
                while self._is_wanted():
                    if self.fault is None:
                        self._run_once()
                    self._loop.changed.wait(self._wait_s())
            except Exception as error:
                # A device that died shows itself wherever it is next asked: what it died of comes first.
                found = self._mode.fault()
                self._die(found or f"the engine's thread failed: {error!r}; open the model again", error)
                while self._is_wanted():
                    self._loop.changed.wait()
            finally:
                self._close()

    def _is_wanted(self) -> bool:
        # Cleared before anything is looked at: whoever rings from now on is heard after this look.
        self._loop.changed.clear()
        return not self._queue.closing

    def _run_once(self) -> None:
        """Look at everything once."""
        for part in (
            self._drain,
            self._check_alive,
            self._cancel,
            self._finish_chunk,
            self._admit,
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
        """How long to sleep if nobody rings: for ever while nothing is under way."""
        if self.fault is not None:
            return None
        if self._unsent or (self._chunk is not None and self._chunk.returned):
            return POLL_S  # the inbox is full; a chunk is done on the host's side: both are soon over
        return self._poll_s if self._loop_active else None

    # Out of the loop

    def _drain(self) -> None:
        while entries := self._host.drain():
            for entry in entries:
                self._receive(entry)

    def _receive(self, entry: OutEntry) -> None:
        sequence = self._slots[entry.slot]
        if sequence is None or sequence.generation != entry.generation:
            raise InternalError(
                f"the loop speaks of slot {entry.slot}, generation {entry.generation}: nobody sits there"
            )
        request = sequence.request
        if entry.token is not None:
            if sequence.last_ns:
                self.gaps.add(entry.time_ns - sequence.last_ns)
            sequence.last, sequence.last_ns = entry.position, entry.time_ns
            if not request.ended:
                self.n_tokens += 1
                reason = _REASONS.get(entry.finish)
                token = Token(entry.token, entry.logprob, entry.top, entry.position, entry.time_ns, reason)
                if reason is not None:
                    self.n_ended[reason] += 1
                if reason is None and request.spec.constraint is not None:
                    sequence.mask_asked_at = time.perf_counter()
                    self._masks.compute(sequence, request.spec.constraint, entry.token)
                request.put(token)
        if entry.finish is not Finish.NONE:
            self._end_cancelled(request)  # unless it has its reason
            self._release(sequence)

    # Cancelling

    def _cancel(self) -> None:
        for request in self._queue.take_cancelled():
            if request.ended:
                continue
            sequence = self._by_id.get(request.id)
            if sequence is None and not self._queue.remove(request):
                raise InternalError(f"request {request.id} neither waits nor sits, and has not ended")
            self._end_cancelled(request)
            if sequence is None:
                self._first_does_not_fit = False  # perhaps it was the first in queue
            elif sequence.admitted:
                self._post_cancel(sequence)
            elif self._chunk is None or self._chunk.sequence is not sequence:
                self._prompts.remove(sequence)
                self._release(sequence)  # else when its chunk is done: the device writes to its pages until then

    def _end_cancelled(self, request: Request) -> None:
        if not request.ended:
            self.n_ended["cancelled"] += 1
            request.end_cancelled()

    def _fail(self, request: Request, error: Exception) -> None:
        if not request.ended:
            self.n_ended["error"] += 1
            request.fail(error)

    # Admissions

    def _admit(self) -> None:
        """Seat the first in queue, and the next: one that finds no room keeps its place, and nobody passes it."""
        while not self._first_does_not_fit and None in self._slots:
            request = self._queue.first()
            if request is None:
                return
            spec = request.spec
            lease = self.reserve.open(spec.prompt, spec.n_positions, all_now=len(self._queue) == 1)
            if lease is None:
                self._first_does_not_fit = True
                return
            self._queue.admit_first()
            sequence = ActiveSequence(request, self._slots.index(None), next(self._generations), lease)
            self._slots[sequence.slot] = self._by_id[request.id] = sequence
            self._prompts.append(sequence)

    def _release(self, sequence: ActiveSequence) -> None:
        """The slot and the pages are free: neither loop nor prefill touches them any more."""
        self.reserve.close(sequence.lease)
        self._slots[sequence.slot] = None
        del self._by_id[sequence.request.id]
        self._first_does_not_fit = False
        self._queue.free_slot()

    def _grant_pages(self) -> None:
        """Give more pages to whoever has used half of what was granted beyond the prompt."""
        for sequence in self._slots:
            if sequence is None or not sequence.admitted or not sequence.lease.short:
                continue
            n_prompt, lease = len(sequence.request.spec.prompt), sequence.lease
            granted = len(lease.pages) * self._loop.page_tokens - n_prompt
            if 2 * (sequence.last + 1 - n_prompt) >= granted:
                beyond = len(lease.pages) - self.reserve.pages_for(n_prompt)
                first = len(lease.pages)
                pages = self.reserve.extend(lease, max(1, beyond) if len(self._queue) else lease.short)
                if pages:
                    self._post_grant(sequence, first, pages)

    def _send_masks(self) -> None:
        """Masks that are ready go to their slots, which wait for them; a constraint that failed ends its request."""
        for sequence, bits, error in self._masks.take():
            request = sequence.request
            if request.ended or self._slots[sequence.slot] is not sequence:
                continue
            request.mask_s += time.perf_counter() - sequence.mask_asked_at
            if bits is not None:
                self._post_mask(sequence, bits)
            else:
                self._fail(request, error or InternalError("there is no mask, and no reason"))
                self._post_cancel(sequence)

    # Prompts

    def _begin_chunk(self) -> None:
        """Start the next part of the first unfinished prompt, beside the loop."""
        if self._chunk is not None or not self._prompts:
            return
        sequence = self._prompts[0]
        request, loop = sequence.request, self._loop
        prompt = request.spec.prompt
        if request.prefill_began is None:
            # Only now: whoever was seated before has left its pages by this time.
            sequence.n_done = request.cached_tokens = self.reserve.share(sequence.lease, prompt)
            request.prefill_began = time.perf_counter()
            self.n_cached_tokens += sequence.n_done
        start, rows = sequence.n_done, loop.prefill.rows_for(len(prompt))
        tokens = list(prompt[start : start + rows])
        chunk = PromptChunk(sequence, len(tokens))
        is_last = chunk.n == sequence.prompt_left
        if is_last:
            self._stage(sequence)
        slot, pages = sequence.slot, list(sequence.lease.pages)

        def run() -> None:
            try:
                loop.prefill.run(slot, tokens, start, pages, rows)
                if is_last:
                    loop.prefill.first(slot)
            finally:
                chunk.returned = True

        self._chunk = chunk
        if loop.start.alone:
            self._host.set_yield(True)  # until the next trigger, which goes behind this chunk
        try:
            chunk.work = loop.beside(run)
        except Exception as error:  # where the host's part of a job runs at once
            self._chunk = None
            self._fail_prompt(sequence, error)

    def _finish_chunk(self) -> None:
        """Take note of a chunk that is done: its pages can be found, and after the last one its slot is admitted."""
        chunk = self._chunk
        if chunk is None or chunk.work is None or not chunk.work.done():
            return
        self._chunk = None
        sequence = chunk.sequence
        try:
            chunk.work.result(0)
        except Exception as error:
            self._fail_prompt(sequence, error)
            return
        request = sequence.request
        sequence.n_done += chunk.n
        self.n_prompt_tokens += chunk.n
        self.reserve.remember(sequence.lease, request.spec.prompt, sequence.n_done)
        self._first_does_not_fit = False  # what is cached now may be what the first in queue begins with
        if request.ended:  # cancelled meanwhile
            self._prompts.popleft()
            self._release(sequence)
        elif not sequence.prompt_left:
            self._prompts.popleft()
            request.prefill_ended = time.perf_counter()
            sequence.last = len(request.spec.prompt) - 1
            sequence.admitted = True
            self._post_admit(sequence)

    def _fail_prompt(self, sequence: ActiveSequence, error: Exception) -> None:
        """A prompt that failed ends its own request, and no other; unless the device is dead."""
        self._check_alive()
        if self.fault is not None:
            return
        self._prompts.popleft()
        if not isinstance(error, OstinatoError):
            wrapped = InternalError(f"the prompt could not be computed: {error!r}")
            wrapped.__cause__ = error
            error = wrapped
        self._fail(sequence.request, error)
        self._release(sequence)
        self._loop.changed.set()  # look again: the next prompt may begin

    def _stage(self, sequence: ActiveSequence) -> None:
        spec, pages = sequence.request.spec, sequence.lease.pages
        admission = Admission(
            generation=sequence.generation,
            prompt=spec.prompt,
            left=spec.most,
            pages=pages,
            granted=len(pages) * self._loop.page_tokens,
            sampling=spec.sampling,
            stop_ids=spec.stop_ids,
            mask=None if spec.constraint is None else spec.constraint.mask(),
        )
        self._host.stage(sequence.slot, admission)

    # Into the loop

    def _post_admit(self, sequence: ActiveSequence) -> None:
        self._unsent.append(lambda: self._host.admit(sequence.slot, sequence.generation))

    def _post_cancel(self, sequence: ActiveSequence) -> None:
        self._unsent.append(lambda: self._host.cancel(sequence.slot, sequence.generation))

    def _post_mask(self, sequence: ActiveSequence, bits: np.ndarray) -> None:
        self._unsent.append(lambda: self._host.mask(sequence.slot, sequence.generation, bits))

    def _post_grant(self, sequence: ActiveSequence, first: int, pages: list[int]) -> None:
        n_sent = 0

        def grant() -> bool:
            nonlocal n_sent
            n_sent += self._host.grant(sequence.slot, sequence.generation, first + n_sent, pages[n_sent:])
            return n_sent == len(pages)

        self._unsent.append(grant)

    def _send(self) -> None:
        """Publish entries in order, as far as the inbox has room."""
        while self._unsent and self._unsent[0]():
            self._unsent.popleft()

    def _ensure_running(self) -> None:
        """Trigger the loop when it has ended and somebody lives, or an entry was not taken.

        The two may just miss each other: it ends, and then an entry is published. So this is asked at every look.
        """
        # Decided here and not when going to sleep: a loop that cannot ring may end between the two.
        self._loop_active = True
        if self._mode.running:
            if self._host.word(Word.ENDS) == self._ends:
                self._check_progress()
                return
            # It has passed its last step boundary, and rung; what is left of it is a moment.
            if not self._loop.start.wait(END_S):
                self._die(f"the loop ended its last step and did not return within {END_S:.0f} s; restart the process")
                return
        if self._host.waiting:
            self._loop.changed.set()  # it spoke after it was drained: hear that first, and then look again
            return
        if self._host.all_taken and not self._host.word(Word.LIVE):
            self._loop_active = False
            return
        self._ends = self._host.word(Word.ENDS)
        self._host.set_yield(False)
        try:
            self._mode.trigger()
        except (DecodeInvariantError, EngineDead) as error:
            self._die(self._mode.fault() or str(error))

    def _check_progress(self) -> None:
        """A loop that neither steps nor ends is dead: whoever waits for it is told (every wait has a deadline)."""
        now = self._mode.n_triggers, self._host.word(Word.STEPS)
        if now != self._progress:
            self._progress, self._progress_at = now, time.monotonic()
        elif time.monotonic() - self._progress_at > STALLED_S:
            self._die(f"the loop has made no step for {STALLED_S:.0f} s; {MUST_RESTART}")

    # Ends

    def _check_alive(self) -> None:
        why = self._mode.fault()
        if why is not None:
            self._die(why)

    def _die(self, why: str, cause: Exception | None = None) -> None:
        """Every request that runs or waits gets one error, and nobody may join any more."""
        self.fault = why
        self._mode.die(why)

        def error() -> EngineDead:
            dead = EngineDead(why)
            dead.__cause__ = cause
            return dead

        for request in [*self._queue.refuse_all(error), *self._active_requests()]:
            self._fail(request, error())

    def _close(self) -> None:
        """Every request that runs or waits is cancelled; then the loop ends, and everything is given back."""
        left = self._queue.refuse_all(lambda: BadInput("this engine is closed; open it again to ask more"))
        for request in [*left, *self._active_requests()]:
            self._end_cancelled(request)
        self._masks.close()
        self._host.set_yield(True)
        if self._chunk is not None and self._chunk.work is not None:
            with suppress(Exception):
                self._chunk.work.result(END_S)
        # What was found wrong has been told to whoever was waiting; here it only must not keep threads alive.
        try:
            self._mode.exit()
        except (DecodeInvariantError, EngineDead) as error:
            self.fault = self.fault or str(error)
        with suppress(DecodeInvariantError):
            self._loop.start.close()

    def _active_requests(self) -> list[Request]:
        return [sequence.request for sequence in self._slots if sequence is not None]


def _view(slot: int, sequence: ActiveSequence | None) -> SlotView:
    if sequence is None:
        return SlotView(slot, "free")
    spec = sequence.request.spec
    n_prompt = len(spec.prompt)
    if not sequence.admitted:
        return SlotView(slot, "prefill", sequence.request.id, n_prompt, sequence.n_done, 0, spec.most)
    return SlotView(slot, "live", sequence.request.id, n_prompt, n_prompt, sequence.last + 1 - n_prompt, spec.most)
