"""Which kernels are compiled and loaded on which device: for the life of the process, as Triton keeps them (E-9).

A step or a chunk is captured only after everything in it is ready. Kernels of an engine become ready before its weights
are read (`ahead.py`); a model that is opened otherwise than it was loaded for is compiled for when it is opened.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from ostinato.backends.cuda.launch import TritonLaunch
from ostinato.errors import NotWarmed

_READY: Final[dict[str, set[Hashable]]] = {}  # of each device, the keys of launches, for the life of the process


def compile_missing(launches: Iterable[TritonLaunch], device: torch.device) -> int:
    """Compile and load for a device what is not ready there, one after the other, as first launches would have been.
    Returns how many programs that were; none when an engine is opened a second time."""
    ready = _READY.setdefault(str(device), set())
    missing = {key: launch for launch in launches if (key := launch.key) not in ready}
    with _current(device):
        for key, launch in missing.items():
            launch.compile()
            ready.add(key)
    return len(missing)


def check_ready(launches: Iterable[TritonLaunch], device: torch.device) -> None:
    """NotWarmed where a launch would be compiled when it is first called: inside a capture that breaks it."""
    ready = _READY.get(str(device), set())
    for launch in launches:
        if launch.key not in ready:
            raise NotWarmed(f"{launch.kernel.__name__} is not compiled for {device}, and a graph is to be captured")


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """For whose current device Triton compiles."""
    made: Any = torch.cuda.device  # which has no types
    found: AbstractContextManager[Any] = made(device) if device.type == "cuda" else nullcontext()
    return found
