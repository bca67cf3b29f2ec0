"""Where responses are kept, as `/v1/responses` sees it: in this process, or in the front, which outlives every engine.

A response that is continued stays in memory until the request that continues it has ended.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import msgspec
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ostinato.serve.errors import Refusal
from ostinato.serve.response_store import KeptResponse, ResponseStore
from ostinato.serve.responses_body import Item
from ostinato.serve.upstream import UpstreamGone, asked

_ITEM: Final[TypeAdapter[Item]] = TypeAdapter(Item)
_ITEMS: Final[TypeAdapter[list[Item]]] = TypeAdapter(list[Item])
T = TypeVar("T")
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Continued:
    """The conversation that a request continues. `kept`: where this process keeps it, its last response."""

    items: Sequence[Item]
    kept: KeptResponse | None = None


class ResponseKeeper(Protocol):
    """Keeps responses for later requests. `request`: the id of the one that asks."""

    async def continued(self, request: str, id: str) -> Continued | None:
        """The conversation up to a kept response; None if there is none of this id."""

    async def item(self, id: str) -> Item | None:
        """An item of a kept response."""

    async def keep(
        self, request: str, response: dict[str, Any], input: Sequence[Item], continued: Continued | None
    ) -> bool:
        """Keep a response; False if it is too large."""


class LocalKeeper:
    """Keeps responses in this process."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def continued(self, request: str, id: str) -> Continued | None:
        found = self._store.get(id)
        return None if found is None else Continued(found.conversation(), found)

    async def item(self, id: str) -> Item | None:
        return self._store.item(id)

    async def keep(
        self, request: str, response: dict[str, Any], input: Sequence[Item], continued: Continued | None
    ) -> bool:
        return self._store.add(kept_response(response, input, None if continued is None else continued.kept))


def kept_response(response: dict[str, Any], input: Sequence[Item], previous: KeptResponse | None) -> KeptResponse:
    """A response as it is kept."""
    n_bytes = sum(len(_encode(item.model_dump())) for item in input) + len(_encode(response))
    output = [_ITEM.validate_python(item) for item in response["output"]]
    return KeptResponse(response, input, output, previous, n_bytes)


# From a worker to the front


class FrontKeeper:
    """Keeps responses in the front. `path`: of its socket."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def continued(self, request: str, id: str) -> Continued | None:
        found = await self._ask("continued", request=request, id=id)
        return None if found is None else Continued(_ITEMS.validate_python(found))

    async def item(self, id: str) -> Item | None:
        found = await self._ask("item", id=id)
        return None if found is None else _ITEM.validate_python(found)

    async def keep(
        self, request: str, response: dict[str, Any], input: Sequence[Item], continued: Continued | None
    ) -> bool:
        items = [item.model_dump(exclude_none=True) for item in input]
        return bool(await self._ask("keep", request=request, response=response, input=items))

    async def _ask(self, what: str, **words: Any) -> Any:
        try:
            async with asked(self._path, "POST", f"/{what}".encode(), body=_encode(words)) as answer:
                body = await answer.body()
        except UpstreamGone as error:
            raise Refusal(503, "the responses that were kept are lost; ask again without them") from error
        if answer.status != 200:
            raise Refusal(503, "the responses that are kept could not be read or written; ask again")
        return msgspec.json.decode(body)


class KeptResponses:
    """The application, for workers alone, by which the front keeps their responses."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        # By the request that continues it, of those that have not ended: a worker may ask for one that has.
        self._continued: dict[str, KeptResponse | None] = {}

    def expect(self, request: str) -> None:
        """A request begins."""
        self._continued[request] = None

    def forget(self, request: str) -> None:
        """A request has ended."""
        self._continued.pop(request, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        words = msgspec.json.decode(await Request(scope, receive).body())
        made = await {"/continued": self._find, "/item": self._item, "/keep": self._keep}[scope["path"]](words)
        await Response(made, media_type="application/json")(scope, receive, send)

    async def _find(self, words: dict[str, Any]) -> bytes:
        found = self._store.get(words["id"])
        if found is None:
            return b"null"
        if words["request"] in self._continued:
            self._continued[words["request"]] = found
        return await _in_thread(lambda: _encode([item.model_dump(exclude_none=True) for item in found.conversation()]))

    async def _item(self, words: dict[str, Any]) -> bytes:
        found = self._store.item(words["id"])
        return b"null" if found is None else _encode(found.model_dump(exclude_none=True))

    async def _keep(self, words: dict[str, Any]) -> bytes:
        previous = self._continued.get(words["request"])
        kept = await _in_thread(
            lambda: kept_response(words["response"], _ITEMS.validate_python(words["input"]), previous)
        )
        return json.dumps(self._store.add(kept)).encode()


async def _in_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work)
