"""The options that several verbs share, each written once: its name, its help, how a shell completes it.

Types for typer, and the parsing of options that a shell gives as text. Values are checked by `ostinato.options`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ostinato import options
from ostinato.cli.input import read_file
from ostinato.cli.output import set_verbose
from ostinato.errors import BadOption
from ostinato.files import store
from ostinato.options import DType, KVType, Sampling


def complete_model(incomplete: str) -> list[str]:
    """Known names and installed models; the shell itself completes paths."""
    names = {*store.TABLE, *(model.name for model in store.installed())}
    return sorted(name for name in names if name.startswith(incomplete))


def complete_installed(incomplete: str) -> list[str]:
    return [model.name for model in store.installed() if model.name.startswith(incomplete)]


_MODEL_HELP = "A GGUF file, a safetensors folder, or a name: see `ostinato models`, hf:owner/repo/file.gguf."
_SAMPLING, _LOADING = "Choosing tokens", "Loading and running"
_FOLLOWING = "What the answer must follow (one of them)"


def _number(name: str) -> Any:
    """The flag of a number of `Sampling`."""
    number = next(number for number in options.SAMPLING_NUMBERS if number.name == name)
    metavar = "N" if number.kind == "int32" else "X"
    flag = f"--{name.replace('_', '-')}"
    return typer.Option(flag, metavar=metavar, help=number.help, rich_help_panel=_SAMPLING)


Model = Annotated[str, typer.Option("--model", metavar="PATH|NAME", help=_MODEL_HELP, autocompletion=complete_model)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", help="Say more; show the traceback of an error of ours.", callback=set_verbose),
]
TextFile = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", help="Take the text from a file (- is standard input)."),
]

MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="At most so many tokens.", rich_help_panel=_SAMPLING),
]
Temperature = Annotated[float | None, _number("temperature")]
TopK = Annotated[int | None, _number("top_k")]
TopP = Annotated[float | None, _number("top_p")]
MinP = Annotated[float | None, _number("min_p")]
RepetitionPenalty = Annotated[float | None, _number("repetition_penalty")]
PresencePenalty = Annotated[float, _number("presence_penalty")]
FrequencyPenalty = Annotated[float, _number("frequency_penalty")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=VALUE",
        help="Add VALUE to a token's logit; may be repeated.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="The same seed, the same text.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated.", rich_help_panel=_SAMPLING),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Continue after the model's end token.", rich_help_panel=_SAMPLING),
]

JsonSchema = Annotated[
    Path | None,
    typer.Option(
        "--json-schema", metavar="FILE", help="JSON that follows the schema in FILE.", rich_help_panel=_FOLLOWING
    ),
]
JsonMode = Annotated[bool, typer.Option("--json-mode", help="Any JSON object.", rich_help_panel=_FOLLOWING)]
Regex = Annotated[
    str | None,
    typer.Option("--regex", metavar="REGEX", help="A text that matches all of it.", rich_help_panel=_FOLLOWING),
]
Choice = Annotated[
    list[str] | None,
    typer.Option("--choice", metavar="TEXT", help="One of these texts; repeat it.", rich_help_panel=_FOLLOWING),
]
Grammar = Annotated[
    Path | None,
    typer.Option("--grammar", metavar="FILE", help="The grammar in FILE, Lark or GBNF.", rich_help_panel=_FOLLOWING),
]

Device = Annotated[
    str,
    typer.Option("--device", metavar="auto|cpu|cuda[:N]", help="Where to run.", rich_help_panel=_LOADING),
]
Mode = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="|".join(("auto", *options.MODES)),
        help="How the decode loop is paced; auto is the highest that can run.",
        rich_help_panel=_LOADING,
    ),
]
Dtype = Annotated[
    DType,
    typer.Option("--dtype", help="auto: float32 on the CPU, bfloat16 on CUDA.", rich_help_panel=_LOADING),
]
KvType = Annotated[
    KVType | None,
    typer.Option("--kv-type", help="How keys and values are stored.", rich_help_panel=_LOADING),
]
Context = Annotated[
    int | None,
    typer.Option("--context", metavar="N", help="Tokens of prompt and answer together.", rich_help_panel=_LOADING),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="Threads on the CPU; by default its cores.", rich_help_panel=_LOADING),
]
Activations = Annotated[
    options.Activations,
    typer.Option(
        "--activations",
        help="What the CPU's loop and --mode persistent multiply with: wide is exact, int8 faster on a CPU.",
        rich_help_panel=_LOADING,
    ),
]
Prompts = Annotated[
    options.Prompts,
    typer.Option(
        "--prompts",
        help="What prompts read with --mode persistent: a plain copy of the weights, or the tape, in half the memory.",
        rich_help_panel=_LOADING,
    ),
]
Slots = Annotated[int, typer.Option("--slots", metavar="N", help="Requests decoded at once.", rich_help_panel=_LOADING)]


def sampling(words: Mapping[str, Any]) -> Sampling:
    """The sampling options among all options of a verb (`typer.Context.params`)."""
    names = {field.name for field in fields(Sampling)} & words.keys()
    given = {name: words[name] for name in names}
    for name in ("schema", "grammar"):
        if given.get(name) is not None:
            given[name] = read_file(given[name])
    return Sampling(**{**given, "logit_bias": parse_logit_bias(words["logit_bias"])})


def parse_logit_bias(texts: Iterable[str] | None) -> dict[int, float]:
    """`ID=VALUE` texts as a mapping; the last value of an id counts.

    >>> parse_logit_bias(["5=-100", "7=1.5"])
    {5: -100.0, 7: 1.5}
    """
    bias: dict[int, float] = {}
    for text in texts or ():
        token, equals, value = text.partition("=")
        try:
            bias[int(token)] = float(value if equals else "no number")
        except ValueError:
            raise BadOption(f"--logit-bias is {text!r}; it must be ID=VALUE, as in 42=-100") from None
    return bias
