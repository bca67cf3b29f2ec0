"""A group of verbs as typer builds it, with help in our words: beside an option stands a word (N, FILE) or nothing.

Typer itself writes the Python type there: `<bool>`, `<int range>`, `<str>`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from ostinato.cli.output import set_verbose, write_line

Verbose = Annotated[
    bool, typer.Option("--verbose", help="Say more; show the traceback of an error of ours.", callback=set_verbose)
]


class Verbs(typer.Typer):
    """A group of verbs; without a verb it runs its callback."""

    def __init__(self, **words: Any) -> None:
        super().__init__(cls=_Group, invoke_without_command=True, **words)

    def command(self, name: str | None = None, **words: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=_Verb, **words)


def show_help(context: typer.Context) -> None:
    """Print the help of a group, unless one of its verbs was named."""
    if context.invoked_subcommand is None:
        write_line(context.get_help())


class _Verb(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _in_our_words(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _in_our_words(super().get_params(ctx))


def _in_our_words(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.display_type = lambda ctx: ""  # type: ignore[method-assign]  # its name is its word
        elif parameter.is_flag:
            parameter.metavar = ""
        elif parameter.metavar is None and parameter.type_descriptor.choices:
            parameter.metavar = "|".join(map(str, parameter.type_descriptor.choices))
    return parameters
