"""What a process holds, over time, and whether it grew."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

MB: Final = 1 << 20
# A body of megabytes may be under way in any sample: memory is judged by the medians of the last two quarters of a
# life, which may be this far apart; in a short life further, because the first long bodies take memory that is kept.
SLACK_BYTES: Final = 8 * MB
YOUNG_SLACK_BYTES: Final = 32 * MB
LONG_LIFE: Final = 100  # samples


class Held(NamedTuple):
    """What a process holds at one moment."""

    rss: int  # bytes
    handles: int
    threads: int


def held(pid: int) -> Held | None:
    """None when the process has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return Held(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir(f"/proc/{pid}/fd")),
            len(os.listdir(f"/proc/{pid}/task")),
        )
    except (OSError, IndexError):
        return None


def growth(samples: Sequence[Held], *, handles: int = 0, threads: int = 0) -> list[str]:
    """What grew over a life: nothing may but memory, a little. The first and the last sample are of an idle process;
    so many handles and threads more are allowed, for connections that are kept and pools that are not full yet."""
    if len(samples) < 3:
        return []
    first, last = samples[0], samples[-1]
    found = [
        f"{name} grew from {getattr(first, name)} to {getattr(last, name)}"
        for name, more in (("handles", handles), ("threads", threads))
        if getattr(last, name) > getattr(first, name) + more
    ]
    *_, third, fourth = quarters(samples)
    if fourth - third > (SLACK_BYTES if len(samples) >= LONG_LIFE else YOUNG_SLACK_BYTES):
        found.append(f"memory grew from {third / MB:.1f} MiB in its third quarter to {fourth / MB:.1f} MiB")
    return found


def quarters(samples: Sequence[Held]) -> list[float]:
    """The median memory of each quarter of a life, in bytes."""
    bounds = [len(samples) * quarter // 4 for quarter in range(5)]
    parts = [samples[begin : max(begin + 1, end)] for begin, end in pairwise(bounds)]
    return [statistics.median(one.rss for one in part) for part in parts]


def told(samples: Sequence[Held]) -> str:
    """The life of a process in one line."""
    if not samples:
        return "not seen"
    first, last = samples[0], samples[-1]
    memory = " ".join(f"{one / MB:.1f}" for one in quarters(samples))
    return f"{memory} MiB, {first.handles} to {last.handles} handles, {first.threads} to {last.threads} threads"
