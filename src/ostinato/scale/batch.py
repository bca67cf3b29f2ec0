"""Answers a file of requests in this process: as many at once as the engine takes; results are written as they arrive.

Every line is answered exactly once, also when the run is killed and restarted (`batch_file.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ostinato.errors import EngineDead
from ostinato.scale.batch_file import BatchRequest, InvalidLine, Requests, Results, result_of, result_of_invalid
from ostinato.scale.local import LoadLLM, LocalServer
from ostinato.serve.settings import ServeOptions


@dataclass(slots=True)
class Tally:
    """What a run has done so far."""

    lines: int  # of the input
    already_done: int  # by earlier runs
    answered: int = 0  # with status 200
    refused: int = 0  # with another
    invalid: int = 0
    prompt_tokens: int = 0
    tokens: int = 0

    @property
    def done(self) -> int:
        return self.already_done + self.answered + self.refused + self.invalid

    def count(self, status: int, answer: bytes) -> None:
        """Count one more answer."""
        if status != 200:
            self.refused += 1
            return
        self.answered += 1
        usage: dict[str, Any] = json.loads(answer).get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens", 0)
        self.tokens += usage.get("completion_tokens", 0)


OnProgress = Callable[[Tally], None]
Ask = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]  # a path and a body; the status and the answer's JSON


async def answer_all(
    requests: Requests, results: Results, ask: Ask, *, at_once: int, on_progress: OnProgress = lambda _: None
) -> Tally:
    """Answer every line that has no result yet."""
    tally = Tally(len(requests.lines), results.n_before)
    on_progress(tally)
    left = requests.read(set(results.done))
    with closing(left):
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(_answer(left, results, ask, tally, on_progress))
        except ExceptionGroup as several:
            # The others were cancelled because of the first, or failed for the same reason.
            raise several.exceptions[0] from None
    return tally


async def _answer(
    left: Iterator[BatchRequest | InvalidLine], results: Results, ask: Ask, tally: Tally, on_progress: OnProgress
) -> None:
    """One of the concurrent clients: it takes the next line until none is left."""
    for one in left:
        if isinstance(one, InvalidLine):
            results.write(one.line.number, result_of_invalid(one))
            tally.invalid += 1
        else:
            status, answer = await asked(ask, one.line.number, one.url, one.body)
            results.write(one.line.number, result_of(one, status, answer))
            tally.count(status, answer)
        on_progress(tally)


async def asked(ask: Ask, number: int, url: str, body: bytes) -> tuple[int, bytes]:
    """The answer to one line. If the engine cannot answer now, the run ends, and can be restarted."""
    while True:
        status, answer = await ask(url, body)
        if status == 503:
            raise EngineDead(f"line {number} was not answered: {_message(answer)}; the same command goes on")
        if status != 429:
            return status, answer
        await asyncio.sleep(0.1)


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason was given"


async def run_here(
    options: ServeOptions,
    load: LoadLLM,
    requests: Requests,
    results: Results,
    *,
    on_progress: OnProgress = lambda _: None,
) -> Tally:
    """Load the model into this process and answer the file."""
    server = LocalServer(options, write=lambda _: None)
    loop = asyncio.get_running_loop()
    try:
        server.service.open(await loop.run_in_executor(None, load))
        return await answer_all(requests, results, server.ask, at_once=at_once(options), on_progress=on_progress)
    finally:
        await loop.run_in_executor(None, server.service.close)


def at_once(options: ServeOptions) -> int:
    """How many lines are in flight: all slots, and some prompts in the queue."""
    return options.load.slots + min(options.load.slots, options.load.queue)
