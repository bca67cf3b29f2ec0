"""One measurement as a record: enough to repeat the run, and enough to doubt it."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version

from ostinato.backends.machine import cpu_name as cpu_name


@dataclass(frozen=True, slots=True)
class Series:
    """What one engine reached at one task, run by run, in the order of the rounds."""

    engine: str
    task: str
    unit: str
    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)


def ratio(ours: Series, theirs: Series) -> tuple[float, float, float]:
    """Median, least and largest of ours / theirs, round by round: both sides of a ratio saw the same minute."""
    pairs = [a / b for a, b in zip(ours.runs, theirs.runs, strict=True)]
    return statistics.median(pairs), min(pairs), max(pairs)


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False)
    return (asked.stdout.strip() or "unknown") + ("+changes" if changed.stdout.strip() else "")


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def as_json(question: str, command: str, series: list[Series], **facts: object) -> str:
    """The note's one line for docs/lab-log.md."""
    note = {
        "date": date.today().isoformat(),
        "question": question,
        "command": command,
        "commit": commit(),
        "device": cpu_name(),
        **facts,
        "series": [asdict(s) | {"median": round(s.median, 3)} for s in series],
    }
    return json.dumps(note)
