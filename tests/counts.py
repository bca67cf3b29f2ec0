"""How often a test repeats: in full under `make soak`, a tenth or less otherwise."""

import os


def soaking() -> bool:
    """Whether this is `make soak`, for what is done there alone."""
    return os.environ.get("OSTINATO_SOAK") == "1"


def soak(n: int, *, part: int = 10) -> int:
    """`n` when OSTINATO_SOAK=1, else a tenth of it, or less where each takes long."""
    return n if soaking() else max(1, n // part)
