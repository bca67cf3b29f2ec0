"""The engine's public interface: requests in, tokens out, many at a time.

Token ids in, token ids out. Any thread may call; the engine's own thread (`scheduler.py`) does the work, and the device
decodes. The device decides when an answer ends, except by stop strings, which only the text shows.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Final, Self
from weakref import WeakKeyDictionary

from ostinato.backends.base import Settled
from ostinato.backends.machine import resident_bytes
from ostinato.backends.runner import Runner
from ostinato.engine.constraint import Constrain
from ostinato.engine.open import open_runner
from ostinato.engine.queue import RequestQueue
from ostinato.engine.request import Request, RequestMessage, RequestSpec, check_generates, check_prompt
from ostinato.engine.scheduler import Scheduler
from ostinato.engine.stats import SlotView, Stats
from ostinato.engine.work import Work, WorkSpec
from ostinato.errors import Unsupported
from ostinato.loop.layout import Word
from ostinato.loop.start import Helper
from ostinato.options import DEFAULT_QUEUE, Sampling

if TYPE_CHECKING:
    from ostinato.models.blocks import LoadedModel
    from ostinato.models.shape import Shape

CLOSE_TIMEOUT_S: Final = 30.0

_OPEN_ENGINES: Final[WeakKeyDictionary[threading.Thread, RequestQueue]] = WeakKeyDictionary()


class Engine:
    """One model and its decode loop.

    >>> with Engine(model, settled, eog_ids=(2,), n_tokens=32_000) as engine:        # doctest: +SKIP
    ...     request = engine.submit([5, 6, 7], sampling)
    ...     ids = [token.token for token in request]
    """

    def __init__(
        self,
        model: LoadedModel,
        settled: Settled,
        *,
        eog_ids: Sequence[int] | frozenset[int] = (),
        n_tokens: int | None = None,
        queue: int = DEFAULT_QUEUE,
        share_prefixes: bool = True,
        outbox_entries: int | None = None,
        constrain: Constrain | None = None,
    ) -> None:
        """`n_tokens`: ids that the tokenizer knows; ids beyond it, padding of the embedding, are never sampled.
        `queue`: how many requests may wait. `share_prefixes`: do not compute a prompt's beginning again if it is still
        in memory. `constrain` makes the constraint of an answer from its sampling options."""
        self._shape, vocab = model.shape, model.shape.vocab
        self.context = settled.context
        self._eog_ids = frozenset(token for token in eog_ids if token < vocab)
        self._constrain = constrain
        settled = replace(settled, n_tokens=vocab if n_tokens is None else n_tokens)
        self._runner = open_runner(model, settled, outbox_entries=outbox_entries)
        self._queue = RequestQueue(queue, settled.n_slots, self._runner.changed.set)
        try:
            self._runner.decode_mode.enter()
        except BaseException:
            self._runner.close()
            raise
        # An encoder's keys and values depend on what follows them.
        can_share = share_prefixes and model.shape.causal
        self._scheduler = Scheduler(self._runner, self._queue, share_prefixes=can_share)
        self._ids = count(1)
        # The thread holds no reference to this object, so that an engine without references is closed.
        self._thread = threading.Thread(target=self._scheduler.run, name="ostinato-engine", daemon=True)
        weakref.finalize(self, self._queue.close).atexit = False
        _OPEN_ENGINES[self._thread] = self._queue
        self._thread.start()

    @property
    def runner(self) -> Runner:
        """The runner of the decode loop; read-only."""
        return self._runner

    @property
    def mode(self) -> str:
        """The name of the decode mode that runs."""
        return self._runner.settled.mode

    @property
    def why_not(self) -> tuple[str, ...]:
        """Why no higher mode runs: a sentence for each of them."""
        return self._runner.why_not

    @property
    def fault(self) -> str | None:
        """Why the engine is dead; None while it runs."""
        return self._scheduler.fault

    # Requests

    def check(
        self, prompt: Sequence[int], sampling: Sampling, *, resume: bool = False, keep: bool = False
    ) -> RequestSpec:
        """The checked request, to be `put` once. `sampling` is complete: no value that sampling needs is None.

        `resume`: continue the sequence that was kept or loaded last; `keep`: keep this sequence afterwards, to be saved
        or resumed.
        """
        check_generates(self._shape)
        check_prompt(prompt, shape=self._shape, context=self.context, room=1)
        constraint = None
        if sampling.rule is not None:
            if self._constrain is None:
                raise Unsupported("this engine knows no text, so its answers cannot follow a schema or a grammar")
            constraint = self._constrain(sampling)
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eog_ids)
        first = frozenset[int]()
        if constraint is not None:
            first = constraint.ends  # its masks decide where an answer may end, so min_tokens does not apply
            sampling = replace(sampling, min_tokens=0)
        stop_ids = (*sorted(first), *sorted(ends - first))
        self._runner.host.check(sampling, stop_ids)
        room = self.context - len(prompt)
        most = min(room, sampling.max_tokens or room)
        spec = RequestSpec(tuple(prompt), sampling, stop_ids, most, constraint, resume, keep)
        return replace(spec, rope_set=self.rope_set(spec.n_positions))

    @property
    def shape(self) -> Shape:
        """The model's family, layers and sizes."""
        return self._shape

    def rope_set(self, n_positions: int) -> int:
        """Which set of frequencies rotates a sequence of at most so many positions, from its admission to its end."""
        return self._shape.rope_set(n_positions)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        wait: bool = False,
        sink: Callable[[Request, RequestMessage], None] | None = None,
        resume: bool = False,
        keep: bool = False,
    ) -> Request:
        """`check` a request and `put` it."""
        return self.put(self.check(prompt, sampling, resume=resume, keep=keep), wait=wait, sink=sink)

    def put(
        self, spec: RequestSpec, *, wait: bool = False, sink: Callable[[Request, RequestMessage], None] | None = None
    ) -> Request:
        """Ask for an answer, first come first served; returns at once. When the queue is full: `wait` for room, or
        QueueFull. The caller reads the returned request, or `sink` gets every message, on the engine's thread."""
        request = Request(next(self._ids), spec, self._queue.cancel, sink, self.helper)
        self._enqueue(request, wait=wait)
        return request

    def work(self, spec: WorkSpec) -> Work:
        """Ask for rows of texts, first come first served among the requests; returns at once. Read it to its end."""
        if spec.kind != "hidden" or spec.copy is not None:
            check_generates(self._shape)
        for text in spec.texts:
            self.check_text(text.tokens)
        work = Work(spec, self._queue.cancel, self.helper)
        self._enqueue(work)
        return work

    def check_text(self, ids: Sequence[int]) -> None:
        """Refuse ids that are no tokens of this model, or too many for the context."""
        check_prompt(ids, shape=self._shape, context=self.context)

    def _enqueue(self, one: Request | Work, *, wait: bool = False) -> None:
        if self.helper is not None and threading.current_thread() is threading.main_thread():
            self.helper.lend()
        self._queue.put(one, wait=wait)

    @property
    def helper(self) -> Helper | None:
        """Work that the main thread can help with while it waits for messages; None where the device needs no help."""
        return self._runner.start.helper

    def stats(self) -> Stats:
        """The engine's current state and its counters."""
        scheduler, runner = self._scheduler, self._runner
        reserve = scheduler.reserve
        return Stats(
            mode=self.mode,
            n_slots=runner.settled.n_slots,
            waiting=len(self._queue),
            prefilling=scheduler.n_prefilling,
            live=scheduler.n_live,
            submitted=self._queue.n_submitted,
            ended=dict(scheduler.n_ended),
            steps=runner.host.word(Word.STEPS),
            tokens=scheduler.n_tokens,
            prompt_tokens=scheduler.n_prompt_tokens,
            cached_tokens=scheduler.n_cached_tokens,
            pages=reserve.n_pages,
            pages_leased=reserve.n_pages - reserve.n_available,
            pages_cached=reserve.n_cached,
            resident_bytes=resident_bytes(),
            gaps=scheduler.gaps.read(),
            triggers=runner.decode_mode.n_triggers,
            launches=runner.start.n_launches,
            instantiations=runner.start.n_instantiations,
            host_copies=runner.chunks.n_copies,
            fault=scheduler.fault,
        )

    def slots(self) -> list[SlotView]:
        """The current state of every slot."""
        return self._scheduler.slots()

    # Closing

    def close(self) -> None:
        """Cancel all running and waiting requests, and end the loop and the threads. May be called more than once."""
        self._queue.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@atexit.register
def _close_all() -> None:
    """Close all engines before the interpreter exits: no thread may be inside torch when torch is torn down."""
    open_still = list(_OPEN_ENGINES.items())
    for _, queue in open_still:
        queue.close()
    for thread, _ in open_still:
        thread.join(CLOSE_TIMEOUT_S)
