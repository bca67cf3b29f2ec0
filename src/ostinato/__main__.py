"""`python -m ostinato` is the command `ostinato`."""

from ostinato.cli import main

if __name__ == "__main__":
    main()
