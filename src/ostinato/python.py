"""How we start Python: from this interpreter, and without the current folder on the path.

A folder that somebody works in may hold a `random.py` or an `http.py`; a process of ours must not run it.
"""

import sys


def python_command(*words: str) -> list[str]:
    """The command line of another Python process, such as `python_command("-m", "pip")`."""
    return [sys.executable, "-P", *words]
