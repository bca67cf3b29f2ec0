"""A reply in OpenAI's outer shape, chunk by chunk or whole, around choices in the shape of an endpoint.

The order of a stream: an opening for each choice, deltas as they arrive, each choice's end, the usage if it was
requested, `[DONE]`. While no token arrives, comments keep the connection alive.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from ostinato.serve.answers import Answers, TokenUpdate
from ostinato.serve.log import Record
from ostinato.serve.service import Service
from ostinato.serve.shapes import GenerationBody, StreamOptions
from ostinato.serve.stream import DONE, EventStream, at_once, event, formatted


class Choice(Protocol):
    """One answer in the shape of its endpoint, so far."""

    @property
    def reason(self) -> str:
        """How it ended; empty before."""

    def opening(self) -> dict[str, Any] | None:
        """The choice before any token, if a stream begins with one."""

    def format_update(self, update: TokenUpdate) -> list[dict[str, Any]]:
        """The choices of a token's chunks: none, one or several. The last of an answer has its finish reason."""

    def whole(self) -> dict[str, Any]:
        """The choice, complete."""


async def reply(
    service: Service,
    request: Request,
    body: GenerationBody,
    answers: Answers,
    choices: Sequence[Choice],
    id: str,
    kinds: tuple[str, str],
    headers: Mapping[str, str],
) -> Response:
    """The response to a request whose answers have been submitted: a stream, or one object. `kinds`: the `object` of
    one object, and of a stream's chunks."""
    record: Record = request.state.record
    kind = kinds[1] if body.stream else kinds[0]
    head = {
        "id": id,
        "object": kind,
        "created": int(service.clock()),
        "model": service.answers_as(body.model),
        "system_fingerprint": service.system_fingerprint,
    }
    if body.stream:
        made = events(answers, choices, head, body.stream_options or StreamOptions(), record)
        return EventStream(made, answers, record, service.limits.write_s, headers=headers)
    return await at_once(request, whole(answers, choices, head, record), answers, headers)


async def events(
    answers: Answers, made: Sequence[Choice], head: dict[str, Any], options: StreamOptions, record: Record
) -> AsyncGenerator[bytes, None]:
    """The stream; every chunk begins with the fields of `head`."""
    with_usage, continuous = bool(options.include_usage), bool(options.continuous_usage_stats)

    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage: dict[str, Any] = {}
        if with_usage or continuous:
            usage = {"usage": answers.usage() if continuous else None}
        return event({**head, "choices": choices, **usage, **more})

    opening = [first for one in made if (first := one.opening()) is not None]
    # Where nothing is generated, the openings are also the ends.
    last: dict[str, Any] = opening.pop() if answers.done else {}
    if opening:
        yield b"".join(chunk([choice]) for choice in opening)

    def format(updates: Sequence[TokenUpdate]) -> bytes:
        nonlocal last
        choices = [choice for update in updates for choice in made[update.number].format_update(update)]
        if answers.done:
            last = choices.pop()
        return b"".join(chunk([choice]) for choice in choices)

    async for part in formatted(answers, format):
        yield part
    record.outcome = _outcome(made)
    yield chunk([last], **await answers.extras())
    if with_usage:
        yield event({**head, "choices": [], "usage": answers.usage()})
    yield DONE


async def whole(answers: Answers, made: Sequence[Choice], head: dict[str, Any], record: Record) -> dict[str, Any]:
    """The whole reply as one object."""
    async for update in answers.updates():
        made[update.number].format_update(update)
    record.outcome = _outcome(made)
    choices = [one.whole() for one in made]
    return {**head, "choices": choices, "usage": answers.usage(), **await answers.extras()}


def _outcome(made: Sequence[Choice]) -> str:
    reasons = {one.reason for one in made}
    return reasons.pop() if len(reasons) == 1 else "several"
