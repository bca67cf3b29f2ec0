"""How often a test repeats: in full under `make soak`, a tenth otherwise."""

import os


def soak(n: int) -> int:
    """`n` when OSTINATO_SOAK=1, else a tenth of it."""
    return n if os.environ.get("OSTINATO_SOAK") == "1" else max(1, n // 10)
