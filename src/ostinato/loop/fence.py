"""A memory fence for Python. Stores before the fence are visible to other threads before stores after it.

x86 keeps a writer's stores and a reader's loads in order, and the fence does nothing there. Other processors may
reorder them, and Python has no fence of its own: a lock that is taken twice is one. Stores before the
first release are done by then, the second acquisition comes after that release, and later stores come after that.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from typing import Final

_lock: Final = threading.Lock()


def _by_lock() -> None:
    for _ in range(2):
        with _lock:
            pass


def _nothing() -> None:
    pass


def fence_of(machine: str) -> Callable[[], None]:
    """The fence for an architecture as `platform.machine` names it."""
    return _nothing if machine.lower() in ("x86_64", "amd64", "i686") else _by_lock


fence: Final = fence_of(platform.machine())
