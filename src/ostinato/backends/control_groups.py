"""The control groups of this process, by which a container or a service is limited: their folders, and the memory that
they have left. Both versions of the interface are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

GROUPS: Final = Path("/sys/fs/cgroup")
GROUP_OF_SELF: Final = Path("/proc/self/cgroup")
_DROPPABLE: Final = ("active_file", "inactive_file")  # in memory.stat: cached files, which the system drops when asked


def group_folders(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those above it, where this controller has its files."""
    try:
        lines = GROUP_OF_SELF.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controllers
        if controllers and not root.is_dir():
            root = GROUPS / controller
        here = root / path.lstrip("/")
        yield here
        yield from (folder for folder in here.parents if folder == root or root in folder.parents)


def memory_left() -> int | None:
    """Bytes that this process's control group may still take: the least of its own and its parents'; None: no limit."""
    left = [n_bytes for folder in group_folders("memory") if (n_bytes := _left(folder)) is not None]
    return min(left, default=None)


def memory_limit() -> int | None:
    """Bytes that this process's control group may take in all; None: no limit."""
    limits = []
    for folder in group_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # absent, or "max"
                limits.append(int((folder / name).read_text()))
    return min(limits, default=None)


def _left(folder: Path) -> int | None:
    newer = (folder / "memory.max").exists()
    names = ("memory.max", "memory.current") if newer else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if newer else "total_"
    try:
        limit, used = ((folder / name).read_text().strip() for name in names)
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        droppable = sum(int(stat.get(prefix + name, 0)) for name in _DROPPABLE)
        return None if limit == "max" else max(0, int(limit) - int(used) + droppable)
    except (OSError, ValueError):
        return None  # absent, or in an unknown format
