"""For the scripts of clients: a line for each thing that worked. It imports nothing of Ostinato."""

from __future__ import annotations

import os

MODEL = os.environ["CLIENT_MODEL"]
FEW = 24  # tokens of an answer


def check(what: str, held: object) -> None:
    """Say that something worked, or end with an error."""
    if not held:
        raise SystemExit(f"failed: {what}: {held!r}")
    print(f"ok: {what}", flush=True)
