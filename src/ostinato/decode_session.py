"""Decode mode for callers: open a model, enter, admit prompts, trigger, read tokens, exit.

`LLM` does the same behind a queue. A `DecodeSession` has neither queue nor threads of its own: every launch is a call
of its user's, and counters show what the device was asked to do. docs/decode-mode.md has an example.
"""

from __future__ import annotations

import operator
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self, Unpack

from ostinato.backends.base import Settled
from ostinato.backends.runner import Runner
from ostinato.calls import check_call, whole_ids
from ostinato.engine.choose import choose
from ostinato.engine.defaults import default_sampling
from ostinato.engine.driver import LoopDriver
from ostinato.engine.load import load_model
from ostinato.engine.open import open_runner
from ostinato.engine.request import EndReason, check_generates, check_prompt
from ostinato.errors import BadInput, DecodeInvariantError, EngineDead, HardwareCannot, NoSlot, QueueFull, Unsupported
from ostinato.files import store
from ostinato.files.checkpoint import open_checkpoint
from ostinato.loop.host import OutEntry
from ostinato.loop.layout import Finish, Word
from ostinato.models.registry import read_shape
from ostinato.options import LoadOptions, LoadWords, Sampling, load_options, loads
from ostinato.processes import OpenedHere
from ostinato.text.of_checkpoint import tokenizer_of

DEVICE_PACED: Final = ("loop", "persistent")
POLL_S: Final = {"cuda": 0.0005, "cpu": 0.05}  # a GPU cannot set the wake event
_REASONS: Final[dict[Finish, EndReason]] = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """One token of a slot, as the device wrote it to the outbox.

    Attributes:
        slot: whose token it is.
        token: its id; None at the end of a cancelled sequence.
        position: in its sequence, the prompt included.
        logprob: its log-probability.
        top: the most likely tokens with theirs, as many as `Sampling.logprobs` asks for.
        time_ns: the device's own clock when it was committed.
        finish_reason: of the last token of a sequence: stop, length or cancelled; else None.
    """

    slot: int
    token: int | None
    position: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    time_ns: int
    finish_reason: EndReason | None


class DecodeCounts(NamedTuple):
    """What was asked of the device since the model was opened, and what it did.

    Attributes:
        triggers: launches of the loop by `trigger`, and those that went on with a loop that had paused.
        launches: calls that started work of decoding on the device.
        instantiations: executables that were built.
        steps: steps that the device has run.
        live: slots that the next step will decode.
    """

    triggers: int
    launches: int
    instantiations: int
    steps: int
    live: int


class DecodeSession:
    """A model in decode mode, driven by hand. For the thread that opens it; calls of another are refused.

    >>> with DecodeSession("smollm2", slots=2) as session:                             # doctest: +SKIP
    ...     slot = session.admit("The sea", Sampling(max_tokens=8))
    ...     session.trigger()
    ...     ids = [one.token for one in session.tokens()]

    A `with` block enters decode mode, exits it at its end, and closes the model. Without one, call `enter`, `exit` and
    `close`.

    Args:
        model, load, progress, talk, options: as of `LLM`. The mode must be one that the device paces: loop, or
            persistent.

    Attributes:
        tokenizer: turns text into token ids and back.
        defaults: the sampling options that the model's files state.
        shape: its family, layers and sizes.

    Raises:
        DecodeInvariantError: a call would break one of the invariants I-1 to I-10; it has changed nothing.
        HardwareCannot: no mode that the device paces can run here.
    """

    @loads
    def __init__(
        self,
        model: str | Path = store.DEFAULT,
        *,
        load: LoadOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
        talk: Callable[[str], None] | None = None,
        **options: Unpack[LoadWords],
    ) -> None:
        say, wanted = talk or (lambda _: None), load_options(load, options)
        self._opened, self._closed, self._thread = OpenedHere(), False, threading.current_thread()
        self.name = store.given(model)
        with ExitStack() as undo:
            checkpoint = undo.enter_context(open_checkpoint(store.resolve(self.name, talk=say)))
            self.shape = read_shape(checkpoint)
            check_generates(self.shape)
            settled = choose(checkpoint, self.shape, wanted, say)
            _check_paced(settled)
            self.tokenizer, self.defaults = tokenizer_of(checkpoint), default_sampling(checkpoint)
            fallback = settled.fallback if settled.fallback in DEVICE_PACED else None
            settled = replace(settled, n_tokens=self.tokenizer.vocab_size, fallback=fallback)
            loaded = load_model(checkpoint, self.shape, settled, progress)
            runner = open_runner(loaded, settled)
            self._checkpoint = checkpoint  # weights may be mapped from it
            undo.pop_all()
        for sentence in runner.fallen_back:
            say(sentence)
        self._runner, self._driver = runner, LoopDriver(runner)
        self._generations: dict[int, int] = {}  # of each slot that is taken
        self._unread: deque[OutEntry] = deque()  # taken from the outbox; a slot is free when its last one was read
        self._joins = False  # whether an admission was published while the loop ran, and may have come too late
        # A loop must not outlive the memory that it works in, nor the interpreter.
        self._abandoned = weakref.finalize(self, _abandon, runner)

    def __repr__(self) -> str:
        if self._closed:
            return f"<DecodeSession {self.name}, closed>"
        settled, now = self._runner.settled, "on" if self.entered else "off"
        return f"<DecodeSession {self.name} on {settled.device}, {settled.mode}, decode mode {now}>"

    # Enter, trigger, exit

    def enter(self) -> None:
        """Enter decode mode: executable, plan and addresses are checked and locked until `exit`."""
        self._check_usable()
        self._runner.decode_mode.enter()

    def trigger(self) -> None:
        """Launch the loop once; it runs by itself until no slot is live. Returns at once; refused while it runs."""
        self._check_usable()
        self._runner.decode_mode.trigger()
        self._joins = False

    def exit(self) -> None:
        """Wait for the loop to end, check that nothing has changed, and leave decode mode. Tokens that were not read
        can still be read."""
        self._check_usable(leaving=True)
        self._runner.decode_mode.exit()

    def step(self) -> None:
        """One step that the host asks for and waits for, to compare with; refused in decode mode (I-8)."""
        self._check_usable()
        self._runner.decode_mode.step()

    @property
    def entered(self) -> bool:
        """Whether decode mode is on."""
        return self._runner.decode_mode.on

    @property
    def running(self) -> bool:
        """Whether the loop runs."""
        return self._runner.decode_mode.running

    @property
    def mode(self) -> str:
        """How the device runs the loop: loop, or persistent."""
        return self._runner.settled.mode

    @property
    def plan(self) -> str:
        """What a step is, as text: every buffer and every node; the same in every process."""
        self._check_usable()
        return self._runner.plan.text

    @property
    def counts(self) -> DecodeCounts:
        """Triggers, launches, executables and steps so far."""
        self._check_usable()
        runner = self._runner
        return DecodeCounts(
            runner.decode_mode.n_triggers,
            runner.start.n_launches,
            runner.start.n_instantiations,
            runner.host.word(Word.STEPS),
            runner.host.word(Word.LIVE),
        )

    # Sequences in, tokens out

    def admit(self, prompt: str | Sequence[int], sampling: Sampling | None = None, **words: object) -> int:
        """Compute a prompt, put its admission into the inbox, and return its slot, which is free again when its last
        token was read. The loop takes it at its next step boundary, running or not; a persistent one pauses while the
        prompt is computed, and is triggered again.

        Raises:
            NoSlot: every slot is taken, or too few pages are free; read tokens until a sequence has ended.
            Unsupported: stop strings and grammars need text; `LLM` takes them.
        """
        check_call("admit(prompt", sampling, words)
        self._check_usable()
        ids = self._ids(prompt)
        complete = (sampling or Sampling()).over(self.defaults)
        if complete.seed is None:
            complete = replace(complete, seed=secrets.randbits(53))
        if complete.rule is not None or complete.stop:
            raise Unsupported("a session decodes tokens without text: LLM takes stop strings, schemas and grammars")
        context = self._runner.settled.context
        check_prompt(ids, shape=self.shape, context=context, room=1)
        ends = frozenset(complete.stop_token_ids) | (frozenset() if complete.ignore_eos else self.tokenizer.eog_ids)
        stop_ids = sorted(token for token in ends if token < self.shape.vocab)
        self._runner.host.check(complete, stop_ids)
        room = context - len(ids)
        slot = self._free_slot()
        joins = self.running
        most = min(room, complete.max_tokens or room)
        generation = self._driver.admit(slot, ids, most=most, sampling=complete, stop_ids=stop_ids)
        self._generations[slot] = generation
        self._joins = self._joins or joins
        return slot

    def cancel(self, slot: int) -> None:
        """Ask the loop to end the sequence of a slot at its next step boundary."""
        self._check_usable()
        number = None
        if not isinstance(slot, bool):  # to Python, True is 1
            with suppress(TypeError):
                number = operator.index(slot)
        if number not in self._generations:
            raise BadInput(f"slot {slot!r} holds no sequence; taken: {sorted(self._generations) or 'none'}")
        if not self._runner.host.cancel(number, self._generations[number]):
            what = "the loop takes its entries at its next step boundary" if self.running else "trigger"
            raise QueueFull(f"the inbox is full: {what}, then cancel again")
        self._joins = self._joins or self.running

    def read(self) -> list[DecodedToken]:
        """The tokens that are in the outbox now, without waiting, in the order in which they were committed."""
        return [self._next() for _ in range(self._n_unread())]

    def tokens(self) -> Iterator[DecodedToken]:
        """Tokens as the device commits them, until the loop has ended and all of them are read.

        A loop that ended because the outbox was full, or just before it could take an admission that was made while it
        ran, is triggered again.

        Raises:
            BadInput: there is no token to come: sequences were admitted, and the loop was not triggered for them.
        """
        runner, came = self._runner, False
        while True:
            runner.changed.clear()  # before anything is looked at
            running = self.running
            if self._n_unread():
                came = True
                yield self._next()
            elif running:
                runner.changed.wait(POLL_S[runner.settled.kind])
            elif self.entered and self._goes_on():
                self.trigger()
            elif came or not self._generations:
                return
            else:
                raise BadInput(f"the sequences of slots {sorted(self._generations)} wait for a trigger; call it first")

    # Closing

    def close(self) -> None:
        """Release memory and threads. Refused in decode mode, whose executable lives as long as it (I-3)."""
        if self._closed or not self._opened:
            return
        self._check_thread(leaving=True)
        if self.entered:
            raise DecodeInvariantError("I-3", "closing a session is not allowed while decode mode is on; exit it first")
        self._closed = True
        self._abandoned.detach()
        self._runner.close()
        self._checkpoint.close()

    def __enter__(self) -> Self:
        if not self.entered:
            self.enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._closed or not self._opened:
            return
        self._check_thread(leaving=True)
        if error is not None:
            self._runner.host.set_yield(True)  # the caller has left: end at the next step boundary
        try:
            self.exit()
        finally:
            self.close()

    # Inside

    def _check_usable(self, *, leaving: bool = False) -> None:
        self._opened.check()
        self._check_thread(leaving=leaving)
        if self._closed:
            raise BadInput("this session is closed; open another one")

    def _check_thread(self, *, leaving: bool = False) -> None:
        """`leaving`: another thread may exit and close for one that has ended."""
        if threading.current_thread() is not self._thread and not (leaving and not self._thread.is_alive()):
            raise BadInput(
                "a session is for the thread that opened it; open one in this thread, or use AsyncLLM or LLM"
            )

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return whole_ids(prompt, "a prompt is text, or a list of token ids")

    def _free_slot(self) -> int:
        n_slots = self._runner.settled.n_slots
        for slot in range(n_slots):
            if slot not in self._generations:
                return slot
        raise NoSlot(
            f"all {n_slots} slots are taken: read tokens until a sequence has ended, or open with more (slots)",
            reason="slots",
        )

    def _goes_on(self) -> bool:
        """Whether a loop that has ended has more to do that it was triggered for."""
        host = self._runner.host
        return bool(host.word(Word.LIVE)) or (self._joins and not host.all_taken)

    def _n_unread(self) -> int:
        """How many entries can be read; EngineDead where none can, because the loop has failed."""
        self._check_usable()
        self._unread.extend(self._runner.host.drain(1 << 20))
        if not self._unread and (dead := self._runner.decode_mode.fault()) is not None:
            raise EngineDead(dead)
        return len(self._unread)

    def _next(self) -> DecodedToken:
        entry = self._unread.popleft()
        reason = _REASONS.get(entry.finish)
        if entry.finish is not Finish.NONE:
            self._driver.release(self._generations.pop(entry.slot))
        return DecodedToken(entry.slot, entry.token, entry.position, entry.logprob, entry.top, entry.time_ns, reason)


def _check_paced(settled: Settled) -> None:
    if settled.mode not in DEVICE_PACED:
        raise HardwareCannot(
            f"decode mode is for modes that the device paces ({' and '.join(DEVICE_PACED)}), and {settled.mode} is "
            f"paced by the host; {'; '.join(settled.why_not) or 'leave the mode to auto'}"
        )


def _abandon(runner: Runner) -> None:
    """End the loop of a session that was neither exited nor closed."""
    runner.host.set_yield(True)
    runner.close()
