"""A group of verbs as typer builds it, with help in our words: beside an option stands a word (N, FILE) or nothing.

Typer itself writes the Python type there: `<bool>`, `<int range>`, `<str>`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from ostinato.cli.output import ReaderGone, set_verbose, write_line, writing

Verbose = Annotated[
    bool, typer.Option("--verbose", help="Print more; show the traceback of an internal error.", callback=set_verbose)
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


class _PlainValue:
    """Reads the value of an option in typer's place, which would load pydantic for it: a tenth of a second."""

    def __init__(self, annotation: Any) -> None:
        self._kind, self._choices = annotation, get_args(annotation)
        self._several = get_origin(annotation) is list
        if self._several:
            (self._kind,), self._choices = self._choices, ()

    @staticmethod
    def knows(annotation: Any) -> bool:
        kinds = get_args(annotation) if get_origin(annotation) is list else (annotation,)
        return get_origin(annotation) is Literal or all(kind in _NUMBERS or kind in (str, Path) for kind in kinds)

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if self._several else None
        try:
            return [self._one(each, param) for each in value] if self._several else self._one(value, param)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx=ctx, param=param) from None

    def _one(self, value: Any, param: Any) -> Any:
        if self._choices:
            if value not in self._choices:
                raise ValueError(f"{value!r} is not one of {', '.join(map(repr, self._choices))}.")
            return value
        if self._kind not in _NUMBERS:
            return self._kind(value)
        try:
            value = self._kind(value)
        except ValueError:
            raise ValueError(f"{value!r} is not {_NUMBERS[self._kind]}.") from None
        least, most = (getattr(param.type_descriptor.parameter_info, end) for end in ("min", "max"))
        if (least is not None and value < least) or (most is not None and value > most):
            upto = "" if most is None else f" to {most}"
            raise ValueError(f"{value} is not {_NUMBERS[self._kind]} from {least}{upto}.")
        return value


_NUMBERS: Final[Mapping[Any, str]] = {int: "a whole number", float: "a number"}


class _Verb(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _in_our_words(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _help_of(self):
            super().format_help(ctx, formatter)


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _in_our_words(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _help_of(self):
            super().format_help(ctx, formatter)


@contextmanager
def _help_of(command: Any) -> Iterator[None]:
    """Rich writes a command's help: each paragraph fills its lines, and a reader may leave before the end."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    try:
        with writing():
            yield
    except SystemExit:  # rich ends the program where the reader of its output has left
        raise ReaderGone from None


def _in_our_words(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if _PlainValue.knows(annotation := parameter.type_descriptor.annotation):
            parameter._runtime_param = _PlainValue(annotation)
        if isinstance(parameter, TyperArgument):
            parameter.display_type = lambda ctx: ""  # type: ignore[method-assign]  # its name is its word
        elif parameter.is_flag:
            parameter.metavar = ""
        elif parameter.metavar is None and parameter.type_descriptor.choices:
            parameter.metavar = "|".join(map(str, parameter.type_descriptor.choices))
    return parameters
