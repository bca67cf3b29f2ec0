"""What does a token cost the server's processes in each API, and what does one version cost beside another?

    python -m bench.served [NAME=TREE ...] [--rounds 9] [--streams 8] [--tokens 500] [--model MODEL] [--only PATH]

Each tree (this one by default) serves the same model, all servers run at once, and one is asked at a time: the same
streams from each, API by API, round by round. Processor time is that of the front, and of the worker and the
supervisor (`/proc`), divided by the tokens: other programs on the machine change it little. Tokens per second are
what the client counted, and depend on what else runs. Without a model it is a tiny random one in `eager`, which makes
few hundred steps a second: as with a real model, a step gives each stream one token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.note import Series, as_json, command, commit, ratio, versions
from ostinato.serve.load import Server
from tests.cli import tiny_model

HELLO: Final = [{"role": "user", "content": "hello"}]
_HOST_US: Final = re.compile(rb'"host_us_per_token":([\d.]+)')


def bodies(n_tokens: int) -> dict[str, dict[str, Any]]:
    """The same stream in each API."""
    same = {"temperature": 0, "ignore_eos": True}
    chat = {"messages": HELLO, "stream": True, **same}
    return {
        "/v1/chat/completions": {**chat, "max_tokens": n_tokens},
        "/v1/responses": {"input": HELLO, "stream": True, "max_output_tokens": n_tokens, "store": False, **same},
        "/v1/messages": {**chat, "max_tokens": n_tokens},
        "/api/chat": {"messages": HELLO, "options": {"num_predict": n_tokens, **same}},
    }


@dataclass(slots=True)
class Served:
    """The server of one tree."""

    name: str
    tree: Path
    process: subprocess.Popen[str]
    url: str = ""
    found: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)  # by path, task and unit

    @classmethod
    def start(cls, name: str, tree: Path, model: Sequence[str], n_streams: int) -> Served:
        words = ("serve", *model, "--port", "0", "--device", "cpu", "--slots", str(n_streams), "--context", "1024")
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ostinato", *words],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tree.resolve() / "src")},
        )
        made = cls(name, tree, process)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("listening at "):
                made.url = line.split()[2].rstrip(";")
            if line.startswith("ready: "):
                break
        else:
            raise SystemExit(f"{name} did not start")
        # Its log is not used from here on, and the pipe must not fill.
        subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        return made

    def cpu_s(self) -> dict[str, float]:
        """The processor time so far of its processes: the front, where there is one, and the rest."""
        pids = [self.process.pid]
        seconds: dict[str, float] = {}
        while pids:
            pid = pids.pop()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            is_front = b"ostinato.serve.front" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ticks = int(fields[11]) + int(fields[12])
            part = "front" if is_front else "worker"
            seconds[part] = seconds.get(part, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return seconds

    async def measure(self, path: str, body: dict[str, Any], n_streams: int, n_tokens: int) -> None:
        server, before, began = Server.at(self.url), self.cpu_s(), time.perf_counter()
        host_us = await asyncio.gather(*(_read(server, path, body) for _ in range(n_streams)))
        seconds, after = time.perf_counter() - began, self.cpu_s()
        n = n_streams * n_tokens
        for part in after:
            self._add(path, f"processor time of the {part}", "us/token", (after[part] - before[part]) / n * 1e6)
        self._add(path, "host", "us/token", statistics.median(host_us))
        self._add(path, "throughput", "tok/s", n / seconds)

    def _add(self, path: str, task: str, unit: str, value: float) -> None:
        self.found.setdefault((path, task, unit), []).append(value)

    def series(self) -> list[Series]:
        return [
            Series(self.name, f"{path} {task}", unit, tuple(runs)) for (path, task, unit), runs in self.found.items()
        ]


async def _read(server: Server, path: str, body: dict[str, Any]) -> float:
    """Read a stream to its end; the server's own work for a token, as the server says."""
    last = 0.0
    async with aclosing(server.post(path, body, None)) as lines:
        async for line in lines:
            if found := _HOST_US.search(line):
                last = float(found[1])
    return last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="NAME=TREE", default=["here=."])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--model")
    parser.add_argument("--only", metavar="PATH", help="one API")
    given = parser.parse_args()
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        tiny = tiny_model.write(folder / "tiny.gguf", context=4096)
        model = (str(tiny), "--mode", "eager", "--threads", "1") if given.model is None else (given.model,)
        asked = {path: body for path, body in bodies(given.tokens).items() if given.only in (None, path)}
        servers = []
        for tree in given.trees:
            name, _, path = tree.partition("=")
            server = Served.start(name, Path(path), model, given.streams)
            opened.callback(server.process.wait)
            opened.callback(server.process.terminate)
            servers.append(server)
        for number in range(given.rounds + 1):
            for path, body in asked.items():
                for server in servers if number % 2 else reversed(servers):
                    asyncio.run(server.measure(path, body, given.streams, given.tokens))
            if number == 0:  # to warm up
                for server in servers:
                    server.found.clear()
    series = [one for server in servers for one in server.series()]
    for one in series:
        print(
            f"{one.engine:10} {one.task:40} {one.median:9.1f} {one.unit} ({min(one.runs):.1f} to {max(one.runs):.1f})"
        )
    first = {one.task: one for one in series if one.engine == servers[0].name}
    for one in series:
        if one.engine != servers[0].name and one.task in first:
            middle, least, most = ratio(one, first[one.task])
            print(f"{one.engine}/{servers[0].name} {one.task:40} {middle:.3f} ({least:.3f} to {most:.3f})")
    commits = {server.name: commit(server.tree) for server in servers}
    facts = versions("uvloop", "uvicorn", "httptools")
    question = "what does a token cost the server's processes?"
    print(as_json(question, command("bench.served"), facts, series=series, commits=commits))


if __name__ == "__main__":
    main()
