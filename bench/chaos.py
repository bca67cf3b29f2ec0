"""Is anything lost, leaked or ended twice when everything fails at random?

    python -m bench.chaos [--seconds 2700] [--admissions 1000000] [--seed N] [--part server|loop]

A server whose processes are killed, stopped and paused, whose disk is full and whose clients are slow, vanish, cancel
and send what is hostile (`chaos_server.py`); then random admissions and cancels through the native loop
(`chaos_loop.py`). It ends by itself, with exit code 1 if anything was wrong. The same seed makes the same choices; when
they take effect depends on the machine.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench import chaos_loop, chaos_server
from bench.chaos_held import Held, quarters, told
from bench.note import as_json, command, versions

SECONDS: Final = 2700.0
ADMISSIONS: Final = 1_000_000
PARTS: Final = ("server", "loop")


def _say(title: str, counts: Mapping[str, int]) -> None:
    print(f"  {title}: " + ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items())), flush=True)


def _say_held(samples: Mapping[str, Sequence[Held]]) -> None:
    for name, some in samples.items():
        print(f"  {name} held, by quarters of its life: {told(some)}", flush=True)


def _lives(samples: Mapping[str, Sequence[Held]]) -> dict[str, Any]:
    return {
        name: {"n": len(some), "rss": quarters(some), "first": some[0]._asdict(), "last": some[-1]._asdict()}
        for name, some in samples.items()
        if some
    }


def server(seconds: float, seed: int) -> tuple[dict[str, Any], list[str]]:
    """The server's part: its facts for the note, and what was wrong. Where something was, its files are kept."""
    folder = Path(tempfile.mkdtemp(prefix="ostinato-chaos-"))
    try:
        report = chaos_server.run(seconds, seed, folder)
    except BaseException:
        print(f"stopped before its end; the server's log and models are in {folder}", flush=True)
        raise
    print(f"server: {report.seconds:.0f} s, {sum(report.rounds.values())} rounds, {len(report.wrong)} wrong")
    parts = {
        "rounds": report.rounds,
        "faults": report.faults,
        "honest requests": report.ends,
        "harmful clients": report.harms,
        "log": report.log,
    }
    for title, counts in parts.items():
        _say(title, counts)
    _say_held(report.samples)
    if report.wrong:
        print(f"  the server's log and models are in {folder}")
    else:
        shutil.rmtree(folder)
    facts = {title: dict(counts) for title, counts in parts.items()}
    return {"seconds": round(report.seconds, 1), **facts, "held": _lives(report.samples)}, report.wrong


def loop(n: int, seed: int) -> tuple[dict[str, Any], list[str]]:
    """The loop's part: its facts for the note, and what was wrong."""
    facts: dict[str, Any] = {}
    total: Counter[str] = Counter()
    wrong: list[str] = []
    for kind, share in chaos_loop.shares(n).items():
        report = chaos_loop.run(kind, share, seed)
        print(f"loop, {kind}: {report.seconds:.0f} s, {len(report.wrong)} wrong")
        _say("counts", report.counts)
        _say_held({"the process": report.samples})
        total += report.counts
        wrong += [f"{kind}: {what}" for what in report.wrong]
        held = _lives({"process": report.samples})
        facts[kind] = {"seconds": round(report.seconds, 1), "counts": dict(report.counts), "held": held}
    _say("loop, in all", total)
    return {**facts, "all": dict(total)}, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the server's part")
    parser.add_argument("--admissions", type=int, default=ADMISSIONS, help="through the native loop, at least")
    parser.add_argument("--seed", type=int, help="of an earlier run; without it another one each time")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    given = parser.parse_args()
    if not (0 < given.seconds < float("inf") and given.admissions > 0):
        parser.error("--seconds and --admissions are above 0: a part that does nothing finds nothing")
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended, too
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of connections that the server has closed
    facts: dict[str, Any] = {}
    wrong: list[str] = []
    try:
        for part in given.part or PARTS:
            facts[part], found = server(given.seconds, seed) if part == "server" else loop(given.admissions, seed)
            wrong += found
    except KeyboardInterrupt:
        sys.exit(f"interrupted, and nothing was judged; try it again with --seed {seed}")
    for what in wrong:
        print(f"WRONG {what}")
    question = "is anything lost, leaked or ended twice when everything fails at random?"
    known = versions("ostinato", "torch", "uvicorn")
    print(as_json(question, command("bench.chaos"), known, seed=seed, wrong=len(wrong), **facts))
    if wrong:
        sys.exit(f"{len(wrong)} things were wrong; try it again with --seed {seed}")


if __name__ == "__main__":
    main()
