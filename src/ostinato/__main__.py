"""The command `ostinato`, and `python -m ostinato`.

Nothing is imported before `main` runs, so that Ctrl-C while the verbs are still loading ends it as quietly as later.
"""

import sys


def main() -> None:
    """Run the verb that the command line names, and leave with its exit code."""
    try:
        from ostinato.cli import main as run_verb
    except KeyboardInterrupt:
        sys.exit(130)
    run_verb()


if __name__ == "__main__":
    main()
