"""Everything Ostinato can refuse, as one tree; each kind knows its exit code and its HTTP status.

    OstinatoError                     exit 3  HTTP 500   an error of ours, unless a class below says otherwise
    ├── BadInput                      exit 2  HTTP 400   what the caller gave cannot be done
    │   ├── BadFile                                      damaged, hostile, or not a model at all
    │   │   └── NotNumbers                    HTTP 500   a model whose values are NaN or infinite
    │   ├── BadOption                                    a value out of range, or an unknown option
    │   ├── BadTemplate                                  a chat template that raises, loops or uses too much memory
    │   ├── PromptTooLong                                does not fit the context
    │   ├── ContextTooLarge                              the context asked for does not fit the memory
    │   ├── StderrUnwritable                             nowhere to write a server's log; told on standard output
    │   ├── Unsupported                                  a known thing that is not built here, by name
    │   └── UnknownName                       HTTP 404   a model or family that is not known
    ├── DecodeError                   exit 3  HTTP 500   a batch that the decoder refused; has a code and a reason
    │   ├── InvalidBatch              exit 2  HTTP 400   the input is wrong; the same call will always fail
    │   ├── NoSlot                    exit 4  HTTP 503   no memory now; retry later, with less, or after freeing some
    │   ├── Aborted                   exit 130 HTTP 499  the caller's own signal stopped the run
    │   ├── AllocationFailed          exit 4  HTTP 503   a buffer or graph could not be allocated
    │   └── ComputeFailed                                a graph could not be built, or its run failed
    ├── InternalError                                    a broken invariant of ours; never the caller's fault
    │   ├── BadPointer                                   memory that a kernel must not be launched on
    │   └── NotWarmed                                    a kernel that would be compiled while a graph is captured
    ├── DecodeInvariantError                             an attempt to break one of I-1 to I-10; nothing was changed
    │   └── PlanStale                                    a buffer of the plan is not where the plan says; fatal
    ├── EngineDead                            HTTP 503   a device fault or drift: the process must be restarted
    ├── QueueFull                      exit 4  HTTP 429   too many requests wait already
    ├── FetchFailed                   exit 2  HTTP 502   a model could not be pulled: no consent, or a checksum
    │   ├── NoNetwork                 exit 4             the place that it comes from cannot be reached from here
    │   └── CannotStore               exit 4             a full disk, or a store that cannot be written
    └── HardwareCannot                exit 4  HTTP 503   this machine cannot run it

A message says what was wrong, where, and what to do, with the values in the sentence. Nothing here imports
anything of the project, so every package may raise these.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import ClassVar, Self


class OstinatoError(Exception):
    """The root: every exception that this package raises on purpose is one of these.

    >>> from ostinato import OstinatoError, Sampling
    >>> try:
    ...     Sampling(temperature=-1)
    ... except OstinatoError as error:
    ...     print(type(error).__name__, error.exit_code, error.http_status)
    BadOption 2 400

    Attributes:
        exit_code: how the command line ends with this error.
        http_status: how the server answers with it.
    """

    exit_code: ClassVar[int] = 3
    http_status: ClassVar[int] = 500


class BadInput(OstinatoError):
    """The caller's input cannot be processed."""

    exit_code = 2
    http_status = 400


class BadFile(BadInput):
    """A model file that is damaged, hostile, or no model at all."""


class NotNumbers(BadFile):
    """A model that computes values which are NaN or infinite."""

    http_status = 500


class BadOption(BadInput):
    """An option with a value out of range, or an unknown option."""


class BadTemplate(BadInput):
    """A chat template that raises, loops or uses too much memory."""


class PromptTooLong(BadInput):
    """A prompt that does not fit the context.

    Its arguments say how long the prompt is and how much fits, and whether the model was trained for no more. What to
    do about it depends on the interface that was used: `str` says it for Python, and `told` in other words.
    """

    def __init__(self, what: str, is_most: bool = False) -> None:
        super().__init__(what, is_most)

    def told(self, other_way: str) -> str:
        """The message, with what to do other than shorten the prompt, if the context could be larger."""
        what, is_most = self.args
        return f"{what}; shorten it, " + ("as the model was trained for no more" if is_most else f"or {other_way}")

    def __str__(self) -> str:
        return self.told("open the model with a larger context= (`ostinato inspect` shows what it was trained for)")


class StderrUnwritable(BadInput):
    """A standard error that cannot be written to, where a server's log goes."""


class ContextTooLarge(BadInput):
    """A context, asked for by the caller, whose KV cache does not fit the memory."""


class Unsupported(BadInput):
    """Something known that is not built here, refused by name."""


class UnknownName(BadInput):
    """A model or family that is not known."""

    http_status = 404


class DecodeError(OstinatoError):
    """A batch that the decoder refused.

    Attributes:
        code: the number of the kind of refusal.
        reason: names the check.
        index: the token that failed it, where there is one.
    """

    code: ClassVar[int]

    def __init__(self, message: str, *, reason: str, index: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.index = index


class InvalidBatch(DecodeError):
    """The input is wrong; the same call will always fail. Nothing was changed."""

    code = -1
    exit_code = 2
    http_status = 400

    @classmethod
    def of_token(cls, index: int, what: str, reason: str) -> Self:
        """What is wrong with the token at this index of the batch."""
        return cls(f"token {index}: {what}", reason=reason, index=index)


class NoSlot(DecodeError):
    """The memory is full now. Nothing was changed: retry later, with a smaller batch, or after freeing memory (G-2)."""

    code = 1
    exit_code = 4
    http_status = 503


class Aborted(DecodeError):
    """The caller's abort signal stopped a run; what was computed before it stays."""

    code = 2
    exit_code = 130
    http_status = 499


class AllocationFailed(DecodeError):
    """A buffer or graph could not be allocated."""

    code = -2
    exit_code = 4
    http_status = 503


class ComputeFailed(DecodeError):
    """A graph could not be built, or its run failed."""

    code = -3


class InternalError(OstinatoError):
    """A broken invariant of ours: a bug, never the caller's fault."""


class BadPointer(InternalError):
    """Memory that a kernel must not be launched on: empty, foreign, wrongly typed or too small."""


class NotWarmed(InternalError):
    """A kernel that would be compiled while a graph is captured, named before the capture begins."""


class DecodeInvariantError(OstinatoError):
    """An attempt to break one of I-1 to I-10 while decode mode is on. Nothing was changed; running requests finish.

    Attributes:
        invariant: its code in `docs/rules.md`.
    """

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant = invariant


class PlanStale(DecodeInvariantError):
    """A buffer of the plan is not where the plan says: nothing can run with this plan any more."""


class EngineDead(OstinatoError):
    """A device fault or drift ended this engine: the process must be restarted."""

    http_status = 503


class QueueFull(OstinatoError):
    """Too many requests wait already; try again later."""

    exit_code = 4
    http_status = 429


class FetchFailed(OstinatoError):
    """A model that could not be pulled: terms not accepted, or a checksum that differs."""

    exit_code = 2
    http_status = 502


class NoNetwork(FetchFailed):
    """The place that a model comes from cannot be reached from this machine."""

    exit_code = 4


class CannotStore(FetchFailed):
    """A model that this machine has no place for: a full disk, or a store that cannot be written."""

    exit_code = 4


class HardwareCannot(OstinatoError):
    """This machine cannot run what was requested."""

    exit_code = 4
    http_status = 503


def first_few(names: Sequence[str]) -> str:
    """Some names for an error message, and how many more there are.

    >>> first_few(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def first_line(error: BaseException) -> str:
    """What an error of a library says, without the advice that follows on further lines.

    >>> first_line(RuntimeError("CUDA error: no memory\\nSearch for it in the manual"))
    'CUDA error: no memory'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def quoted(value: object, most: int = 100) -> str:
    """A caller's value for an error message, which must not be as long as the value may be.

    >>> quoted("a"), quoted("a" * 5000, most=10)
    ("'a'", "'aaaaaa...")
    """
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def listing(name: str, known: Iterable[str]) -> str:
    """The known names for an error message, one that is near to `name` first.

    >>> listing("temprature", ["top_k", "temperature"])
    'temperature (the nearest), top_k'
    """
    names = sorted(known)
    nearest = get_close_matches(name, names, n=1, cutoff=0.7)
    if not nearest:
        return ", ".join(names)
    rest = [other for other in names if other != nearest[0]]
    return ", ".join([f"{nearest[0]} (the nearest)", *rest])
