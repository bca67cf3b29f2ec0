"""One line of JSON for each request on standard error, with the id that the response carries.

Prompts and answers are written only with `--log-prompts`.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Final

# A request that comes through another process keeps the id that it was given there.
given_id: Final[ContextVar[str | None]] = ContextVar("given_id", default=None)


def new_id() -> str:
    return given_id.get() or secrets.token_hex(12)


@dataclass(slots=True)
class Record:
    """The record of one HTTP request; filled in while it is answered."""

    id: str
    method: str
    path: str
    client: str | None
    model: str | None = None  # the id of the one that answers
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    outcome: str = ""  # how it ended, where the status does not say: stop, length, tool_calls, cancelled, error
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None
    wait_ms: float | None = None
    first_token_ms: float | None = None
    error: str | None = None
    prompt: Any = None
    answer: Any = None
    told_elsewhere: bool | None = None  # the process that answered has it in its log

    @property
    def ended_as(self) -> str:
        """How the request ended, for counting."""
        if self.outcome:
            return self.outcome
        if self.status >= 500:
            return "error"
        return "refused" if self.status >= 400 else "ok"

    def line(self) -> dict[str, Any]:
        """The fields that are known, to be written."""
        known = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "outcome": self.ended_as,
            "ms": (time.perf_counter() - self.started) * 1e3,
        }
        del known["started"]
        rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in known.items()}
        return {name: value for name, value in rounded.items() if value is not None}


Write = Callable[[dict[str, Any]], None]


def write_line(line: dict[str, Any]) -> None:
    """Write to standard error; if it is closed, drop the line."""
    with suppress(OSError, ValueError):
        sys.stderr.write(json.dumps(line) + "\n")
        sys.stderr.flush()
