"""How many threads to compute with: the physical cores that this process may use.

Two hardware threads of one core share its arithmetic units, so the second adds little and slows the first. The limits
of the system are respected: the set of processors that the process may run on, the share of them that its control
group gets, and OMP_NUM_THREADS, which limits other numeric libraries too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ostinato.backends.control_groups import group_folders

PROCESSORS: Final = Path("/sys/devices/system/cpu")
LIMIT: Final = "OMP_NUM_THREADS"


def default_threads() -> int:
    """Threads to compute with where the user did not say."""
    limit = os.environ.get(LIMIT, "").partition(",")[0].strip()
    if limit.isascii() and limit.isdecimal() and int(limit) > 0:
        return min(int(limit), os.cpu_count() or 1)
    share = group_share()
    cores = physical_cores()
    return cores if share is None else max(1, min(cores, int(share)))


def physical_cores() -> int:
    """Cores that this process may run on, each counted once, however many hardware threads it has."""
    return max(1, len({_core(processor) for processor in allowed_processors()}))


def allowed_processors() -> set[int]:
    """The system's numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _core(processor: int) -> str:
    """A name for a processor's core: the list of processors on it, or the processor itself where that is unknown."""
    topology = PROCESSORS / f"cpu{processor}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the same list, under its new and its old name
        try:
            return (topology / name).read_text().strip()
        except OSError:
            continue
    return str(processor)


def group_share() -> float | None:
    """The CPU quota of the control group, in processors: the least of its own and its parents'; None: no limit."""
    shares = [share for folder in group_folders("cpu") if (share := _share(folder)) is not None]
    return min(shares, default=None)


def _share(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None  # absent, or in an unknown format
