"""How often a test repeats: in full under `make soak`, a tenth otherwise."""

import os


def soaking() -> bool:
    """Whether this is `make soak`, for what is done there alone."""
    return os.environ.get("OSTINATO_SOAK") == "1"


def soak(n: int) -> int:
    """`n` when OSTINATO_SOAK=1, else a tenth of it."""
    return n if soaking() else max(1, n // 10)
