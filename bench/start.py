"""How soon does a model answer after its program is started, and how much memory does that take, beside llama.cpp?

    python -m bench.start [--rounds 10] [--requests 1000] [--threads N]

Every round starts `ostinato run` and llama.cpp's `llama-completion` on the same file, one after the other, with the
same prompt: the time to the first character, and the peak of the memory of all processes together. Memory is the
proportional set size (PSS), which counts a page that two processes share once. Then `--help`, and a server: the time
until it is ready, and its peak after so many requests, each of another prompt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Final

from bench import llama_cpp
from bench.note import Series, as_json, command, ratio, versions
from ostinato.processes import python_command

PROMPT: Final = "Name three colours."
NEW_TOKENS: Final = 16
CALLERS: Final = 4
MB: Final = 1e6
DEADLINE_S: Final = 600.0
_LOOK_S: Final = 0.02


# Memory


def family(pid: int) -> Iterator[int]:
    """A process and all that it started."""
    yield pid
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for one in child.read_text().split():
                yield from family(int(one))
        except OSError:
            continue  # it has ended


def pss_bytes(pid: int) -> int:
    """The memory of a process and all that it started, shared pages counted once."""
    total = 0
    for one in family(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total


class Peak:
    """The largest sum that was seen while a process ran."""

    def __init__(self, pid: int, look_s: float = _LOOK_S) -> None:
        self.n_bytes, self._pid, self._look_s, self._over = 0, pid, look_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(self._look_s):
            self.n_bytes = max(self.n_bytes, pss_bytes(self._pid))

    def close(self) -> None:
        self._over.set()
        self._thread.join()


# Programs


def started(command: Sequence[str]) -> dict[str, float]:
    """Run a program to its end: the seconds to its first character, and its peak of memory."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as ran:
        peak = Peak(ran.pid)
        assert ran.stdout is not None
        first = ran.stdout.read(1)
        first_s = time.perf_counter() - began
        ran.stdout.read()
        peak.close()
    if not first or ran.returncode:
        sys.exit(f"{command[0]} ended with {ran.returncode} and {'an' if first else 'no'} answer")
    return {"first_character_s": first_s, "peak_mb": peak.n_bytes / MB}


def help_seconds() -> float:
    began = time.perf_counter()
    subprocess.run(python_command("-m", "ostinato", "--help"), check=True, capture_output=True)
    return time.perf_counter() - began


@contextmanager
def server(model: Path, threads: int) -> Iterator[tuple[str, int, float]]:
    """A server that is ready: its address, its process and the seconds that it took."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ("serve", "--model", str(model), "--port", port, "--threads", str(threads))
    began = time.perf_counter()
    quiet = subprocess.DEVNULL
    with subprocess.Popen(python_command("-m", "ostinato", *words), stdout=quiet, stderr=quiet) as ran:
        try:
            address = f"http://127.0.0.1:{port}"
            while not _is_ready(address):
                if ran.poll() is not None or time.perf_counter() - began > DEADLINE_S:
                    sys.exit("the server did not start")
                time.sleep(0.005)
            yield address, ran.pid, time.perf_counter() - began
        finally:
            ran.terminate()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def ask(address: str, number: int) -> None:
    """One short request with a prompt that no other has."""
    text = f"Write the number {number} in words."
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": NEW_TOKENS}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        answer.read()


def after_requests(address: str, pid: int, n: int) -> float:
    """The peak in MB while so many requests were answered."""
    peak = Peak(pid, 10 * _LOOK_S)
    with ThreadPoolExecutor(CALLERS) as callers:
        list(callers.map(lambda number: ask(address, number), range(n)))
    peak.close()
    return peak.n_bytes / MB


# All of it


def measure(model: Path, rounds: int, threads: int, n_requests: int) -> list[Series]:
    theirs = str(llama_cpp.built() / "llama-completion")
    alike = ("--no-display-prompt", "-no-cnv", "--temp", "0", "-t", str(threads), "-n", str(NEW_TOKENS))
    ours = ("-m", "ostinato", "run", "--model", str(model), "--threads", str(threads), "--max-tokens", str(NEW_TOKENS))
    commands = {
        "ostinato": python_command(*ours, PROMPT),
        "llama.cpp": [theirs, "-m", str(model), *alike, "-p", PROMPT],
    }
    found: dict[tuple[str, str], list[float]] = {}

    def add(engine: str, figures: dict[str, float]) -> None:
        for task, value in figures.items():
            found.setdefault((engine, task), []).append(value)

    for words in commands.values():
        started(words)  # the file and the programs are in the system's cache from here on
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for engine, words in commands.items():
            add(engine, started(words))
        add("ostinato", {"help_s": help_seconds()})
        with server(model, threads) as (address, pid, ready_s):
            figures = {"serve_ready_s": ready_s}
            if number == 0 and n_requests:
                add("ostinato", {"serve_peak_mb": after_requests(address, pid, n_requests)})
        add("ostinato", figures)
    return [Series(*key, key[1].rsplit("_", 1)[1], tuple(runs)) for key, runs in found.items()]


BARS: Final = {"first_character_s": 1.0, "peak_mb": 250.0, "help_s": 0.2, "serve_ready_s": 1.5, "serve_peak_mb": 300.0}


def show(series: Sequence[Series]) -> None:
    print(f"{'':12}{'figure':20}{'wanted':>10}{'median':>10}   least - largest")
    for one in series:
        bar = BARS[one.task] if one.engine == "ostinato" else None
        wanted = "" if bar is None else f"< {bar:g}"
        missed = "" if bar is None or one.median < bar else "   MISSED"
        runs = f"{min(one.runs):.2f} - {max(one.runs):.2f}"
        print(f"{one.engine:12}{one.task:20}{wanted:>10}{one.median:10.2f}   {runs}{missed}")
    by = {(one.engine, one.task): one for one in series}
    for task in ("first_character_s", "peak_mb"):
        middle, least, most = ratio(by["ostinato", task], by["llama.cpp", task])
        print(f"{task}, ours over llama.cpp's: {middle:.2f} ({least:.2f} - {most:.2f})")


def main() -> None:
    from ostinato.engine.cores import default_threads
    from ostinato.files import store

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=1000, help="of the server; 0 leaves them out")
    parser.add_argument("--threads", type=int, default=default_threads())
    asked = parser.parse_args()
    model = store.resolve(store.DEFAULT, talk=lambda text: print(text, file=sys.stderr))
    series = measure(model, asked.rounds, asked.threads, asked.requests)
    show(series)
    question = "how soon does it answer after it is started, and with how much memory?"
    found = {**versions("numpy", "tokenizers"), "llama.cpp": f"xllamacpp {llama_cpp.VERSION}"}
    print(as_json(question, command("bench.start"), found, threads=asked.threads, model=model.name, series=series))


if __name__ == "__main__":
    main()
