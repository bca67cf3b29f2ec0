"""Requests in, tokens out, many at a time: the face of everything between a caller and the decode loop.

Token ids in, token ids out. Any thread may call; one thread of the engine's own (`scheduler.py`) does the work, and the
device does the decoding. What ends an answer is decided there, except stop strings, which only text can know.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Final, Self
from weakref import WeakKeyDictionary

from ostinato.backends.base import Settled
from ostinato.backends.runner import Runner
from ostinato.backends.torch.model import Model
from ostinato.engine.constraint import Constrain, Constraint
from ostinato.engine.open import open_runner
from ostinato.engine.prompt import check_prompt
from ostinato.engine.queue import RequestQueue
from ostinato.engine.request import Message, Request, RequestSpec
from ostinato.engine.scheduler import Scheduler
from ostinato.engine.stats import SlotView, Stats
from ostinato.engine.work import Work, WorkSpec
from ostinato.errors import Unsupported
from ostinato.loop.layout import Word
from ostinato.loop.start import Helper
from ostinato.options import DEFAULT_QUEUE, Sampling

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
        model: Model,
        settled: Settled,
        *,
        eog_ids: Sequence[int] | frozenset[int] = (),
        n_tokens: int | None = None,
        queue: int = DEFAULT_QUEUE,
        reuse: bool = True,
        outbox_entries: int | None = None,
        constrain: Constrain | None = None,
    ) -> None:
        """`n_tokens`: what the tokenizer knows; ids beyond it, padding of the embedding, are never chosen. `queue`: how
        many requests may wait. `reuse`: do not compute a prompt's beginning again where it is still in memory.
        `constrain` makes what an answer must follow of what its sampling says."""
        vocab = model.shape.vocab
        self.context, self._vocab = settled.context, vocab
        self._eog_ids = frozenset(token for token in eog_ids if token < vocab)
        self._constrain = constrain
        settled = replace(settled, n_tokens=vocab if n_tokens is None else n_tokens)
        self._loop = open_runner(model, settled, outbox_entries=outbox_entries)
        self._queue = RequestQueue(queue, settled.n_slots, self._loop.changed.set)
        try:
            self._loop.mode.enter()
        except BaseException:
            self._loop.start.close()
            raise
        # A page is all there is to a position, unless layers recur: their states belong to the slot.
        self._scheduler = Scheduler(self._loop, self._queue, reuse=reuse and model.shape.recurrent is None)
        self._ids = count(1)
        # The thread knows nothing of this object, so that an engine that its owner has dropped ends by itself.
        self._thread = threading.Thread(target=self._scheduler.run, name="ostinato-engine", daemon=True)
        weakref.finalize(self, self._queue.close).atexit = False
        _OPEN_ENGINES[self._thread] = self._queue
        self._thread.start()

    @property
    def loop(self) -> Runner:
        """What is below; to be looked at."""
        return self._loop

    @property
    def mode(self) -> str:
        """Who paces: the name of the decode mode that runs."""
        return self._loop.mode_name

    @property
    def why_not(self) -> tuple[str, ...]:
        """Why no higher mode runs, a sentence for each."""
        return self._loop.why_not

    @property
    def fault(self) -> str | None:
        """What it died of; None while it lives."""
        return self._scheduler.fault

    # Requests

    def check(self, prompt: Sequence[int], sampling: Sampling) -> RequestSpec:
        """What would be submitted; refused here if at all. `sampling` is settled: nothing it draws with is None."""
        check_prompt(prompt, vocab=self._vocab, context=self.context, room=1)
        constraint = None if sampling.rule is None else self._constraint_of(sampling)
        ends = frozenset(sampling.stop_ids) | (frozenset() if sampling.ignore_eos else self._eog_ids)
        if constraint is not None:
            ends |= constraint.ends  # its masks say where an answer may end, and whether it is long enough to
            sampling = replace(sampling, min_tokens=0)
        stop_ids = tuple(sorted(ends))
        self._loop.host.check(sampling, stop_ids)
        most = self.context - len(prompt)
        return RequestSpec(tuple(prompt), sampling, stop_ids, min(most, sampling.max_tokens or most), constraint)

    def _constraint_of(self, sampling: Sampling) -> Constraint | None:
        if self._constrain is None:
            raise Unsupported("this engine knows no text, so its answers cannot follow a schema or a grammar")
        return self._constrain(sampling)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        wait: bool = False,
        sink: Callable[[Request, Message], None] | None = None,
        resume: bool = False,
        keep: bool = False,
    ) -> Request:
        """Ask for an answer, first come first served; returns at once. QueueFull when too many wait, or `wait` for
        room.

        The request is read from what is returned; or `sink` is told of everything, on the engine's thread. `resume`: it
        goes on from what was kept or loaded last; `keep`: its sequence is kept in its turn, to be saved or resumed.
        """
        spec = replace(self.check(prompt, sampling), resume=resume, keep=keep)
        request = Request(next(self._ids), spec, self._queue.cancel, sink, self.helper)
        self._lend()
        self._queue.put(request, wait=wait)
        return request

    def work(self, spec: WorkSpec) -> Work:
        """Ask for rows of texts, first come first served among the requests; returns at once. To be read to its end."""
        for text in spec.texts:
            self.check_text(text.tokens)
        work = Work(spec, self._queue.cancel, self.helper)
        self._lend()
        self._queue.put_work(work)
        return work

    def check_text(self, ids: Sequence[int]) -> None:
        """Refuse ids that are no tokens of this model, or too many for the context."""
        check_prompt(ids, vocab=self._vocab, context=self.context)

    def _lend(self) -> None:
        if self.helper is not None and threading.current_thread() is threading.main_thread():
            self.helper.lend()

    @property
    def helper(self) -> Helper | None:
        """Whom to help while waiting for messages on the main thread; None where the device works alone."""
        return self._loop.start.helper

    def stats(self) -> Stats:
        """Where it stands now, and what it counted."""
        scheduler, loop = self._scheduler, self._loop
        reserve = scheduler.reserve
        return Stats(
            mode=self.mode,
            n_slots=loop.settled.n_slots,
            waiting=len(self._queue),
            prefilling=scheduler.n_prefilling,
            live=scheduler.n_live,
            submitted=self._queue.n_submitted,
            ended=dict(scheduler.n_ended),
            steps=loop.host.word(Word.STEPS),
            tokens=scheduler.n_tokens,
            prompt_tokens=scheduler.n_prompt_tokens,
            cached_tokens=scheduler.n_cached_tokens,
            pages=reserve.n_pages,
            pages_leased=reserve.n_pages - reserve.n_available,
            pages_cached=reserve.n_cached,
            gaps=scheduler.gaps.read(),
            triggers=loop.mode.n_triggers,
            launches=loop.start.n_launches,
            instantiations=loop.start.n_instantiations,
            host_copies=loop.prefill.n_copies,
            fault=scheduler.fault,
        )

    def slots(self) -> list[SlotView]:
        """Who sits where now."""
        return self._scheduler.slots()

    # Life

    def close(self) -> None:
        """Cancel what runs and waits, end the loop and the threads. Once is enough; twice does no harm."""
        self._queue.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes: no thread may be inside torch when its memory is taken down."""
    open_still = list(_OPEN_ENGINES.items())
    for _, queue in open_still:
        queue.close()
    for thread, _ in open_still:
        thread.join(CLOSE_TIMEOUT_S)
