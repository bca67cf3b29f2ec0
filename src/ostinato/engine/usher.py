"""The engine's own thread: it seats who waits, runs their prompts, feeds the loop's inbox and drains its outbox.

It alone touches the loop below it, and takes no part in any step: tokens are the device's. Other threads speak to it
through `line.py` and hear of it through their requests. It sleeps while nothing happens; while the loop runs it looks
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

from ostinato.cache.reserve import Lease, Reserve
from ostinato.engine.constraint import Masks
from ostinato.engine.line import Line
from ostinato.engine.open import Loop
from ostinato.engine.request import FinishReason, Request, Token
from ostinato.engine.stats import GapMeter, SlotView
from ostinato.errors import BadInput, DecodeInvariantError, EngineDead, InternalError, OstinatoError
from ostinato.loop.host import OutEntry, Seat
from ostinato.loop.layout import Finish, Word
from ostinato.loop.mode import MUST_RESTART
from ostinato.loop.start import Work

# How long to sleep beside a loop that cannot ring, and beside one that rings but might die without a sound.
NAP_S: Final = 0.0005
LONG_NAP_S: Final = 0.05
# Longest wait for what has passed its last border, or for a chunk when the engine closes.
END_S: Final = 60.0
# Longest step that is believed: a large model on a slow CPU takes minutes, with a prompt's chunk before it.
STALLED_S: Final = 900.0

_REASONS: Final[dict[Finish, FinishReason]] = {Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(slots=True, eq=False)
class Seated:
    """A request in a slot; mutable, because it moves on from token to token."""

    request: Request
    slot: int
    generation: int
    lease: Lease
    n_done: int = 0  # positions of the prompt that are in memory
    last: int = 0  # the position of its last token that was heard of
    last_ns: int = 0  # and when that one was made
    admitted: bool = False
    asked: float = 0.0  # when a mask was last asked for, by the host's clock

    @property
    def prompt_left(self) -> int:
        return len(self.request.ask.prompt) - self.n_done


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of a prompt on its way through the device."""

    seated: Seated
    n: int
    returned: bool = False  # its host's part is over; on a GPU the device's may not be
    work: Work | None = None


class Usher:
    """Everything between the line and the loop. `run` is the thread; `stats` words may be read from others."""

    def __init__(self, loop: Loop, line: Line, *, reuse: bool) -> None:
        self._loop, self._line = loop, line
        self._host, self._mode = loop.host, loop.mode
        options = loop.options
        self.reserve = Reserve(options.n_pages, loop.page_tokens, reuse=reuse, kind=loop.prefill.rows_for)
        self._nap_s = NAP_S if loop.model.device.type == "cuda" else LONG_NAP_S
        self._slots: list[Seated | None] = [None] * options.n_slots
        self._by_id: dict[int, Seated] = {}
        self._prompts: deque[Seated] = deque()  # whose prompts are not done; the first has a chunk under way
        self._chunk: Chunk | None = None
        self._unsent: deque[Callable[[], bool]] = deque()  # entries for the inbox, in order
        self._masks: Masks[Seated] = Masks(loop.changed.set)
        self._generations = count(1)
        self._progress, self._progress_at = (0, 0), 0.0  # triggers and steps, and when they were last seen to change
        self._listens = False  # whether the loop may speak, as far as is known
        self._ends = 0  # how often the loop had ended when it was last triggered
        self._no_room = False  # whether the first in line was refused, and nothing has changed since
        self.fault: str | None = None  # why it is dead
        self.gaps = GapMeter()
        self.n_ended: Counter[str] = Counter()
        self.n_tokens = self.n_prompt_tokens = self.n_cached_tokens = 0

    @property
    def n_live(self) -> int:
        return sum(seated is not None and seated.admitted for seated in self._slots)

    @property
    def n_prefilling(self) -> int:
        return len(self._prompts)

    def slots(self) -> list[SlotView]:
        """Every slot as it is now; from any thread, and as true as a glance can be."""
        return [_view(slot, seated) for slot, seated in enumerate(self._slots.copy())]

    # The thread

    def run(self) -> None:
        """Serve until told to close; whatever goes wrong, nobody is left without an end."""
        with torch.inference_mode():
            try:
                while self._is_wanted():
                    if self.fault is None:
                        self._pass()
                    self._loop.changed.wait(self._patience())
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
        return not self._line.closing

    def _pass(self) -> None:
        """Look at everything once."""
        for part in (
            self._drain,
            self._check_alive,
            self._cancel,
            self._finish_chunk,
            self._seat,
            self._begin_chunk,
            self._top_up,
            self._pass_masks,
            self._send,
            self._keep_going,
        ):
            part()
            if self.fault is not None:
                return

    def _patience(self) -> float | None:
        """How long to sleep if nobody rings: for ever while nothing is under way."""
        if self.fault is not None:
            return None
        if self._unsent or (self._chunk is not None and self._chunk.returned):
            return NAP_S  # the inbox is full; a chunk is done on the host's side: both are soon over
        return self._nap_s if self._listens else None

    # Out of the loop

    def _drain(self) -> None:
        while entries := self._host.drain():
            for entry in entries:
                self._hear(entry)

    def _hear(self, entry: OutEntry) -> None:
        seated = self._slots[entry.slot]
        if seated is None or seated.generation != entry.generation:
            raise InternalError(
                f"the loop speaks of slot {entry.slot}, generation {entry.generation}: nobody sits there"
            )
        request = seated.request
        if entry.token is not None:
            if seated.last_ns:
                self.gaps.add(entry.time_ns - seated.last_ns)
            seated.last, seated.last_ns = entry.position, entry.time_ns
            if not request.ended:
                self.n_tokens += 1
                reason = _REASONS.get(entry.finish)
                token = Token(entry.token, entry.logprob, entry.top, entry.position, entry.time_ns, reason)
                if reason is not None:
                    self.n_ended[reason] += 1
                if reason is None and request.ask.constraint is not None:
                    seated.asked = time.perf_counter()
                    self._masks.ask(seated, request.ask.constraint, entry.token)
                request.put(token)
        if entry.finish is not Finish.NONE:
            self._end_cancelled(request)  # unless it has its reason
            self._leave(seated)

    # Cancelling

    def _cancel(self) -> None:
        for request in self._line.take_cancelled():
            if request.ended:
                continue
            seated = self._by_id.get(request.id)
            if seated is None and not self._line.drop(request):
                raise InternalError(f"request {request.id} neither waits nor sits, and has not ended")
            self._end_cancelled(request)
            if seated is None:
                self._no_room = False  # perhaps it was the first in line
            elif seated.admitted:
                self._say_cancel(seated)
            elif self._chunk is None or self._chunk.seated is not seated:
                self._prompts.remove(seated)
                self._leave(seated)  # else when its chunk is done: the device writes to its pages until then

    def _end_cancelled(self, request: Request) -> None:
        if not request.ended:
            self.n_ended["cancelled"] += 1
            request.end_cancelled()

    def _fail(self, request: Request, error: Exception) -> None:
        if not request.ended:
            self.n_ended["error"] += 1
            request.fail(error)

    # Seats

    def _seat(self) -> None:
        """Seat the first in line, and the next: one that finds no room keeps its place, and nobody passes it."""
        while not self._no_room and None in self._slots:
            request = self._line.first()
            if request is None:
                return
            ask = request.ask
            lease = self.reserve.open(ask.prompt, ask.n_positions, all_now=len(self._line) == 1)
            if lease is None:
                self._no_room = True
                return
            self._line.seat_first()
            seated = Seated(request, self._slots.index(None), next(self._generations), lease)
            self._slots[seated.slot] = self._by_id[request.id] = seated
            self._prompts.append(seated)

    def _leave(self, seated: Seated) -> None:
        """The slot and the pages are free: neither loop nor prefill touches them any more."""
        self.reserve.close(seated.lease)
        self._slots[seated.slot] = None
        del self._by_id[seated.request.id]
        self._no_room = False
        self._line.free_slot()

    def _top_up(self) -> None:
        """Give more pages to whoever has used half of what was granted beyond the prompt."""
        for seated in self._slots:
            if seated is None or not seated.admitted or not seated.lease.short:
                continue
            n_prompt, lease = len(seated.request.ask.prompt), seated.lease
            granted = len(lease.pages) * self._loop.page_tokens - n_prompt
            if 2 * (seated.last + 1 - n_prompt) >= granted:
                beyond = len(lease.pages) - self.reserve.pages_for(n_prompt)
                first = len(lease.pages)
                pages = self.reserve.extend(lease, max(1, beyond) if len(self._line) else lease.short)
                if pages:
                    self._say_grant(seated, first, pages)

    def _pass_masks(self) -> None:
        """Masks that are ready go to their slots, which wait for them; a constraint that failed ends its request."""
        for seated, bits, error in self._masks.take():
            request = seated.request
            if request.ended or self._slots[seated.slot] is not seated:
                continue
            request.mask_s += time.perf_counter() - seated.asked
            if bits is not None:
                self._say_mask(seated, bits)
            else:
                self._fail(request, error or InternalError("there is no mask, and no reason"))
                self._say_cancel(seated)

    # Prompts

    def _begin_chunk(self) -> None:
        """Start the next part of the first unfinished prompt, beside the loop."""
        if self._chunk is not None or not self._prompts:
            return
        seated = self._prompts[0]
        request, loop = seated.request, self._loop
        prompt = request.ask.prompt
        if request.prefill_began is None:
            # Only now: whoever was seated before has left its pages by this time.
            seated.n_done = request.cached_tokens = self.reserve.share(seated.lease, prompt)
            request.prefill_began = time.perf_counter()
            self.n_cached_tokens += seated.n_done
        start, rows = seated.n_done, loop.prefill.rows_for(len(prompt))
        tokens = list(prompt[start : start + rows])
        chunk = Chunk(seated, len(tokens))
        is_last = chunk.n == seated.prompt_left
        if is_last:
            self._stage(seated)
        slot, pages = seated.slot, list(seated.lease.pages)

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
            self._spoil(seated, error)

    def _finish_chunk(self) -> None:
        """Take note of a chunk that is done: its pages can be found, and after the last one its slot is admitted."""
        chunk = self._chunk
        if chunk is None or chunk.work is None or not chunk.work.done():
            return
        self._chunk = None
        seated = chunk.seated
        try:
            chunk.work.result(0)
        except Exception as error:
            self._spoil(seated, error)
            return
        request = seated.request
        seated.n_done += chunk.n
        self.n_prompt_tokens += chunk.n
        self.reserve.remember(seated.lease, request.ask.prompt, seated.n_done)
        self._no_room = False  # what is cached now may be what the first in line begins with
        if request.ended:  # cancelled meanwhile
            self._prompts.popleft()
            self._leave(seated)
        elif not seated.prompt_left:
            self._prompts.popleft()
            request.prefill_ended = time.perf_counter()
            seated.last = len(request.ask.prompt) - 1
            seated.admitted = True
            self._say_admit(seated)

    def _spoil(self, seated: Seated, error: Exception) -> None:
        """A prompt that failed ends its own request, and no other; unless the device is dead."""
        self._check_alive()
        if self.fault is not None:
            return
        self._prompts.popleft()
        if not isinstance(error, OstinatoError):
            wrapped = InternalError(f"the prompt could not be computed: {error!r}")
            wrapped.__cause__ = error
            error = wrapped
        self._fail(seated.request, error)
        self._leave(seated)
        self._loop.changed.set()  # look again: the next prompt may begin

    def _stage(self, seated: Seated) -> None:
        ask, pages = seated.request.ask, seated.lease.pages
        seat = Seat(
            generation=seated.generation,
            prompt=ask.prompt,
            left=ask.most,
            pages=pages,
            granted=len(pages) * self._loop.page_tokens,
            sampling=ask.sampling,
            stop_ids=ask.stop_ids,
            mask=None if ask.constraint is None else ask.constraint.mask(),
        )
        self._host.stage(seated.slot, seat)

    # Into the loop

    def _say_admit(self, seated: Seated) -> None:
        self._unsent.append(lambda: self._host.admit(seated.slot, seated.generation))

    def _say_cancel(self, seated: Seated) -> None:
        self._unsent.append(lambda: self._host.cancel(seated.slot, seated.generation))

    def _say_mask(self, seated: Seated, bits: np.ndarray) -> None:
        self._unsent.append(lambda: self._host.mask(seated.slot, seated.generation, bits))

    def _say_grant(self, seated: Seated, first: int, pages: list[int]) -> None:
        told = 0

        def grant() -> bool:
            nonlocal told
            told += self._host.grant(seated.slot, seated.generation, first + told, pages[told:])
            return told == len(pages)

        self._unsent.append(grant)

    def _send(self) -> None:
        """Publish entries in order, as far as the inbox has room."""
        while self._unsent and self._unsent[0]():
            self._unsent.popleft()

    def _keep_going(self) -> None:
        """Trigger the loop when it has ended and somebody lives, or an entry was not taken.

        The two may just miss each other: it ends, and then an entry is published. So this is asked at every look.
        """
        # Decided here and not when going to sleep: a loop that cannot ring may end between the two.
        self._listens = True
        if self._mode.running:
            if self._host.word(Word.ENDS) == self._ends:
                self._check_progress()
                return
            # It has passed its last border, and rung; what is left of it is a moment.
            if not self._loop.start.wait(END_S):
                self._die(f"the loop ended its last step and did not return within {END_S:.0f} s; restart the process")
                return
        if self._host.waiting:
            self._loop.changed.set()  # it spoke after it was drained: hear that first, and then look again
            return
        if self._host.all_taken and not self._host.word(Word.LIVE):
            self._listens = False
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

        for request in [*self._line.shut(error), *self._seated_requests()]:
            self._fail(request, error())

    def _close(self) -> None:
        """Every request that runs or waits is cancelled; then the loop ends, and everything is given back."""
        left = self._line.shut(lambda: BadInput("this engine is closed; open it again to ask more"))
        for request in [*left, *self._seated_requests()]:
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

    def _seated_requests(self) -> list[Request]:
        return [seated.request for seated in self._slots if seated is not None]


def _view(slot: int, seated: Seated | None) -> SlotView:
    if seated is None:
        return SlotView(slot, "free")
    ask = seated.request.ask
    n_prompt = len(ask.prompt)
    if not seated.admitted:
        return SlotView(slot, "prefill", seated.request.id, n_prompt, seated.n_done, 0, ask.most)
    return SlotView(slot, "live", seated.request.id, n_prompt, n_prompt, seated.last + 1 - n_prompt, ask.most)
