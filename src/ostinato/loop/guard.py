"""The lock of decode mode: code that would change the step must ask `Guard.allow` first (I-9), and arrays of the host
that the step uses are read-only while it is closed (I-4, I-5, I-6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from ostinato.errors import DecodeInvariantError


class Guard:
    """Locked between enter and exit. A refusal raises in the caller and changes nothing."""

    def __init__(self) -> None:
        self._locked = self._launching = False
        self._sealed: list[np.ndarray] = []  # each after those that it is a view of

    @property
    def locked(self) -> bool:
        return self._locked

    def seal(self, arrays: Iterable[np.ndarray]) -> None:
        """Make these arrays, and those that they are views of, read-only whenever the lock is closed. Views that code
        of the device has taken of them before stay as they are."""
        # A view can be made writable again only after the array below it.
        found = {id(one): one for array in arrays for one in reversed(list(chain_of(array))) if one.flags.writeable}
        self._sealed = list(found.values())

    def lock(self) -> None:
        self._locked = True
        for array in self._sealed:
            array.flags.writeable = False

    def unlock(self) -> None:
        self._locked = False
        for array in self._sealed:
            with suppress(ValueError):  # its memory was exchanged: `Buffer.check` says so
                array.flags.writeable = True

    def allow(self, invariant: str, what: str) -> None:
        """Raise while decode mode is on: `what` names the action, `invariant` the rule that it would break."""
        if self._locked:
            raise DecodeInvariantError(invariant, f"{what} is not allowed while decode mode is on; exit it first")

    @contextmanager
    def launching(self) -> Iterator[None]:
        """A trigger's own launch is allowed inside."""
        self._launching = True
        try:
            yield
        finally:
            self._launching = False

    def allow_launch(self) -> None:
        """Raise while decode mode is on, unless a trigger launches."""
        if not self._launching:
            self.allow("I-2", "a launch that is no trigger")


def chain_of(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array, and those that it is a view of."""
    below: object = array
    while isinstance(below, np.ndarray):
        yield below
        below = below.base
