"""What the way to a replica costs: the same load on the single server and on one replica behind Ray Serve.

Start both first, with the same tiny model, so that the engine's own time is small and the way's is seen:

    ostinato serve tiny.gguf --port 8001 &
    ostinato serve tiny.gguf --port 8002 --replicas 1 &
    python -m bench.route http://127.0.0.1:8001 http://127.0.0.1:8002

Time to the first token and between tokens as a client sees them, and the CPU time that Serve's proxy, our ingress and
the replica spend on a request and on a token. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any, Final

from bench.note import as_json, command, versions
from ostinato.serve.load import Lengths, Load, LoadReport, report, run

_PROCESSES: Final = {"proxy": "ray::ProxyActor", "ingress": "ostinato:Ingress", "replica": "ostinato:Engine"}
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> dict[str, float]:
    """Of every kind of Ray process that is on the way, so far."""
    found = dict.fromkeys(_PROCESSES, 0.0)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        for kind, words in _PROCESSES.items():
            if words in command:
                found[kind] += (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def measured(url: str, clients: int, n: int, tokens: int) -> tuple[LoadReport, dict[str, float]]:
    """A load, and the CPU seconds it took."""
    size = Lengths(tokens, tokens)
    load = Load(url, kind="completions", n_requests=n, clients=clients, prompt=Lengths(16, 16), answer=size)
    before = cpu_seconds()
    found = report(asyncio.run(run(load)))
    after = cpu_seconds()
    assert not found.errors, found.errors
    return found, {kind: after[kind] - before[kind] for kind in after}


def row(found: LoadReport, cpu: dict[str, float]) -> dict[str, Any]:
    assert found.first_token_s is not None
    gap = found.gap_s
    return {
        "first_token_ms": {"p50": found.first_token_s.p50 * 1e3, "p99": found.first_token_s.p99 * 1e3},
        "gap_us": None if gap is None else {"mean": gap.mean * 1e6, "p50": gap.p50 * 1e6, "p99": gap.p99 * 1e6},
        "requests_s": found.requests_s,
        "tokens_s": found.tokens_s,
        "cpu_s": cpu,
        "answered": found.answered,
        "tokens": found.tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("single")
    parser.add_argument("replicas")
    given = parser.parse_args()
    told: dict[str, Any] = {}
    for name, url in (("single", given.single), ("replicas", given.replicas)):
        measured(url, 2, 10, 8)  # to warm up
        for clients, n, tokens in ((1, 100, 1), (1, 20, 100), (8, 60, 100)):
            told[f"{name}, {clients} clients, {tokens} tokens"] = row(*measured(url, clients, n, tokens))
    for what, figures in told.items():
        print(f"{what}: {figures}")
    one, way = told["replicas, 1 clients, 1 tokens"], told["replicas, 8 clients, 100 tokens"]
    per_request = {kind: seconds / one["answered"] * 1e6 for kind, seconds in one["cpu_s"].items()}
    per_token = {
        kind: (seconds - per_request[kind] * 1e-6 * way["answered"]) / way["tokens"] * 1e6
        for kind, seconds in way["cpu_s"].items()
    }
    question = "what does a route over Ray cost beside the single server?"
    facts: dict[str, Any] = {"told": told, "cpu_us_per_request": per_request, "cpu_us_per_token": per_token}
    print(as_json(question, command("bench.route"), versions("torch", "ray"), **facts))


if __name__ == "__main__":
    main()
