"""Which cards an engine of this process holds for itself. The holder registers it here; only the chooser reads it."""

from __future__ import annotations

from collections import Counter
from typing import Final

_HELD: Final[Counter[str]] = Counter()


def hold(device: str) -> None:
    _HELD[device] += 1


def release(device: str) -> None:
    _HELD[device] -= 1


def is_held(device: str) -> bool:
    return _HELD[device] > 0
