"""The server's own process: `ostinato serve`, which kills what is silent sooner. It imports no more than that does."""

from __future__ import annotations

import sys

from ostinato.processes import keep_stderr
from ostinato.serve.settings import ServeOptions
from ostinato.serve.supervisor import Supervisor


def main() -> None:
    options, silent_s = sys.argv[1:]
    keep_stderr()

    def talk(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    sys.exit(Supervisor(ServeOptions.from_json(options), talk, silent_s=float(silent_s)).run())


if __name__ == "__main__":
    main()
