"""The deadline of each message that is sent to a client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import closing
from typing import Any

import pytest
from starlette.types import Message

from ostinato.serve.stream import TimedSend


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def reading(message: Message) -> None:
    """A client that takes a message after so many seconds."""
    await asyncio.sleep(message["after_s"])


def test_a_message_that_the_client_does_not_take_in_time_is_a_timeout_however_many_were_taken_before() -> None:
    async def work() -> None:
        with closing(TimedSend(reading, 0.2)) as send:
            for _ in range(6):
                await send({"after_s": 0.05})
            with pytest.raises(TimeoutError):
                await send({"after_s": 60.0})
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()
            await send({"after_s": 0.0})

    run(work())


def test_time_between_two_messages_does_not_count() -> None:
    async def work() -> None:
        with closing(TimedSend(reading, 0.1)) as send:
            await send({"after_s": 0.0})
            await asyncio.sleep(0.3)
            await send({"after_s": 0.05})

    run(work())


def test_who_is_cancelled_while_sending_is_cancelled_and_not_late() -> None:
    async def work() -> None:
        with closing(TimedSend(reading, 30.0)) as send:
            sending = asyncio.ensure_future(send({"after_s": 60.0}))
            await asyncio.sleep(0.01)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending

    run(work())


def test_without_seconds_there_is_no_deadline() -> None:
    async def work() -> None:
        with closing(TimedSend(reading, None)) as send:
            await send({"after_s": 0.1})

    run(work())
