"""A reply in OpenAI's outer shape, chunk by chunk or whole; a `ReplyFormatter` makes the choices inside.

The order of a stream: an opening for each choice, deltas as they arrive, each choice's end, the usage if it was
requested, `[DONE]`. While no token arrives, comments keep the connection alive.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.serve.answers import Answers, TokenUpdate
from ostinato.serve.log import Record
from ostinato.serve.shapes import StreamOptions
from ostinato.serve.stream import DONE, KEEP_ALIVE, event


class ReplyFormatter(Protocol):
    """Formats one kind of answers: chats, or completions."""

    def opening(self) -> list[dict[str, Any]]:
        """One choice per answer, before any token."""

    def format_update(self, update: TokenUpdate) -> list[dict[str, Any]]:
        """The choices of a token's chunks: none, one or several. The last of an answer has its finish reason."""

    def choices(self) -> list[dict[str, Any]]:
        """All choices, complete."""

    def reasons(self) -> list[str]:
        """How the answers ended."""


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that begin every chunk of a reply."""

    id: str
    kind: str  # `object`, without a stream's ending
    created: int
    model: str

    def chunk(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


async def events(
    answers: Answers, formatter: ReplyFormatter, head: Head, options: StreamOptions, record: Record, chunk_kind: str
) -> AsyncGenerator[bytes, None]:
    """The stream."""
    with_usage, continuous = bool(options.include_usage), bool(options.continuous_usage_stats)

    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage: dict[str, Any] = {}
        if with_usage or continuous:
            usage = {"usage": answers.usage() if continuous else None}
        return event({**head.chunk(choices, chunk_kind), **usage, **more})

    opening = formatter.opening()
    last: dict[str, Any] = (
        opening.pop() if answers.done else {}
    )  # nothing was generated: the openings are also the ends
    if opening:
        yield b"".join(chunk([choice]) for choice in opening)
    while not answers.done:
        update = await answers.more()
        if not update:
            yield KEEP_ALIVE
            continue
        began = time.perf_counter()
        format_update = [choice for one in update for choice in formatter.format_update(one)]
        if answers.done:
            last = format_update.pop()
        part = b"".join(chunk([choice]) for choice in format_update)
        answers.host_s += time.perf_counter() - began
        if part:
            yield part
    record.outcome = _outcome(formatter)
    yield chunk([last], **await answers.extras())
    if with_usage:
        yield event({**head.chunk([], chunk_kind), "usage": answers.usage()})
    yield DONE


async def whole(answers: Answers, formatter: ReplyFormatter, head: Head, record: Record) -> dict[str, Any]:
    """The whole reply as one object."""
    while not answers.done:
        for update in await answers.more():
            formatter.format_update(update)
    record.outcome = _outcome(formatter)
    return {**head.chunk(formatter.choices(), head.kind), "usage": answers.usage(), **await answers.extras()}


def _outcome(formatter: ReplyFormatter) -> str:
    reasons = set(formatter.reasons())
    return reasons.pop() if len(reasons) == 1 else "several"
