"""A request as its caller sees it: an id, tokens as they come, one end, and a way to cancel.

The engine's thread puts tokens in; any one thread takes them out, or a sink is given each. Every request that was
accepted ends exactly once: with a reason, or with an error that its reader is raised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from ostinato.engine.constraint import Constraint
from ostinato.errors import BadInput, PromptTooLong, Unsupported
from ostinato.loop.start import Helper
from ostinato.models.shape import Shape
from ostinato.options import Sampling
from ostinato.processes import OpenedHere

PAUSE_S: Final = 0.001  # wait for a message when there was no work to help with
CLOSED: Final = "this LLM is closed; open it again to ask more"
NOT_NUMBERS: Final = (
    "the model computes values that are not numbers (NaN, infinity); its file may be damaged: fetch it again"
)

FinishReason = Literal["stop", "length"]
EndReason = Literal["stop", "length", "cancelled"]


class Token(NamedTuple):
    """One token of an answer, at its position in the sequence. `time_ns` is the device's own clock when it was made.

    `logprob` is the model's own; `top` has the most likely tokens if asked for. The last token has a finish reason.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    position: int
    time_ns: int
    finish_reason: FinishReason | None


T = TypeVar("T")


class MessageQueue(Generic[T]):
    """Messages from the engine's thread to one reader, in order."""

    def __init__(self, helper: Helper | None) -> None:
        """`helper`: the device's work, with which a reader on the main thread helps while it waits."""
        self._queue: SimpleQueue[T] = SimpleQueue()
        self._helper, self._opened = helper, OpenedHere()

    def put(self, message: T) -> None:
        self._queue.put(message)

    def get(self) -> T:
        """The next message, waited for."""
        self._opened.check()
        while self._helper is not None and threading.current_thread() is threading.main_thread():
            try:
                return self._queue.get_nowait() if self._helper.help() else self._queue.get(timeout=PAUSE_S)
            except Empty:
                continue
        return self._queue.get()


class Cancelled(NamedTuple):
    """The end of a request that was cancelled: no token comes with it."""


# A constraint is followed by the loop, by the loop with a stack of open calls, or by the host.
GrammarPath: TypeAlias = Literal["device", "device+stack", "host"]
RequestMessage: TypeAlias = Token | Cancelled | Exception


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A checked request: at most `most` tokens, ended by any of `stop_ids`.

    `constraint` is what the answer must follow; it belongs to this request alone, and its ends are the first of
    `stop_ids`. `resume`: continue the sequence that
    was kept last, as far as both begin alike; `keep`: keep this sequence afterwards, until its pages are needed.
    `rope_set`: of the frequencies that rotate the whole sequence.
    """

    prompt: Sequence[int]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    most: int
    constraint: Constraint | None = None
    resume: bool = False
    keep: bool = False
    rope_set: int = 0

    @property
    def n_positions(self) -> int:
        """Positions that need pages: no step reads the last token of an answer, so it has none."""
        return len(self.prompt) + self.most - 1


class HeldSequence(NamedTuple):
    """Tokens that were computed, and the rope set of their keys."""

    tokens: list[int]
    rope_set: int = 0


def check_generates(shape: Shape) -> None:
    """Refuse an encoder, where tokens or their probabilities are asked for."""
    if not shape.causal:
        raise Unsupported(f"{shape.family} is an encoder: it embeds text and generates none")


def check_prompt(ids: Sequence[int], *, shape: Shape, context: int, room: int = 0) -> None:
    """Refuse ids that are no tokens of this model, or too many for the context with `room` to spare."""
    if not ids:
        raise BadInput("the prompt is empty; give it at least one token")
    for index, token in enumerate(ids):
        if not isinstance(token, int) or not 0 <= token < shape.vocab:
            raise BadInput(
                f"the prompt has the token id {token!r} at index {index}; "
                f"this model has ids from 0 to {shape.vocab - 1}"
            )
    if len(ids) + room > context:
        raise PromptTooLong(
            f"the prompt has {len(ids)} tokens and the context holds {context}"
            + (f", of which {room} must be left for the answer" if room else ""),
            context >= shape.context,
        )


class Request:
    """An accepted request. Read it once: `for token in request`.

    Times are seconds of `time.perf_counter`, None until they are known; tokens carry times of the device's clock.
    """

    def __init__(
        self,
        id: int,
        spec: RequestSpec,
        cancel: Callable[[Request], None],
        sink: Callable[[Request, RequestMessage], None] | None = None,
        helper: Helper | None = None,
    ) -> None:
        """`sink`, if given, gets every message on the engine's thread, and there is no other reader. `helper` lets a
        reader on the main thread run part of the device's work."""
        self.id, self.spec = id, spec
        self.cached_tokens = 0
        self.submitted = time.perf_counter()
        self.prefill_began: float | None = None
        self.prefill_ended: float | None = None
        self.first_token: float | None = None
        self.grammar: GrammarPath | None = (
            None  # where its constraint is followed; None without one, and before admission
        )
        self.mask_s = 0.0  # seconds that its tokens waited for the host's masks
        self.finish_reason: EndReason | None = None
        self.error: Exception | None = None
        self._cancel = cancel
        self._messages: MessageQueue[RequestMessage] = MessageQueue(helper)
        self._sink = sink
        self._is_read = False

    @property
    def ended(self) -> bool:
        """Whether it has ended, even if the end was not read yet."""
        return self.finish_reason is not None or self.error is not None

    @property
    def wait_s(self) -> float:
        """Seconds in the queue."""
        return 0.0 if self.prefill_began is None else self.prefill_began - self.submitted

    @property
    def prefill_s(self) -> float:
        """Seconds that the prompt took, without the time in the queue."""
        if self.prefill_began is None or self.prefill_ended is None:
            return 0.0
        return self.prefill_ended - self.prefill_began

    @property
    def first_token_s(self) -> float:
        """Seconds from submission to the first token."""
        return 0.0 if self.first_token is None else self.first_token - self.submitted

    def cancel(self) -> None:
        """End it as soon as possible; no effect after its end. From any thread."""
        if not self.ended:
            self._cancel(self)

    # Reading

    def __iter__(self) -> Iterator[Token]:
        """Tokens as they come, blocking. Ends after the last token or a cancellation; raises the request's error."""
        return self

    def __next__(self) -> Token:
        if self._is_read:
            raise StopIteration
        message = self._messages.get()
        if not isinstance(message, Token):
            self._is_read = True
            if isinstance(message, Exception):
                raise message
            raise StopIteration
        self._is_read = message.finish_reason is not None
        return message

    # The engine's side: called on its thread alone

    def put(self, token: Token) -> None:
        """Deliver a token; one with a finish reason ends the request. No effect after the end."""
        if self.ended:
            return
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.finish_reason = token.finish_reason
        self._deliver(token)

    def end(self, error: Exception | None = None) -> None:
        """End with an error, or as cancelled; no effect after the end."""
        if not self.ended:
            self.error, self.finish_reason = error, "cancelled" if error is None else None
            self._deliver(error or Cancelled())

    def _deliver(self, message: RequestMessage) -> None:
        if self._sink is None:
            self._messages.put(message)
        else:
            self._sink(self, message)
