"""The lock of decode mode: code that would change the step must ask `Guard.allow` first (I-9)."""

from __future__ import annotations

from ostinato.errors import DecodeInvariantError


class Guard:
    """Locked between enter and exit. A refusal raises in the caller and changes nothing."""

    def __init__(self) -> None:
        self._locked = False

    def lock(self) -> None:
        self._locked = True

    def unlock(self) -> None:
        self._locked = False

    def allow(self, invariant: str, what: str) -> None:
        """Raise while decode mode is on: `what` names the action, `invariant` the rule that it would break."""
        if self._locked:
            raise DecodeInvariantError(invariant, f"{what} is not allowed while decode mode is on; exit it first")
