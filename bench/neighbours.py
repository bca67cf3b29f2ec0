"""How fast does an engine decode beside other busy processes, and does its team find the best number of threads?

    python -m bench.neighbours [--rounds 5] [--seconds 3] [--threads N]

The default model is decoded alone, beside one and two other engines that decode all the time, and beside plain busy
processes, on one core and on all. Every round measures each number of threads, which stays as it is, and the default,
whose team changes the number by itself (`backends/native/src/team_size.h`), one after the other in another order each
time; the default's seconds include its search. The ratio to the best fixed number is taken round by round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from bench.note import Series, as_json, ratio, versions
from ostinato.engine.cores import allowed_processors, default_threads
from ostinato.processes import python_command

FIXED: Final = "-DTEAM_IS_FIXED=1"  # a flag of the compiler: an object whose teams never change
DEFAULT: Final = "default"
BUSY: Final = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(sys.argv[1])})
while True:
    pass
"""
CONTEXT: Final = 512
LEAD_S: Final = 1.0  # neighbours run before the first measurement


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What else the machine does, and what the default must reach of the best fixed number of threads."""

    name: str
    n_engines: int = 0
    n_busy: int = 0
    bar: float = 0.8


def neighbourhoods(n_cores: int) -> tuple[Neighbours, ...]:
    return (
        Neighbours("alone", bar=0.99),
        Neighbours("beside one engine", n_engines=1),
        Neighbours("beside two engines", n_engines=2),
        Neighbours("beside one busy process", n_busy=1),
        Neighbours("beside a busy process on each core", n_busy=n_cores),
    )


class EngineProcess:
    """A process that decodes with a given number of threads for a given time, whenever it is told to."""

    def __init__(self, path: Path, flags: str = "") -> None:
        command = python_command("-m", "bench.neighbours", "--engine", "--model", str(path))
        root = Path(__file__).parents[1]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OSTINATO_CPU_FLAGS": flags, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self, threads: int, seconds: float) -> None:
        assert self._process.stdin is not None
        print(threads, seconds, file=self._process.stdin, flush=True)

    def tok_s(self) -> float:
        """What the last start gave."""
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())


def serve_engine(path: Path) -> None:
    """Read numbers of threads and seconds line by line, and print the tokens per second of each."""
    from ostinato.cli.bare import opened_bare
    from ostinato.engine.driver import GREEDY
    from ostinato.engine.engine import Engine
    from ostinato.lab.bench import Bench
    from ostinato.options import LoadOptions

    sampling = replace(GREEDY, ignore_eos=True)

    def decode(engine: Engine, seconds: float) -> float:
        n, began = 0, time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            request = engine.submit([1_000, 2_000, 3_000], sampling)
            for _ in request:
                n += 1
                if time.perf_counter() - began >= seconds:
                    request.cancel()
        return n / passed

    with opened_bare(str(path), LoadOptions(device="cpu", mode="loop")) as bare, ExitStack() as opened:
        bench = Bench(bare.load(), "f32", 1.0, activations=bare.settled.activations)
        engines: dict[int, Engine] = {}
        for line in sys.stdin:
            threads, seconds = int(line.split()[0]), float(line.split()[1])
            if threads not in engines:
                of_threads = replace(bench, threads=threads)
                engines[threads] = opened.enter_context(of_threads.engine("loop", 1, CONTEXT))
            print(decode(engines[threads], seconds), flush=True)


@contextmanager
def busy_processes(n: int) -> Iterator[None]:
    """Processes that only count, each on a core of its own."""
    cores = sorted(allowed_processors(), reverse=True)[:n]
    running = [subprocess.Popen(python_command("-c", BUSY, str(core))) for core in cores]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def sizes(most: int) -> tuple[int, ...]:
    """The fixed numbers of threads: all of a small machine, and of a large one those that a search would try."""
    return tuple(n for n in range(1, most + 1) if most <= 4 or n & (n - 1) == 0 or n >= most - 1)


def measure(path: Path, rounds: int, seconds: float, threads: int) -> list[Series]:
    found: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        fixed = stack.enter_context(EngineProcess(path, FIXED))
        free = stack.enter_context(EngineProcess(path))
        others = [stack.enter_context(EngineProcess(path)) for _ in range(2)]
        variants = [(f"{n} threads", fixed, n) for n in sizes(threads)] + [(DEFAULT, free, threads)]
        for process, n in [(process, n) for _, process, n in variants] + [(other, threads) for other in others]:
            process.start(n, 0.5)  # opened, and its prompt in memory
            process.tok_s()
        for number in range(rounds):
            turn = number % len(variants)
            for around in neighbourhoods(len(allowed_processors())):
                print(f"round {number + 1} of {rounds}: {around.name}", file=sys.stderr)
                beside = others[: around.n_engines]
                with busy_processes(around.n_busy):
                    for other in beside:
                        other.start(threads, LEAD_S + len(variants) * (seconds + 0.5))
                    time.sleep(LEAD_S)
                    for name, process, n in variants[turn:] + variants[:turn]:
                        process.start(n, seconds)
                        found.setdefault((name, around.name), []).append(process.tok_s())
                    for other in beside:
                        other.tok_s()
    return [Series(name, task, "tok/s", tuple(runs)) for (name, task), runs in found.items()]


def best_fixed(series: Sequence[Series], task: str) -> Series:
    return max((s for s in series if s.task == task and s.engine != DEFAULT), key=lambda s: s.median)


def show(series: Sequence[Series], around: Sequence[Neighbours]) -> Mapping[str, float]:
    """Print a table, and return the median ratios of the default to the best fixed number."""
    by = {(s.engine, s.task): s for s in series}
    names = sorted({s.engine for s in series}, key=lambda name: (name == DEFAULT, len(name), name))
    print(f"{'medians, tok/s':38}" + "".join(f"{name:>12}" for name in names) + f"{'wanted':>10}{'reached':>10}")
    reached: dict[str, float] = {}
    for one in around:
        middle, least, most = ratio(by[DEFAULT, one.name], best_fixed(series, one.name))
        reached[one.name] = round(middle, 3)
        cells = "".join(f"{by[name, one.name].median:12.1f}" for name in names)
        missed = "" if middle >= one.bar else "   MISSED"
        print(f"{one.name:38}{cells}{one.bar:>10.2f}{middle:10.2f}   {least:.2f} - {most:.2f}{missed}")
    return reached


def main() -> None:
    from ostinato.files import store

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--model", type=Path)
    parser.add_argument("--engine", action="store_true", help="decode as the lines of the standard input say")
    asked = parser.parse_args()
    path = asked.model or store.resolve("smollm2", talk=lambda said: print(said, file=sys.stderr))
    if asked.engine:
        return serve_engine(path)
    series = measure(path, asked.rounds, asked.seconds, asked.threads)
    reached = show(series, neighbourhoods(len(allowed_processors())))
    question = "how fast does an engine decode beside other busy processes?"
    command = (
        f"python -m bench.neighbours --rounds {asked.rounds} --seconds {asked.seconds:g} --threads {asked.threads}"
    )
    print(as_json(question, command, versions("torch"), model=path.name, reached=reached, series=series))


if __name__ == "__main__":
    main()
