"""What a user may set: how to load a model (`LoadOptions`) and how to choose tokens (`Sampling`).

Frozen records, checked when made, so that nothing below re-checks a value. `None` means that the user did not
set it: `Sampling.over` fills in the model's own defaults. No torch here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self, TypedDict, TypeVar, get_args

from ostinato.errors import BadInput, BadOption, Unsupported, listing
from ostinato.other_engines import OTHER_ENGINES

DType = Literal["auto", "float32", "bfloat16"]
KVType = Literal["f32", "bf16", "f16", "q8_0"]
Activations = Literal["wide", "int8"]
Prompts = Literal["auto", "plain", "tape"]
Talk = Callable[[str], None]  # gets a sentence where a choice or a delay may surprise the user

MODES = ("eager", "graph", "loop", "persistent")  # how the decode loop is paced, from low to high
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1
MAX_RULE_CHARACTERS = 65_536  # of what a caller writes
MAX_MADE_CHARACTERS = 262_144  # of a grammar that this package makes of it, half a second to read
MAX_SLOTS = 64
DEFAULT_SLOTS = 8
DEFAULT_QUEUE = 256

OLD_NAMES = {"stop_ids": "stop_token_ids"}  # options by their names of earlier versions, still accepted
# What else is tried in Python, in a call or in a record of options, and what there is instead.
PYTHON_WORDS = {
    "stream": "stream(prompt) and stream_chat(messages) answer piece by piece",
    "response_format": "it is Sampling(schema=...) or Sampling(json_mode=True) in Python",
    "sampling_params": "the options of a request are one Sampling, given after the prompt",
    "reuse": "only LLM.stream and LLM.stream_chat continue from a loaded state",
    "n": "a list with the same prompt gives several answers",
    "verbose": "nothing is printed unless LLM(model, talk=print) asks for it",
    "embedding": "LLM.embed needs no option; it works with every model",
}
_FP8_NAMES = ("fp8", "f8", "float8")


def _check(condition: bool, option: str, value: object, wanted: str) -> None:
    if not condition:
        raise BadOption(f"{option} is {value!r}; it must be {wanted}")


def _check_word(option: str, value: object, known: Sequence[str]) -> None:
    _check(value in known, option, value, _or(known))


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object, least: int = 0, most: int | None = None) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value >= least and (most is None or value <= most)


def _check_count(option: str, value: object, least: int, most: int | None = None, note: str = "") -> None:
    upto = "" if most is None else f" to {most}"
    _check(_is_count(value, least, most), option, value, f"a whole number from {least}{upto}{note}")


def _check_text(option: str, value: object) -> None:
    _check(isinstance(value, str) and value != "", option, value, "a text that is not empty")
    whole = not any("\ud800" <= character <= "\udfff" for character in str(value))
    _check(whole, option, value, "a text without half a character")


def check_word(kind: type[Any], word: str) -> None:
    """Refuse a word that is no option of `kind`: with ours for a word of another engine, else with the nearest name."""
    known = [field.name for field in dataclasses.fields(kind)]
    if word in known:
        return
    if word in PYTHON_WORDS:
        raise BadOption(f"unknown option {word!r}: {PYTHON_WORDS[word]}")
    if word in OTHER_ENGINES:
        raise Unsupported(f"unknown option {word!r}: {OTHER_ENGINES[word]}")
    if word in SAMPLING_NAMES:
        raise BadOption(f"{word} is an option of a request, not of loading: give Sampling({word}=...) with the prompt")
    if word in LoadWords.__annotations__:
        raise BadOption(f"{word} is an option of loading, not of a request: LLM(model, {word}=...)")
    raise BadOption(f"unknown option {word!r}; known: {listing(word, known)}")


Options = TypeVar("Options", bound=type)
Loads = TypeVar("Loads", bound=Callable[..., None])


def with_known_words(kind: Options) -> Options:
    """A record whose unknown words are told what they are called here, which a TypeError would not tell."""
    made = kind.__init__  # type: ignore[misc]  # of this very class

    @functools.wraps(made)
    def init(self: Any, *values: Any, **words: Any) -> None:
        for old in words.keys() & OLD_NAMES.keys():
            new = OLD_NAMES[old]
            warnings.warn(f"the option {old} is now called {new}", DeprecationWarning, stacklevel=2)
            if words.get(new):
                raise BadOption(f"{old} and {new} are both given; {new} is the name of both")
            words[new] = words.pop(old)
        for word in words:
            check_word(kind, word)
        made(self, *values, **words)

    def refuse(_: Any, name: str, *__: object) -> None:  # that of a record with slots fails for a name it does not have
        raise dataclasses.FrozenInstanceError(f"cannot assign to {name!r}; dataclasses.replace makes a changed copy")

    kind.__init__ = init  # type: ignore[misc]
    kind.__setattr__ = kind.__delattr__ = refuse  # type: ignore[assignment]
    return kind


def _is_device(value: object) -> bool:
    if not isinstance(value, str):
        return False
    kind, _, number = value.partition(":")
    return value in ("auto", "cpu", "cuda") or (kind == "cuda" and number.isascii() and number.isdecimal())


def _several(option: str, value: object, wanted: str) -> tuple[Any, ...]:
    """One value, a list of them, or None for none, as a tuple: so that records stay hashable."""
    if value is None:
        return ()
    if isinstance(value, (str, int)):
        return (value,)
    if not isinstance(value, Iterable):
        raise BadOption(f"{option} is {value!r}; it must be {wanted}")
    return tuple(value)


def _schema_text(schema: Any) -> str | None:
    """A JSON schema as compact JSON text, its members in their order, which is also the order in the answer."""
    if schema is None:
        return None
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise BadOption(f"schema is no JSON that can be read: {why}") from error
    _check(isinstance(value, Mapping), "schema", value, 'a JSON object, as in {"type": "object"}')
    return text


@with_known_words
@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded and where it runs.

    >>> LoadOptions(device="cpu", context=4096).slots
    8

    Attributes:
        device: `auto` (a GPU if one can be used), `cpu`, `cuda` or `cuda:N`.
        mode: how the decode loop is paced: `auto` (the highest that can run), `eager`, `graph`, `loop`, `persistent`.
        dtype: of activations; `auto` is float32 on a CPU and bfloat16 on a GPU.
        kv_type: how keys and values are stored: `f32`, `bf16`, `f16`, `q8_0`; None follows `dtype`.
        context: tokens of prompt and answer together; None is the model's own, or what fits the memory.
        threads: on a CPU; None is one for each physical core.
        slots: requests that are decoded at once, at most 64.
        queue: requests that may wait for a slot.
        activations: what the CPU's native loop and the persistent kernel multiply weights with. `wide` keeps about
            15 bits of them beside quantised weights (on a GPU bfloat16), `int8` 8 bits, which is faster on a CPU. If
            neither runs, `int8` is refused.
        prompts: what prompts read under `persistent`: a `plain` copy of the weights, or the `tape`, which takes about
            half the memory; `auto` is plain if that fits. Other modes have no tape and refuse `tape`.

    Raises:
        BadOption: a value is out of range. A field is checked when the record is made.
    """

    device: str = "auto"
    mode: str = "auto"
    dtype: DType = "auto"
    kv_type: KVType | None = None
    context: int | None = None
    threads: int | None = None
    slots: int = DEFAULT_SLOTS
    queue: int = DEFAULT_QUEUE
    activations: Activations = "wide"
    prompts: Prompts = "auto"

    def __post_init__(self) -> None:
        _check(_is_device(self.device), "device", self.device, "auto, cpu, cuda or cuda:N")
        _check_word("mode", self.mode, ("auto", *MODES))
        _check_word("dtype", self.dtype, get_args(DType))
        if isinstance(self.kv_type, str) and self.kv_type.lower().startswith(_FP8_NAMES):
            raise Unsupported(f"kv_type is {self.kv_type!r}; FP8 caches are not supported: {_or(get_args(KVType))} are")
        if self.kv_type is not None:
            _check_word("kv_type", self.kv_type, get_args(KVType))
        if self.context is not None:
            _check_count("context", self.context, 1)
        if self.threads is not None:
            _check_count("threads", self.threads, 1, os.cpu_count() or 1, ", the cores of this machine")
        _check_count("slots", self.slots, 1, MAX_SLOTS)
        _check_count("queue", self.queue, 0)
        _check_word("activations", self.activations, get_args(Activations))
        _check_word("prompts", self.prompts, get_args(Prompts))


class LoadWords(TypedDict, total=False):
    """The options of `LoadOptions` as a call takes them one by one."""

    device: str
    mode: str
    dtype: DType
    kv_type: KVType | None
    context: int | None
    threads: int | None
    slots: int
    queue: int
    activations: Activations
    prompts: Prompts


def loads(function: Loads) -> Loads:
    """Mark a function whose `**options` are `LoadWords`: its signature shows them, for those who complete by it."""
    signature = inspect.signature(function)
    options = inspect.signature(LoadOptions, eval_str=True).parameters.values()
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    spelled = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in options]
    function.__signature__ = signature.replace(parameters=[*own, *spelled])  # type: ignore[attr-defined]
    return function


def load_options(load: LoadOptions | None, words: LoadWords) -> LoadOptions:
    """The options of a model, given as a record or one by one."""
    if load is None:
        return LoadOptions(**words)
    if not isinstance(load, LoadOptions):
        raise BadOption(f"load is {load!r}; it must be a LoadOptions, as in LLM(model, load=LoadOptions(context=4096))")
    if words:
        raise BadOption(f"load and {next(iter(words))} are both given; give all options in one of the two ways")
    return load


RuleKind = Literal["schema", "regex", "choice", "grammar"]


class MadeGrammar(str):
    """A grammar that this package made: of a caller's `tools`, or around a caller's `schema`, `regex` and so on.

    Refusals of it name those, since the caller wrote no grammar.
    """

    made_of: str

    def __new__(cls, text: str, made_of: str = "tools") -> Self:
        made = super().__new__(cls, text)
        made.made_of = made_of
        return made

    def check(self) -> None:
        """Refuse a text that is too long; BadOption."""
        if len(self) <= MAX_MADE_CHARACTERS:
            return
        n = f"{len(self)} characters as a grammar, and at most {MAX_MADE_CHARACTERS} can be followed"
        if self.made_of == "tools":
            raise BadOption(f"tools: their schemas together are too large: {n}; give fewer, or name one in tool_choice")
        raise BadOption(f"{self.made_of} is too large: {n}")


class Rule(NamedTuple):
    """The constraint on an answer, as text: a JSON schema, a regular expression, a JSON list of texts, or a grammar."""

    kind: RuleKind
    text: str

    @property
    def shown(self) -> str:
        """What the caller gave, as refusals name it."""
        made_of = self.text.made_of if isinstance(self.text, MadeGrammar) else self.kind
        return "tools: a grammar of their calls" if made_of == "tools" else f"this {made_of}"


_ANY_OBJECT = Rule("schema", '{"type":"object"}')


@dataclass(frozen=True, slots=True)
class SamplingNumber:
    """A number of `Sampling` that the device's sampler reads. Its check, its neutral value, the default of a model's
    files, its field in the slot table, its flag's help and its bounds over HTTP follow from this record."""

    name: str
    neutral: float  # the value that changes nothing
    low: float
    high: float
    help: str
    field: str  # of a slot (`loop/layout.py`)
    kind: Literal["int32", "float32"] = "float32"
    key: str | None = None  # of a GGUF file, after `general.sampling.`; None: a model's files have no default for it
    penalises: bool = False  # tokens that were there before
    remark: str = ""

    def check(self, value: Any) -> None:
        """Refuse a value that is not such a number within the bounds; None, where it was not set, passes."""
        whole = self.kind == "int32"
        is_known = _is_count(value, 0) if whole else _is_number(value)
        upto = f" to {self.high:g}" if self.high < math.inf else ""
        wanted = f"a {'whole ' if whole else ''}number from {self.low:g}{upto}{self.remark}"
        _check(value is None or (is_known and self.low <= value <= self.high), self.name, value, wanted)


SAMPLING_NUMBERS = (
    SamplingNumber("temperature", 0.0, 0, 100, "Temperature of sampling; 0 is greedy.", "temperature", key="temp"),
    SamplingNumber(
        "top_k",
        0,
        0,
        math.inf,
        "Sample from the N most likely tokens; 0 is off.",
        "top_k",
        "int32",
        key="top_k",
        remark=" (0 is off)",
    ),
    SamplingNumber(
        "top_p",
        1.0,
        0,
        1,
        "Sample from the most likely tokens that together have probability X; 1 is off.",
        "top_p",
        key="top_p",
    ),
    SamplingNumber(
        "min_p",
        0.0,
        0,
        1,
        "Sample from tokens at least X times as likely as the most likely one; 0 is off.",
        "min_p",
        key="min_p",
    ),
    SamplingNumber(
        "repetition_penalty",
        neutral=1.0,
        low=0.01,
        high=100,
        help="Divide the logits of tokens that were there before; 1 is off.",
        field="repetition",
        key="penalty_repeat",
        penalises=True,
        remark=" (1 is off)",
    ),
    SamplingNumber(
        "presence_penalty",
        0.0,
        -100,
        100,
        "Subtract X from the logits of tokens in the answer; 0 is off.",
        "presence",
        penalises=True,
    ),
    SamplingNumber(
        "frequency_penalty",
        0.0,
        -100,
        100,
        "Subtract X as often as the answer has the token; 0 is off.",
        "frequency",
        penalises=True,
    ),
)


@with_known_words
@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled. An option that is left out takes the model's own default if its files state one.

    >>> Sampling(max_tokens=64, temperature=0).temperature
    0
    >>> Sampling(schema={"type": "integer"}).rule
    Rule(kind='schema', text='{"type":"integer"}')

    Attributes:
        max_tokens: at most so many tokens; None continues until the model ends or the context is full.
        min_tokens: the model's end is not sampled before so many tokens.
        temperature: 0 is greedy: always the most likely token.
        top_k: sample among the k most likely tokens; 0 is off.
        top_p: sample among the most likely tokens that together have this probability; 1 is off.
        min_p: sample among tokens at least this times as likely as the most likely one; 0 is off.
        repetition_penalty: divides the logits of tokens that were there before, the prompt's included; 1 is off.
        presence_penalty: is subtracted from the logits of tokens that the answer has; 0 is off.
        frequency_penalty: is subtracted as often as the answer has the token; 0 is off.
        logit_bias: is added to the logits of these token ids, from -100 to 100.
        seed: the same seed gives the same tokens; None is a random one, which the completion states.
        stop: strings before which the answer ends, up to 16; they are not part of its text.
        stop_token_ids: token ids that end the answer.
        ignore_eos: continue after the model's end token.
        logprobs: the log-probability of each token, and so many of the most likely ones beside it, at most 20.
        schema: the answer is JSON that follows this JSON schema: a mapping, its text, or a pydantic model.
        json_mode: the answer is any JSON object.
        regex: the answer matches all of it.
        choice: the answer is one of these texts.
        grammar: the answer follows this grammar, in Lark or GBNF. At most one of the last five may be set.

    Raises:
        BadOption: an option is unknown, has a value out of range, or contradicts another.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: Sequence[str] = ()  # one text alone is a sequence too; kept as tuples, these and `choice`
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    schema: Mapping[str, Any] | str | type | None = None  # kept as JSON text
    json_mode: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _several("stop", self.stop, "strings"))
        object.__setattr__(self, "stop_token_ids", _several("stop_token_ids", self.stop_token_ids, "token ids"))
        bias = {} if self.logit_bias is None else self.logit_bias
        _check(isinstance(bias, Mapping), "logit_bias", bias, "a mapping of token ids to numbers")
        object.__setattr__(self, "logit_bias", dict(bias))
        object.__setattr__(self, "schema", _schema_text(self.schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _several("choice", self.choice, "texts"))
        self._check_limits()
        self._check_numbers()
        self._check_rules()

    def __repr__(self) -> str:
        """What was set, and nothing of the rest.

        >>> Sampling(max_tokens=64, stop="END")
        Sampling(max_tokens=64, stop=('END',))
        """
        default: dict[str, Any] = {
            one.name: {} if one.name == "logit_bias" else one.default for one in dataclasses.fields(self)
        }
        stated = {name: getattr(self, name) for name in default if getattr(self, name) != default[name]}
        return f"Sampling({', '.join(f'{name}={value!r}' for name, value in stated.items())})"

    @property
    def stop_ids(self) -> Sequence[int]:
        """The old name of `stop_token_ids`."""
        warnings.warn("stop_ids is now called stop_token_ids", DeprecationWarning, stacklevel=2)
        return self.stop_token_ids

    @property
    def rule(self) -> Rule | None:
        """The constraint on the answer; None if there is none."""
        if isinstance(self.schema, str):
            return Rule("schema", self.schema)
        if self.json_mode:
            return _ANY_OBJECT
        if self.regex is not None:
            return Rule("regex", self.regex)
        if self.choice:
            return Rule("choice", json.dumps(self.choice))
        return None if self.grammar is None else Rule("grammar", self.grammar)

    def _check_rules(self) -> None:
        _check(isinstance(self.json_mode, bool), "json_mode", self.json_mode, "True or False")
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None:
                _check_text(name, text)
        if self.choice is not None:
            if not self.choice:
                raise BadOption("choice has no texts; give one or more, or leave it out for a free answer")
            for text in self.choice:
                _check_text("choice", text)
        given = [name for name in ("schema", "json_mode", "regex", "choice", "grammar") if getattr(self, name)]
        if len(given) > 1:
            raise BadOption(f"{given[0]} and {given[1]} are both given; an answer follows one of them")
        rule = self.rule
        if isinstance(self.grammar, MadeGrammar):
            self.grammar.check()
        elif rule is not None and len(rule.text) > MAX_RULE_CHARACTERS:
            raise BadOption(
                f"{given[0]} is a text of {len(rule.text)} characters; at most {MAX_RULE_CHARACTERS} can be followed"
            )

    def _check_limits(self) -> None:
        most, seed = self.max_tokens, self.seed
        if most is not None:
            _check_count("max_tokens", most, 1)
        _check_count("min_tokens", self.min_tokens, 0)
        fits = most is None or self.min_tokens <= most
        _check(fits, "min_tokens", self.min_tokens, f"at most max_tokens ({most})")
        for text in self.stop:
            _check_text("stop", text)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise BadOption(f"stop has {len(self.stop)} texts; at most {MAX_STOP_STRINGS} are allowed")
        for token in self.stop_token_ids:
            _check(_is_count(token), "stop_token_ids", token, "a token id")
        _check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        _check(seed is None or _is_count(seed, 0, MAX_SEED), "seed", seed, "a whole number from 0 to 2^63-1")
        if self.logprobs is not None:
            _check_count("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def _check_numbers(self) -> None:
        for number in SAMPLING_NUMBERS:
            number.check(getattr(self, number.name))
        for token, bias in self.logit_bias.items():
            _check(_is_count(token, 0), "logit_bias", token, "keyed by token id")
            _check(_is_number(bias) and -100 <= bias <= 100, "logit_bias", bias, "a number from -100 to 100")

    def check_ids(self, vocab: int) -> None:
        """Refuse token ids beyond a model's vocabulary."""
        for name in ("logit_bias", "stop_token_ids"):
            largest = max(getattr(self, name), default=0)
            if largest >= vocab:
                raise BadInput(f"{name} has the token id {largest}; this model has ids from 0 to {vocab - 1}")

    def over(self, defaults: Sampling) -> Sampling:
        """These options, with `defaults` (the model's own) for those that the user did not set."""
        said = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return dataclasses.replace(defaults, **{k: v for k, v in said.items() if v is not None})


SAMPLING_NAMES = frozenset(field.name for field in dataclasses.fields(Sampling))

# Where neither the user nor the model's files say: the most likely token, nothing filtered, nothing penalised.
_NEUTRAL_WORDS: Any = {number.name: number.neutral for number in SAMPLING_NUMBERS}
NEUTRAL = Sampling(**_NEUTRAL_WORDS)
