"""Responses that the front keeps for its workers: what it holds for a request, and an answer that is none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ostinato.serve.errors import Refusal
from ostinato.serve.front_status import _page
from ostinato.serve.response_keeper import FrontKeeper, KeptResponses
from ostinato.serve.response_store import KeptResponse, ResponseStore
from ostinato.serve.responses_body import MessageItem
from ostinato.serve.served_models import ServedModel


def test_a_response_is_held_for_a_request_until_it_ends_and_not_for_one_that_has_ended() -> None:
    store = ResponseStore(9, 900, 50.0)
    store.add(KeptResponse({"id": "resp_1"}, [MessageItem(role="user", content="hello")], [], None, 10))
    kept = KeptResponses(store)
    words = {"id": "resp_1", "request": "a"}
    kept.expect("a")
    found = asyncio.run(kept._find(words))
    assert b"hello" in found
    assert [None if one is None else one.id for one in kept._continued.values()] == ["resp_1"]
    kept.forget("a")
    assert asyncio.run(kept._find(words)) == found  # its client has left, and its worker does not know yet
    assert kept._continued == {}


async def _answer_with_500(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\n\r\nnull")
    await writer.drain()
    writer.close()


def test_an_error_of_another_process_is_no_answer(tmp_path: Path) -> None:
    async def work() -> None:
        path = str(tmp_path / "s")
        async with await asyncio.start_unix_server(_answer_with_500, path):
            with pytest.raises(Refusal, match="could not be read or written") as caught:
                await FrontKeeper(path).continued("a", "resp_1")
            assert caught.value.status == 503
            assert await _page(ServedModel(0, ("a",), path), "/health") is None

    asyncio.run(work())
