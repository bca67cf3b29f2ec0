"""The body of a request: received in time, counted before it is parsed, and parsed in a thread.

Parsing and validation are calls into C that hold Python's lock: a thread of its own does not keep them from delaying
the streams of other clients. The limits do: what may be parsed is counted first, in short steps. Nothing here knows
the shape of any API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final, NamedTuple

from fastapi.routing import APIRoute
from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import PydanticCustomError, core_schema
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from ostinato.serve.errors import Refusal
from ostinato.serve.settings import ServeLimits

_MOST_DISCARDED: Final = 4  # times the limit of a body, so that its sender can read why it was refused
_STEP_BYTES: Final = 2**16  # counted without a pause: at most 2 ms

_SMALL_BYTES: Final = 2**13  # parsed in less time than it takes to hand them to a thread and back, 0.1 ms
_MOST_LIKE_VALUES: Final = 1000  # of an object whose values are all numbers or all texts


class ClientGone(Exception):
    """The client disconnected before its body had arrived."""


# In time


async def received(headers: Headers, receive: Receive, limits: ServeLimits) -> bytes:
    """The whole body, under the limits on its size and its time."""
    parts: list[bytes] = []
    n = 0
    announced = headers.get("content-length", "")
    too_large = announced.isdecimal() and int(announced) > limits.body_bytes
    end = time.monotonic() + limits.body_s
    while True:
        message = await _next(receive, end, limits)
        if message["type"] == "http.disconnect":
            raise ClientGone
        n += len(message.get("body", b""))
        too_large |= n > limits.body_bytes
        if too_large:
            parts.clear()
            if n > _MOST_DISCARDED * limits.body_bytes:
                break
        else:
            parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    if too_large:
        raise Refusal(413, f"the body has more than {limits.body_bytes} bytes, the most that is taken")
    return b"".join(parts)


async def _next(receive: Receive, end: float, limits: ServeLimits) -> Message:
    """The next part of a body that must be complete at `end`."""
    left = end - time.monotonic()
    try:
        async with asyncio.timeout(min(limits.body_gap_s, left)):
            return await receive()
    except TimeoutError:
        if left <= limits.body_gap_s:
            raise Refusal(408, f"the whole body did not come within {limits.body_s:g} s") from None
        raise Refusal(408, f"no further part of the body came within {limits.body_gap_s:g} s") from None


# Counted


class BodyCounts(NamedTuple):
    """What a body of JSON holds: keys, objects and lists; and items of objects and lists."""

    nodes: int
    items: int


def check_counts(body: bytes, limits: ServeLimits) -> None:
    """Refuse a body with so many keys or items that parsing it would delay the streams of other clients."""
    counts = counted(body, limits.body_nodes, limits.body_items)
    if counts.nodes > limits.body_nodes:
        most = limits.body_nodes
        raise Refusal(
            413, f"the body has more than {most} keys, objects and lists, the most that are taken; send fewer messages"
        )
    if counts.items > limits.body_items:
        most = limits.body_items
        raise Refusal(413, f"the body has more than {most} items, the most that are taken; send fewer at once")


def may_exceed(body: bytes, limits: ServeLimits) -> bool:
    """Whether a body is long enough to exceed the counts: each key, object, list and item has a byte of its own."""
    return len(body) > min(limits.body_nodes, limits.body_items)


def counted(body: bytes, most_nodes: int, most_items: int) -> BodyCounts:
    """The counts of a body; of one that exceeds either limit, those up to the step that exceeds it.

    An item is counted by the comma before it: the first of each object and list is not. Other threads may run between
    two steps. A body that is no JSON has some counts too; the parser will refuse it.

    >>> counted(b'{"a": ["x, {", 1, 2], "b": {}}', 100, 100)
    BodyCounts(nodes=5, items=3)
    """
    nodes = items = start = 0
    in_string = False
    while start < len(body) and nodes <= most_nodes and items <= most_items:
        step = body[start : start + _STEP_BYTES]
        start += len(step)
        if (len(step) - len(step.rstrip(b"\\"))) % 2:  # the escape of a character that the next step begins with
            step += body[start : start + 1]
            start += 1
        between = step.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = b"".join(between[in_string::2])
        in_string ^= len(between) % 2 == 0
        nodes += outside.count(b"{") + outside.count(b"[") + outside.count(b":")
        items += outside.count(b",")
    return BodyCounts(nodes, items)


# Parsed


def _failing_fast(schema: Any) -> Any:
    """Pydantic's schema of a record with these rules in it. Other records inside it have their own."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_failing_fast, schema))
    if not isinstance(schema, dict):
        return schema
    made = {name: value if name == "metadata" else _failing_fast(value) for name, value in schema.items()}
    match made:
        case {"type": "list"}:
            return {**made, "fail_fast": True}
        case {"type": "dict", "values_schema": {"type": kind}} if kind != "any":
            return core_schema.no_info_before_validator_function(_check_size, made)
    return made


def _check_size(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MOST_LIKE_VALUES:
        raise PydanticCustomError(
            "too_many_keys", f"there are {len(value)} keys; at most {_MOST_LIKE_VALUES} are taken"
        )
    return value


class FailFastModel(BaseModel):
    """A record of a body. Its lists are given up at their first bad item, and its objects of like values are small, so
    that a body with many errors costs no more than one with few."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return _failing_fast(handler(source))


Parse = Callable[[Any, bytes], Any]
InThread = Callable[[Parse, Any, bytes], Coroutine[Any, Any, Any]]


def route_with(parse: Parse, in_thread: InThread) -> type[APIRoute]:
    """A FastAPI route whose body is made by `parse`, of the endpoint's type and the bytes, in a thread unless it is
    small; FastAPI would parse and validate it on the event loop."""

    class BodyRequest(Request):
        """FastAPI validates what `json` returns, which for a record of the endpoint's type is no work."""

        kind: Any = None

        async def json(self) -> Any:
            content = await self.body()
            if len(content) <= _SMALL_BYTES:
                return parse(self.kind, content)
            return await in_thread(parse, self.kind, content)

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            kind = None if self.body_field is None else self.body_field.field_info.annotation

            async def handle_parsed(request: Request) -> Response:
                given = BodyRequest(request.scope, request.receive)
                given.kind = kind
                return await handle(given)

            return handle_parsed

    return BodyRoute


# Not parsed


ForwardRequest = Callable[[Request], Coroutine[Any, Any, Response]]


def forwarding_route(forward: ForwardRequest, paths: Collection[str]) -> type[APIRoute]:
    """A FastAPI route that hands requests with a body to `forward` unparsed, and those for `paths`; others are answered
    by their endpoint."""

    class ForwardingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            if self.body_field is None and self.path not in paths:
                return super().get_route_handler()
            return forward

    return ForwardingRoute
