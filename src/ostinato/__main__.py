"""The command `ostinato`, and `python -m ostinato`.

Nothing is imported before `main` runs, so that Ctrl-C while the verbs load ends the program without a traceback, and
so that `python -m ostinato` can take the current folder off the path first (see `processes.py`).
"""

import sys


def main() -> None:
    """Run the verb that the command line names, and exit with its code."""
    try:
        from ostinato.cli import main as run_verb
    except KeyboardInterrupt:
        sys.exit(130)
    run_verb()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]
    main()
