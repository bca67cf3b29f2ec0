"""The options that several verbs share, each written once: its name, its help, how a shell completes it.

A verb takes the options of a record as one parameter (`load: flags.ToGenerate`); `verb` spreads it into an option for
each field, and makes the record, which checks its values, of what the user gave.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from ostinato.cli.groups import Verbose as Verbose
from ostinato.cli.input import read_file, read_schema
from ostinato.cli.output import talk
from ostinato.errors import BadInput, BadOption
from ostinato.files import store
from ostinato.options import MODES, SAMPLING_NUMBERS, KVType, LoadOptions, Sampling


def complete_model(incomplete: str) -> list[str]:
    """Known names and installed models; the shell itself completes paths."""
    names = {*store.TABLE, *(model.name for model in store.installed())}
    return sorted(name for name in names if name.startswith(incomplete))


def complete_installed(incomplete: str) -> list[str]:
    return [model.name for model in store.installed() if model.name.startswith(incomplete)]


def among(*values: str) -> Callable[[str], list[str]]:
    """Completes an option whose values are these."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


class Flag:
    """An option of a verb, marked in the annotation of its parameter: its help, and the word for its value there.

    It is called like the parameter unless it has a `name`. `panel`: the heading in the help; further words are typer's.
    `type` and `read`: a field of a record is given as this type, and read from it. `old`: its name in earlier versions,
    still accepted with a warning.
    """

    def __init__(
        self,
        help: str,
        metavar: str | None = None,
        *,
        name: str | None = None,
        panel: str | None = None,
        type: Any = None,
        read: Callable[[Any], Any] | None = None,
        old: str | None = None,
        **more: Any,
    ) -> None:
        self.name, self.panel, self.type, self.read, self.old = name, panel, type, read, old
        self._words = {"help": help, "metavar": metavar, **more}

    def called(self, name: str) -> str:
        """The flag of a parameter of that name."""
        return self.name or f"--{name.replace('_', '-')}"

    def old_parameter(self, name: str, type: Any) -> inspect.Parameter:
        """The hidden parameter of its old name."""
        annotation = Annotated[type | None, typer.Option(self.old, hidden=True)]
        return inspect.Parameter(f"old_{name}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def parameter(self, name: str, type: Any, default: Any) -> inspect.Parameter:
        """A parameter of that name as typer reads it."""
        annotation = Annotated[type, typer.Option(self.called(name), rich_help_panel=self.panel, **self._words)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


class RecordFlags:
    """Marks the parameter of a verb that is a record of `kind`: those of its fields that `flags` lists are options."""

    def __init__(self, kind: type, flags: Mapping[str, Flag], **defaults: Any) -> None:
        """`defaults`: the verb's own; else the record's."""
        self._kind, self._flags, self._defaults = kind, flags, defaults

    def parameters(self) -> Iterator[inspect.Parameter]:
        types = get_type_hints(self._kind)
        defaults = {field.name: field.default for field in dataclasses.fields(self._kind)}
        for field, flag in self._flags.items():
            default = self._defaults.get(field, None if flag.type else defaults[field])
            yield flag.parameter(field, flag.type or types[field], default)
            if flag.old is not None:
                yield flag.old_parameter(field, flag.type or types[field])

    def record(self, words: dict[str, Any]) -> Any:
        """The record of its options, which are taken out of all options of a verb."""
        given = {}
        for field, flag in self._flags.items():
            value = words.pop(field)
            if flag.old is not None and (old := words.pop(f"old_{field}")) is not None:
                talk(f"warning: {flag.old} is now called {flag.name}")
                value = old if value is None else value
            if value is not None:
                given[field] = value if flag.read is None else flag.read(value)
        try:
            return self._kind(**given)
        except BadOption as error:
            raise BadOption(self._in_flags(str(error))) from error.__cause__

    def _in_flags(self, message: str) -> str:
        """A record's refusal with its fields as the flags that were typed, where they stand for the option."""

        def called(found: re.Match[str]) -> str:
            flag = self._flags.get(found[0])
            return found[0] if flag is None else flag.called(found[0])

        return re.sub(r"^[a-z_]+|(?<= and )[a-z_]+(?= are both given)|(?<=at most )[a-z_]+", called, message)


class ModelFlags:
    """Marks the model of a verb that takes no text: it may be given as an argument too, or with `--model`. `several`:
    there may be more than one, as arguments; the parameter is then a tuple of them."""

    def __init__(self, *, several: bool = False) -> None:
        self._several = several

    def parameters(self, name: str, default: Any) -> Iterator[inspect.Parameter]:
        help = _MODEL_HELP if default is None else f"{_MODEL_HELP} By default {self._one(default)}."
        metavar, type = ("MODEL", list[str] | None) if self._several else ("MODEL", str | None)
        argument = typer.Argument(metavar=metavar, help=help, autocompletion=complete_model)
        kind, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[type, argument]
        yield inspect.Parameter(f"{name}_argument", kind, default=None, annotation=annotation)
        flag = Flag("The model, given as an option.", "PATH|NAME", name="--model", autocompletion=complete_model)
        yield flag.parameter(name, str | None, None)

    def _one(self, default: Any) -> Any:
        return default[0] if self._several else default

    def value(self, name: str, default: Any, words: dict[str, Any]) -> Any:
        argument, option = words.pop(f"{name}_argument"), words.pop(name)
        if argument and option is not None:
            given = " ".join(argument) if self._several else argument
            raise BadInput(f"a model was given twice, {given} and --model {option}; give one of them")
        if self._several:
            return tuple(argument or ()) or ((option,) if option else default)
        return argument or option or default


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """A verb as typer takes it: flags get their names, records are spread into options, and `--verbose` is added."""
    signature = inspect.signature(function, eval_str=True)
    parameters: list[inspect.Parameter] = []
    records: dict[str, RecordFlags] = {}
    models: dict[str, tuple[ModelFlags, Any]] = {}
    for name, parameter in signature.parameters.items():
        type, mark = (*get_args(parameter.annotation), None, None)[:2]
        if isinstance(mark, RecordFlags):
            records[name] = mark
            parameters += mark.parameters()
        elif isinstance(mark, ModelFlags):
            models[name] = mark, parameter.default
            parameters += mark.parameters(name, parameter.default)
        elif isinstance(mark, Flag):
            parameters.append(mark.parameter(name, type, parameter.default))
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    verbose = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Verbose)
    parameters.append(verbose)

    @functools.wraps(function)
    def run(*, verbose: bool, **words: Any) -> None:
        made = {name: flags.record(words) for name, flags in records.items()}
        made |= {name: flags.value(name, default, words) for name, (flags, default) in models.items()}
        function(**words, **made)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what typer reads
    return run


_MODEL_HELP = "A GGUF file, a safetensors folder, or a name: see `ostinato models`, hf:owner/repo/file.gguf."

ModelAnywhere = Annotated[str, ModelFlags()]
ModelsAnywhere = Annotated[tuple[str, ...], ModelFlags(several=True)]
Model = Annotated[str, Flag(_MODEL_HELP, "PATH|NAME", autocompletion=complete_model)]
Json = Annotated[bool, Flag("Print one JSON object.", name="--json")]
TextFile = Annotated[Path | None, Flag("Take the text from a file (- is standard input).", "FILE")]


def parse_logit_bias(texts: Iterable[str]) -> dict[int, float]:
    """`ID=VALUE` texts as a mapping; the last value of an id counts.

    >>> parse_logit_bias(["5=-100", "7=1.5"])
    {5: -100.0, 7: 1.5}
    """
    bias: dict[int, float] = {}
    for text in texts:
        token, equals, value = text.partition("=")
        try:
            bias[int(token)] = float(value if equals else "no number")
        except ValueError:
            raise BadOption(f"--logit-bias is {text!r}; it must be ID=VALUE, as in 42=-100") from None
    return bias


def under(panel: str, flags: Mapping[str, Flag]) -> Mapping[str, Flag]:
    """Flags under one heading of the help."""
    for flag in flags.values():
        flag.panel = panel
    return flags


_TEXTS = list[str] | None
_CHOOSING = under(
    "Choosing tokens",
    {
        "max_tokens": Flag("Generate at most N tokens; by default until the model ends or the context is full.", "N"),
        **{one.name: Flag(one.help, "N" if one.kind == "int32" else "X") for one in SAMPLING_NUMBERS},
        "logit_bias": Flag(
            "Add VALUE to a token's logit; may be repeated.", "ID=VALUE", type=_TEXTS, read=parse_logit_bias
        ),
        "seed": Flag("Seed for sampling; the same seed gives the same text.", "N"),
        "stop": Flag("End the answer before TEXT; may be repeated.", "TEXT", type=_TEXTS),
        "stop_token_ids": Flag(
            "End the answer after this token; may be repeated.", "ID", name="--stop-token-id", type=list[int] | None
        ),
        "ignore_eos": Flag("Continue after the model's end token."),
    },
)
_FOLLOWING = under(
    "What the answer must follow (one of them)",
    {
        "schema": Flag(
            "JSON that follows the schema in FILE.",
            "FILE",
            name="--schema",
            old="--json-schema",
            type=Path | None,
            read=read_schema,
        ),
        "json_mode": Flag("Any JSON object."),
        "regex": Flag("Text that matches the whole REGEX.", "REGEX"),
        "choice": Flag("One of several texts; repeat the option for each.", "TEXT", type=_TEXTS),
        "grammar": Flag(
            "Text that follows the grammar in FILE (Lark or GBNF).", "FILE", type=Path | None, read=read_file
        ),
    },
)
_LOADING = under(
    "Loading and running",
    {
        "device": Flag("Device to run on.", "auto|cpu|cuda[:N]", autocompletion=among("auto", "cpu", "cuda")),
        "mode": Flag(
            f"How the decode loop is paced: {', '.join(MODES[:-1])} or {MODES[-1]}; auto is the highest that can run.",
            "MODE",
            autocompletion=among("auto", *MODES),
        ),
        "dtype": Flag("Type of activations; auto is float32 on the CPU, bfloat16 on CUDA."),
        "kv_type": Flag("Type of the cached keys and values."),
        "context": Flag("Most tokens of a prompt and its answer together.", "N"),
        "threads": Flag("Threads on the CPU; by default one per physical core.", "N"),
        "slots": Flag("Requests decoded at once.", "N"),
        "queue": Flag("Requests that may wait for a slot.", "N"),
        "activations": Flag(
            "Activations in the CPU's loop and in --mode persistent: wide rounds less, int8 is faster on a CPU."
        ),
        "prompts": Flag(
            "Weights that prompts read in --mode persistent: a plain copy, or the tape, which needs half the memory."
        ),
    },
)


def _loading(names: str) -> RecordFlags:
    return RecordFlags(LoadOptions, {name: _LOADING[name] for name in names.split()})


Choosing = Annotated[Sampling, RecordFlags(Sampling, _CHOOSING)]
ChoosingOrFollowing = Annotated[Sampling, RecordFlags(Sampling, {**_CHOOSING, **_FOLLOWING})]

_USUAL = "device mode dtype kv_type context threads"
ToGenerate = Annotated[LoadOptions, _loading(f"{_USUAL} slots activations prompts")]
ToCompute = Annotated[LoadOptions, _loading(f"{_USUAL} activations")]
ToMeasure = Annotated[LoadOptions, _loading("device dtype kv_type threads activations")]
ToServe = Annotated[LoadOptions, _loading(f"slots queue {_USUAL} activations prompts")]
ToBatch = Annotated[LoadOptions, _loading(f"slots {_USUAL} activations prompts")]
ToPlan = Annotated[LoadOptions, _loading("device mode slots kv_type context prompts")]
Device = Annotated[str, _LOADING["device"]]
KvType = Annotated[KVType | None, _LOADING["kv_type"]]
