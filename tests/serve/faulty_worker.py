"""A worker that breaks once it has made so many tokens, unless a worker before it has broken already.

How is its second argument: `dies`, its engine does; `hangs`, its event loop does.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from ostinato.engine.scheduler import Scheduler
from ostinato.serve import worker
from ostinato.serve.answers import Answers, TokenUpdate
from ostinato.serve.supervisor import WORKER

N_TOKENS = 20


def break_engines() -> None:
    receive = Scheduler._receive

    def dying(self: Scheduler, entry: Any) -> None:
        receive(self, entry)
        if self.n_tokens >= N_TOKENS:
            raise RuntimeError("broken on purpose")

    Scheduler._receive = dying  # type: ignore[method-assign]


def hang_event_loops() -> None:
    more = Answers.more

    async def hanging(self: Answers) -> list[TokenUpdate]:
        if self.n_tokens >= N_TOKENS:
            time.sleep(600)
        return await more(self)

    Answers.more = hanging  # type: ignore[method-assign]


def main() -> None:
    """Started by a supervisor in place of a worker; the file named first says whether it is the first."""
    mark, how = sys.argv[1:3]
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        os.execv(WORKER[0], WORKER)
    {"dies": break_engines, "hangs": hang_event_loops}[how]()
    worker.main()


if __name__ == "__main__":
    main()
