"""What a process holds, over time, and whether it grew."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

MB: Final = 1 << 20
# Pages of keys and values are touched for the first time, and allocators keep what they had: memory is judged from the
# middle of a life on, and may grow by this much there.
SLACK_BYTES: Final = 16 * MB


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
    first, middle, last = samples[0], samples[len(samples) // 2], samples[-1]
    found = [
        f"{name} grew from {getattr(first, name)} to {getattr(last, name)}"
        for name, more in (("handles", handles), ("threads", threads))
        if getattr(last, name) > getattr(first, name) + more
    ]
    if last.rss - middle.rss > SLACK_BYTES:
        found.append(f"memory grew from {middle.rss / MB:.1f} MiB in the middle to {last.rss / MB:.1f} MiB")
    return found


def told(samples: Sequence[Held]) -> str:
    """The life of a process in one line."""
    if not samples:
        return "not seen"
    first, middle, last = samples[0], samples[len(samples) // 2], samples[-1]
    memory = " ".join(f"{one.rss / MB:.1f}" for one in (first, middle, last))
    return f"{memory} MiB, {first.handles} to {last.handles} handles, {first.threads} to {last.threads} threads"
