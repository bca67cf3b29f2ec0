"""The command line: one verb per function, and the one place where an error becomes a message and an exit code.

Verbs import the packages they need when they run, so that `--help` never waits for torch; nothing imports this package.
Exit codes: 0, 2 bad input, 3 internal error, 4 not possible on this machine, 130 interrupted.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from ostinato.cli import flags
from ostinato.cli.batch import batch
from ostinato.cli.bench import bench
from ostinato.cli.bench_serve import serve_load
from ostinato.cli.chat import chat
from ostinato.cli.doctor import doctor
from ostinato.cli.groups import Verbs, show_help
from ostinato.cli.inspect import inspect
from ostinato.cli.lab import lab
from ostinato.cli.models import models, pull, rm
from ostinato.cli.output import ReaderGone, drop_output, is_verbose, prepare, talk, told, write_line
from ostinato.cli.run import run
from ostinato.cli.scale import scale
from ostinato.cli.serve import serve
from ostinato.cli.texts import embed, score, tokenize
from ostinato.cli.usage import answer_to
from ostinato.cli.verify import verify
from ostinato.errors import HardwareCannot, OstinatoError

app = Verbs(name="ostinato", pretty_exceptions_enable=False, rich_markup_mode="rich")
app.info.context_settings = {"help_option_names": ["--help", "-h"]}
for _verb in (run, chat, serve, batch, tokenize, score, embed, inspect, pull, models, rm, doctor, verify):
    app.command()(_verb)
bench.command("serve")(serve_load)
app.add_typer(bench, name="bench")
app.add_typer(scale, name="scale")
app.add_typer(lab, name="lab")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        write_line(f"ostinato {version('ostinato')}")
        raise typer.Exit


@app.callback()
def _ostinato(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
    verbose: flags.Verbose = False,
) -> None:
    """Run language models on your own machine: GGUF files and safetensors folders."""
    show_help(context)


def main(arguments: Sequence[str] | None = None) -> None:
    """The program: run a verb and exit with its code."""
    prepare()
    sys.exit(call(sys.argv[1:] if arguments is None else arguments))


def call(arguments: Sequence[str]) -> int:
    """Run a verb; every error ends here as one line on standard error and an exit code."""
    if list(arguments[:1]) == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        code = app(list(arguments), prog_name="ostinato", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except OstinatoError as error:
        return _refuse(error)
    except typer.TyperException as error:
        return _refuse_usage(error, arguments)
    except ReaderGone:
        drop_output()
        return 0
    except MemoryError as error:
        return _refuse(HardwareCannot(f"this machine ran out of memory: {error or 'no more to be had'}"))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:  # any other exception is a bug of ours, reported without a traceback unless --verbose
        return _blame_ourselves(error)


def _refuse(error: OstinatoError) -> int:
    if error.exit_code == OstinatoError.exit_code:
        return _blame_ourselves(error)
    talk(f"error: {told(error)}")
    if is_verbose() and error.__cause__ is not None:
        talk(f"caused by {type(error.__cause__).__name__}: {error.__cause__}")
    return error.exit_code


def _refuse_usage(error: typer.TyperException, arguments: Sequence[str]) -> int:
    context = getattr(error, "ctx", None)
    program = context.command_path if context is not None else "ostinato"
    talk(f"error: {answer_to(error, arguments)}\nsee `{program} --help`")
    return 2


def _blame_ourselves(error: Exception) -> int:
    if is_verbose():
        traceback.print_exception(error, file=sys.stderr)
    advice = "please report it" if is_verbose() else "run it again with --verbose for details, and please report it"
    talk(f"error: this is our fault: {type(error).__name__}: {error}; {advice}")
    return OstinatoError.exit_code
