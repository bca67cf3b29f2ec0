"""The command line: one verb per function, and the one place where an error becomes a message and an exit code.

Only the verb that was named is loaded, and it imports the packages it needs when it runs, so that `--help` waits for
nothing; nothing imports this package.
Exit codes: 0, 2 bad input, 3 internal error, 4 not possible on this machine, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Final

import typer

from ostinato import __version__
from ostinato.cli.groups import Verbose, Verbs, show_help
from ostinato.cli.output import ReaderGone, drop_output, is_verbose, prepare, talk, told, write_line
from ostinato.errors import BadInput, HardwareCannot, OstinatoError, StderrUnwritable

# Every verb and group: its module, and the first sentence of its help, so that `--help` lists them without importing
# them. The module of `bench` is the one that adds the last verb to it.
_VERBS: Final = {
    "run": ("run", "Generate text from a prompt, streaming."),
    "chat": ("chat", "Talk with a model in the terminal."),
    "serve": ("serve", "Serve models over OpenAI's, Anthropic's and Ollama's APIs, with a page at /."),
    "batch": ("batch", "Answer a file of requests in OpenAI's batch format."),
    "tokenize": ("texts", "Show the tokens of a text."),
    "score": (
        "texts",
        "Measure how well a model predicts a text: tokens, negative log-likelihood, perplexity; teacher forced.",
    ),
    "embed": (
        "texts",
        "Compute one vector per text from the last hidden states; with --pooling rank, a ranking model's scores.",
    ),
    "inspect": (
        "inspect",
        "Describe a model: architecture, sizes, tensors, tokenizer, template, memory. Reads no weights.",
    ),
    "pull": ("models", "Fetch a model, or check the copy that is here, and print its path."),
    "models": ("models", "List the models on this machine and the names that can be pulled."),
    "rm": ("models", "Remove a model that was pulled."),
    "doctor": ("doctor", "Report what this machine can run, and why it cannot run the rest."),
    "verify": ("verify", "Compare the modes that can run here, buffer by buffer, and the weights with the file."),
    "bench": ("bench_serve", "Measure this machine or a server."),
    "scale": ("scale", "Plan how many engines a load needs."),
    "lab": ("lab", "Measure launch overhead: kernels one by one, graphs, loops and persistent kernels."),
}


def app(named: Collection[str] | None = None) -> Verbs:
    """The program with these verbs, or with all; of the others it knows the names and what they are for."""
    made = Verbs(name="ostinato", pretty_exceptions_enable=False, rich_markup_mode="rich")
    made.info.context_settings = {"help_option_names": ["--help", "-h"]}
    made.callback()(_ostinato)
    for name, (module, summary) in _VERBS.items():
        if named is not None and name not in named:
            made.command(name, help=summary)(_not_loaded)
            continue
        verb = getattr(import_module(f"ostinato.cli.{module}"), name)
        if isinstance(verb, Verbs):
            made.add_typer(verb, name=name)
        else:
            made.command(name)(verb)
    return made


def _not_loaded() -> None:
    raise AssertionError("a verb was called that was not loaded")


def _show_version(wanted: bool) -> None:
    if wanted:
        write_line(f"ostinato {__version__}")
        raise typer.Exit


def _ostinato(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
    verbose: Verbose = False,
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
        code = app(_named(arguments))(list(arguments), prog_name="ostinato", standalone_mode=False)
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


def _named(arguments: Sequence[str]) -> Collection[str] | None:
    """The verb to load: the first word that is none of the program's own options. A shell that completes, and a word
    that is no verb, ask for all."""
    if "_OSTINATO_COMPLETE" in os.environ:
        return None
    first = next((word for word in arguments if not word.startswith("-")), None)
    return () if first is None else (first,) if first in _VERBS else None


def _refuse(error: OstinatoError) -> int:
    if error.exit_code == OstinatoError.exit_code:
        return _blame_ourselves(error)
    talk(f"error: {told(error)}")
    if isinstance(error, StderrUnwritable):
        with suppress(BadInput, ReaderGone):
            write_line(f"error: {told(error)}")
    if is_verbose() and error.__cause__ is not None:
        talk(f"caused by {type(error.__cause__).__name__}: {error.__cause__}")
    return error.exit_code


def _refuse_usage(error: typer.TyperException, arguments: Sequence[str]) -> int:
    context = getattr(error, "ctx", None)
    program = context.command_path if context is not None else "ostinato"
    from typer.main import get_command

    from ostinato.cli.usage import answer_to

    talk(f"error: {answer_to(error, arguments, get_command(app()))}\nsee `{program} --help`")
    return 2


def _blame_ourselves(error: Exception) -> int:
    if is_verbose():
        traceback.print_exception(error, file=sys.stderr)
    advice = "please report it" if is_verbose() else "run it again with --verbose for details, and please report it"
    talk(f"error: this is our fault: {type(error).__name__}: {error}; {advice}")
    return OstinatoError.exit_code
