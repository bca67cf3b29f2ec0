"""Processes: how we start Python, and what a forked child must not use.

The current folder may hold a `random.py` or an `http.py`; a process that we start must not import it.
"""

import os
import sys

from ostinato.errors import Unsupported


def python_command(*words: str) -> list[str]:
    """The command line of another Python process, such as `python_command("-m", "pip")`: this interpreter, without the
    current folder on its path."""
    return [sys.executable, "-P", *words]


class OpenedHere:
    """Remembers the process that opened something. A forked child has a copy of its memory and none of its threads."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def __bool__(self) -> bool:
        return self._process == os.getpid()

    def check(self) -> None:
        """Refuse use in a forked child, which has none of the threads."""
        if not self:
            raise Unsupported(
                f"this model was opened in process {self._process} and is used in its forked child {os.getpid()}, "
                "which has none of its threads; open the model in the child, or start children with "
                'multiprocessing.get_context("spawn")'
            )
