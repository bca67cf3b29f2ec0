"""The application without a socket: what it sends, gathered or not, and that leaving cancels."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ostinato import LLM
from ostinato.options import LoadOptions
from ostinato.scale.local import Call, LocalServer
from ostinato.serve.settings import ServeOptions

BODY = {"prompt": "hello", "max_tokens": 60, "seed": 1, "stream": True, "ignore_eos": True}
LOADING: Any = {"device": "cpu", "context": 1024, "slots": 2, "mode": "eager"}  # slow enough to be left half way


def with_server(tiny: Path, work: Callable[[LocalServer], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        options = ServeOptions(str(tiny), load=LoadOptions(**LOADING), keys=("a-secret-key",))
        log: list[Any] = []
        server = LocalServer(options, write=log.append)
        try:
            server.service.open(LLM(tiny, **LOADING))
            return await work(server)
        finally:
            server.service.close()

    return asyncio.run(main())


def post(**more: Any) -> Call:
    return Call("POST", "/v1/completions", json.dumps({**BODY, **more}).encode(), id="given")


async def parts_of(server: LocalServer, call: Call, gather_s: float) -> list[bytes]:
    return [message.get("body", b"") async for message in server.messages(call, gather_s)][1:]


def events(parts: list[bytes]) -> list[Any]:
    on_progress = [one.removeprefix("data: ") for one in b"".join(parts).decode().split("\n\n") if one]
    assert on_progress[-1] == "[DONE]"
    return [json.loads(one) for one in on_progress[:-1]]


def test_gathered_parts_are_the_same_events_in_fewer_parts(tiny: Path) -> None:
    async def work(server: LocalServer) -> tuple[list[bytes], list[bytes]]:
        return await parts_of(server, post(), 0.0), await parts_of(server, post(), 0.2)

    one, other = with_server(tiny, work)
    assert [each["choices"] for each in events(one)] == [each["choices"] for each in events(other)]
    assert events(one)[-1]["digest"] == events(other)[-1]["digest"]
    assert len(other) < len(one)
    assert {each["id"] for each in events(other)} == {"cmpl-given"}  # the id that it was given elsewhere


def test_a_request_whose_reader_stops_is_cancelled(tiny: Path) -> None:
    async def work(server: LocalServer) -> tuple[int, int]:
        async with aclosing(server.messages(post(max_tokens=900))) as messages:
            async for message in messages:
                if message.get("body"):
                    break
        running = server.service.n_running

        def live() -> int:
            stats = server.service.stats()
            assert stats is not None
            return stats.live

        for _ in range(100):
            if not live():
                break
            await asyncio.sleep(0.02)
        return running, live()

    assert with_server(tiny, work) == (0, 0)


def test_a_request_from_inside_needs_no_key(tiny: Path) -> None:
    status, answer = with_server(
        tiny, lambda server: server.ask("/v1/completions", b'{"prompt": "a", "max_tokens": 2}')
    )
    assert status == 200
    assert json.loads(answer)["model"] == "tiny"
