"""A worker whose engine dies once it has made so many tokens, unless a worker before it has died already."""

from __future__ import annotations

import os
import sys
from typing import Any

from ostinato.engine.usher import Usher
from ostinato.serve import worker
from ostinato.serve.supervisor import WORKER

N_TOKENS = 20


def break_engines() -> None:
    hear = Usher._hear

    def dying(self: Usher, entry: Any) -> None:
        hear(self, entry)
        if self.n_tokens >= N_TOKENS:
            raise RuntimeError("broken on purpose")

    Usher._hear = dying  # type: ignore[method-assign]


def main() -> None:
    """Started by a supervisor in place of a worker; the file named first says whether it is the first."""
    mark = sys.argv.pop(1)
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        os.execv(WORKER[0], WORKER)
    break_engines()
    worker.main()


if __name__ == "__main__":
    main()
