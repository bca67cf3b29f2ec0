"""A file of requests through Ray Data: actors that each hold one engine answer blocks of lines, and one process writes.

The results come back to the process that reads the input, and only that one writes: a block that Ray computes twice,
because an actor died, is written once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

from ostinato.errors import HardwareCannot, OstinatoError
from ostinato.extras import check_extra
from ostinato.files.store import resolve
from ostinato.llm import LLM
from ostinato.options import Talk
from ostinato.scale.batch import OnProgress, Tally, asked, at_once
from ostinato.scale.batch_file import BatchRequest, InvalidLine, Requests, Results, result_of, result_of_invalid
from ostinato.scale.cluster import START_S, error_elsewhere, free_nodes, joined, placed, with_whole_path
from ostinato.scale.local import LocalServer
from ostinato.serve.settings import ServeOptions


def run_on_ray(
    options: ServeOptions,
    requests: Requests,
    results: Results,
    *,
    replicas: int,
    address: str | None,
    on_progress: OnProgress,
    talk: Talk = lambda _: None,
) -> Tally:
    """Answer every line that has no result yet, on so many engines."""
    check_extra("scale", "a batch on several machines")
    if address is None:
        resolve(options.model, talk=talk)  # before anything starts: refuse an unknown name, or download
    tally = Tally(len(requests.lines), results.n_before)
    on_progress(tally)
    lines: list[BatchRequest] = []
    for one in requests.read(set(results.done)):
        if isinstance(one, InvalidLine):
            results.write(one.line.number, result_of_invalid(one))
            tally.invalid += 1
        else:
            lines.append(one)
    if not lines:
        return tally
    options = with_whole_path(options)
    with joined(address, quiet=True) as ray:
        scaling = placed(free_nodes(ray), options, replicas)
        by_number = {one.line.number: one for one in lines}
        try:
            for row in _answered(lines, options, replicas, scaling.cpus, scaling.gpus):
                one = by_number[row["number"]]
                if results.write(one.line.number, result_of(one, row["status"], row["answer"])):
                    tally.count(row["status"], row["answer"])
                on_progress(tally)
        except ray.exceptions.RayError as error:
            raise _ours(error) from error
    return tally


def _answered(
    lines: list[BatchRequest], options: ServeOptions, replicas: int, cpus: float, gpus: float
) -> Iterator[dict[str, Any]]:
    """Rows with a line's number, its status and its answer, in order of completion."""
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # we report an error once ourselves
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    context.wait_for_min_actors_s = int(START_S)  # else it waits without end for resources
    size = 2 * at_once(options)
    rows = [{"number": one.line.number, "url": one.url, "body": one.body} for one in lines]
    blocks = max(replicas, -(-len(rows) // size))
    dataset = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
        Answering,
        fn_constructor_args=(options.to_json(),),
        compute=ray.data.ActorPoolStrategy(size=replicas),
        batch_size=None,
        num_cpus=cpus,
        num_gpus=gpus or None,
    )
    for row in dataset.iter_rows():
        yield {"number": int(row["number"]), "status": int(row["status"]), "answer": bytes(row["answer"])}


class Answering:
    """One actor: the server's application over one model, which answers a block of lines at a time."""

    def __init__(self, options: str) -> None:
        given = ServeOptions.from_json(options)
        self._at_once = at_once(given)
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(self._opened(given))

    async def _opened(self, options: ServeOptions) -> LocalServer:
        server = LocalServer(options, write=lambda _: None)
        server.service.open(LLM(options.model, load=options.load))
        return server

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        lines = list(zip(block["number"], block["url"], block["body"], strict=True))
        answers = self._loop.run_until_complete(self._all(lines))
        return {
            "number": [int(number) for number, _, _ in lines],
            "status": [status for status, _ in answers],
            "answer": [answer for _, answer in answers],
        }

    async def _all(self, lines: list[tuple[Any, Any, Any]]) -> list[tuple[int, bytes]]:
        turn = asyncio.Semaphore(self._at_once)

        async def one(number: Any, url: Any, body: Any) -> tuple[int, bytes]:
            async with turn:
                return await asked(self._server.ask, int(number), str(url), bytes(body))

        return await asyncio.gather(*(one(*line) for line in lines))


def _ours(error: Exception) -> OstinatoError:
    """The error of an actor; one of our classes if it raised one."""
    if isinstance(error, TimeoutError):
        return HardwareCannot(f"no engine was ready within {START_S:.0f} s; does the cluster have room for them?")
    return error_elsewhere(str(error))
