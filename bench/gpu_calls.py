"""How many calls this process makes into the CUDA driver and runtime, counted by CUPTI's callbacks.

CUPTI tells a subscriber of every call of the process, by name, from every library: torch, Triton, cuda-core. No kernel
is traced, so nothing about a graph changes. Where CUPTI cannot be had, torch's profiler counts; where that fails too,
what the loop says of itself (`Start.n_launches`).
"""

from __future__ import annotations

import ctypes
import glob
import re
import site
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

DRIVER, RUNTIME = 1, 2  # CUPTI's callback domains
ENTER: Final = 0  # the callback before a call; another comes after it
_NAME: Final = re.compile(r"cu(da)?[A-Z]\w*")


class CannotCount(Exception):
    """Why a counter does not work here."""


class _CallData(ctypes.Structure):
    """The beginning of CUpti_CallbackData."""

    _fields_ = (("site", ctypes.c_int), ("function", ctypes.c_char_p))


def by_cupti(work: Callable[[], None]) -> Counter[str]:
    """Calls by name while `work` runs, of all threads."""
    library = _cupti()
    counts: Counter[str] = Counter()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_CallData))

    def called(_: Any, domain: int, number: int, data: Any) -> None:
        if domain in (DRIVER, RUNTIME) and data.contents.site == ENTER:
            counts[(data.contents.function or b"?").decode()] += 1

    callback, subscriber = kind(called), ctypes.c_void_p()
    _check(library, library.cuptiSubscribe(ctypes.byref(subscriber), callback, None), "subscribe")
    try:
        for domain in (DRIVER, RUNTIME):
            _check(library, library.cuptiEnableDomain(ctypes.c_uint32(1), subscriber, domain), "enable the callbacks")
        work()
    finally:
        library.cuptiUnsubscribe(subscriber)
    return counts


def by_profiler(work: Callable[[], None]) -> Counter[str]:
    """The same by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            work()
    except RuntimeError as error:
        raise CannotCount(f"torch's profiler: {error}") from error
    events: Any = profiled.events()
    names = [event.name for event in events if event.device_type.name == "CPU"]
    return Counter(name for name in names if _NAME.fullmatch(name))


def counters() -> list[tuple[str, Callable[[Callable[[], None]], Counter[str]]]]:
    """Ways to count, the best first, by the name to report."""
    return [("CUPTI callbacks, driver and runtime API", by_cupti), ("torch.profiler", by_profiler)]


def _cupti() -> Any:
    """CUPTI as torch has loaded it, or as it is found."""
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        if hasattr(library, "cuptiSubscribe"):
            return library
    raise CannotCount("no libcupti.so was found")


def _candidates() -> list[str]:
    loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcupti" in line]
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    installed = [path for folder in folders for path in glob.glob(f"{folder}/nvidia/*/lib/libcupti.so*")]
    system = glob.glob("/usr/local/cuda*/**/libcupti.so*", recursive=True)
    return list(dict.fromkeys([*loaded, *installed, *system, "libcupti.so"]))


def _check(library: Any, result: int, what: str) -> None:
    if result == 0:
        return
    text = ctypes.c_char_p()
    library.cuptiGetResultString(result, ctypes.byref(text))
    raise CannotCount(f"CUPTI could not {what}: {(text.value or b'?').decode()} ({result})")
