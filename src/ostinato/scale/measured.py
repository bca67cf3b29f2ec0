"""The measured speed of one replica, from the JSON lines of `ostinato bench decode` and `ostinato bench serve`.

A replica is three figures: prompt tokens per second, and the time of a decode step as a line over the number of live
requests, `base + each * live`. Nothing is extrapolated beyond the largest number that was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.errors import BadInput


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine's speed, as measured. `most_live`: the largest number of live requests that was."""

    prompt_tok_s: float
    base_s: float
    each_s: float
    most_live: int
    source: str

    def step_s(self, live: float) -> float:
        """Seconds of one decode step."""
        return self.base_s + self.each_s * live


def read_measured(path: Path, prompt: int, output: int) -> Replica:
    """The replica that a file describes, for requests of about that size."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--measured {path}: {getattr(error, 'strerror', None) or error}") from error
    records = [_record(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not records:
        raise BadInput(f"--measured {path}: there is nothing in it; give the JSON lines of `ostinato bench`")
    try:
        if all("figures" in one for one in records):
            return from_decode(records, prompt, output, str(path))
        if all("first_token_s" in one for one in records):
            return from_serve(records, str(path))
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise BadInput(f"--measured {path}: a figure is missing or wrong: {error!r}") from error
    raise BadInput(f"--measured {path}: neither all of `bench decode` nor all of `bench serve`; give one kind")


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"--measured {path}: line {number} is no JSON; keep only the last line of a bench") from error
    if not isinstance(found, dict):
        raise BadInput(f"--measured {path}: line {number} is no JSON object")
    return found


def from_decode(records: Sequence[Mapping[str, Any]], prompt: int, output: int, source: str) -> Replica:
    """From `bench decode`: a `pp` figure for prompts, and `tg` figures of one mode for steps."""
    figures = [figure for one in records for figure in one["figures"]]
    prompts = [one for one in figures if one["kind"] == "pp"]
    steps = [one for one in figures if one["kind"] == "tg"]
    if not prompts or not steps:
        raise BadInput(f"--measured {source}: both a prompt (pp) and generation (tg) must be measured")
    mode = max(steps, key=lambda one: float(one["tok_s"]))["mode"]
    mine = [one for one in steps if one["mode"] == mode]
    depth = min((one["depth"] for one in mine), key=lambda at: abs(at - (prompt + output / 2)))
    points = [(int(one["batch"]), one["batch"] / one["tok_s"]) for one in mine if one["depth"] == depth]
    nearest = min(prompts, key=lambda one: (one["mode"] != mode, abs(one["n_tokens"] - prompt)))
    return _fitted(float(nearest["tok_s"]), points, source)


def from_serve(records: Sequence[Mapping[str, Any]], source: str) -> Replica:
    """From `bench serve` with `--concurrency`: the time that prompts leave is steps with so many live requests."""
    runs = [one for one in records if one["load"].get("clients")]
    if not runs:
        raise BadInput(f"--measured {source}: runs with --concurrency are needed, from 1 up")
    alone = min(runs, key=lambda one: int(one["load"]["clients"]))
    prompt_tok_s = alone["prompt_tokens"] / alone["answered"] / alone["first_token_s"]["mean"]
    points = []
    for one in runs:
        clients = int(one["load"]["clients"])
        left = one["seconds"] - one["prompt_tokens"] / prompt_tok_s
        points.append((clients, max(left, one["seconds"] * 0.05) * clients / one["tokens"]))
    return _fitted(prompt_tok_s, points, source)


def _fitted(prompt_tok_s: float, points: Sequence[tuple[int, float]], source: str) -> Replica:
    """The line through the points by least squares; neither of its two coefficients is negative."""
    if not all(math.isfinite(y) and y > 0 for y in (prompt_tok_s, *(seconds for _, seconds in points))):
        raise ValueError("a speed is not above 0")
    n, most = len(points), max(x for x, _ in points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    each = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    each = min(max(each, 0.0), mean_y / mean_x)
    return Replica(prompt_tok_s, mean_y - each * mean_x, each, most, source)
