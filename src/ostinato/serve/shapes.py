"""The bodies that clients may send, as records: parsed once here, and the source of the OpenAPI document.

A field that is accepted is honoured, or is listed in `HARMLESS` or `NOTED`; any other is refused by its name, unless
its value changes nothing (`NEUTRAL`, or null). Nothing here knows how an answer is computed.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from ostinato.errors import listing
from ostinato.options import MAX_LOGPROBS, MAX_SEED, MAX_STOP_STRINGS, SAMPLING_NUMBERS, Sampling
from ostinato.other_engines import answer_field
from ostinato.serve.body import FailFastModel
from ostinato.serve.errors import Refusal, shown
from ostinato.text.tools import MAX_NAME

# Accepted and ignored: nothing of an answer would change.
HARMLESS: Final = frozenset(
    {
        *("client_metadata", "max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
    }
)
# Values that request the existing behaviour; any other value of these fields is refused.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "audio": ({},),
    "background": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "cfg_scale": (1,),
    "detokenize": (True,),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guidance_scale": (1,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "modalities": (["text"],),
    "n_keep": (0,),
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "repeat_last_n": (-1,),
    "skip_special_tokens": (True,),
    "smoothing_factor": (0,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "typ_p": (1,),
    "typical": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "xtc_probability": (0,),
}
# Parameters of what the fields above turn off: they have no effect there.
TURNED_OFF: Final = frozenset(
    {
        *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
        *("mirostat_eta", "mirostat_tau", "smoothing_curve", "xtc_threshold"),
    }
)
# What to send instead of a field of another API.
INSTEAD: Final[Mapping[str, str]] = {
    "enable_thinking": 'send chat_template_kwargs {"enable_thinking": ...}, which reaches the chat template',
    "extra_body": "it is a parameter of the openai package; put its fields into the body itself",
    "format": "it is of Ollama's API; send response_format",
    "function_call": "send tool_choice, with tools",
    "functions": 'send tools, each {"type": "function", "function": ...}',
    "options": "it is of Ollama's API; put its fields into the body itself",
    "reasoning": "send reasoning_effort; reasoning is of /v1/responses",
    "system": "send a message of the role system; system is of /v1/messages and /api/generate",
    "think": "send reasoning_effort; think is of Ollama's API",
    "thinking": "send reasoning_effort; thinking is of /v1/messages",
}
# Accepted, because an answer has the same tokens; a value other than these has no effect, and a header says so.
NOTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "cache_prompt": (True,),
    "keep_alive": (),
    "priority": (0,),
    "timings_per_token": (False,),
}
# Fields that other engines have, and what each is called here; for a format, the field of `Sampling`.
ALIASES: Final[Mapping[str, str]] = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
FORMAT_ALIASES: Final[Mapping[str, str]] = {
    "grammar": "grammar",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "schema",
    "guided_regex": "regex",
    "json_schema": "schema",
}
_UNREAD: Final = frozenset({*HARMLESS, *NOTED, *TURNED_OFF})
LONGEST_STOP: Final = 1024
UNTIL_IT_ENDS: Final = "By default an answer continues until the model ends it or the context is full."

# Clients write these for "not given".
_MINUS_ONE: Final = BeforeValidator(lambda value: None if _same(value, -1) else value)
_EMPTY: Final = BeforeValidator(lambda value: None if value == "" else value)

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MostTokens = Annotated[
    Annotated[int, Field(ge=1, description=f"{UNTIL_IT_ENDS} -1 is as if it were not given.")] | None, _MINUS_ONE
]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
StopStrings = Annotated[StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None, _EMPTY]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Role = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z_]+$")]
# A word of a client that is repeated in a header.
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
FunctionName = Annotated[str, StringConstraints(pattern=rf"^[A-Za-z0-9_.-]{{1,{MAX_NAME}}}$")]


class Strict(FailFastModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


class Sent(FailFastModel):
    """A part of a body that a client may have received from a server: fields that it does not name are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


def type_of(value: Any) -> Any:
    """The `type` of a part of a body, by which its branch of a union is chosen.

    The names of branches are in upper case: the path of a field in an error leaves them out.
    """
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


class Part(Strict):
    """A typed part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


class Body(FailFastModel):
    """What all bodies share: unknown fields are refused by name."""

    model_config = ConfigDict(
        strict=True, allow_inf_nan=False, extra="allow", json_schema_extra={"additionalProperties": False}
    )

    names_unknown: ClassVar[bool] = False  # unknown fields are not refused, but named in a header

    model: str | None = None

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Body:
        if self.names_unknown:
            return self
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _UNREAD or _is_one_of(value, NEUTRAL.get(name, ())):
                continue
            if answer := self._instead(name):
                raise Refusal(400, f"{name} is not supported here: {answer}", param=name)
            if name in NEUTRAL:
                raise Refusal(400, f"{name} is {shown(value)}; that is not supported here", param=name)
            raise Refusal(
                400, f"{name} is not supported here; known: {listing(name, type(self).model_fields)}", param=name
            )
        return self

    @classmethod
    def _instead(cls, name: str) -> str | None:
        """What to send instead of a field; None if that is not known."""
        if name in INSTEAD and "messages" in cls.model_fields:
            return INSTEAD[name]
        return answer_field(name, cls.model_fields)

    @property
    def ignored(self) -> list[str]:
        """The fields that were accepted and have no effect."""
        given = self.model_extra or {}
        return [
            name
            for name, neutral in NOTED.items()
            if given.get(name) is not None and not _is_one_of(given[name], neutral)
        ]


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(_same(value, one) for one in values)


def _same(value: Any, neutral: Any) -> bool:
    # A bool is not an integer here, and 1.0 counts as 1.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


class FunctionCall(Strict):
    """The function of a call that a model has made: its arguments are JSON as text."""

    name: str
    arguments: str


class MadeCall(FailFastModel):
    """A call that a model has made."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(FailFastModel):
    """One message of a conversation: text, or typed parts of text."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"additionalProperties": False})

    role: Role
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="Another name of `reasoning_content`.")

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Message:
        for name, value in (self.model_extra or {}).items():
            # Clients send back the messages that they received, with absent fields as null or empty.
            if value not in (None, [], {}, ""):
                answer = answer_field(name, ())
                why = f": {answer}" if answer else ""
                raise Refusal(400, f"messages[].{name} is not supported here{why}", param=f"messages.{name}")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template expects it."""
        made = self.model_dump(exclude_none=True, exclude={"reasoning", *(self.model_extra or ())})
        if self.reasoning is not None:
            made.setdefault("reasoning_content", self.reasoning)
        if self.content is None and "content" in self.model_fields_set and not self.tool_calls:
            made["content"] = ""  # null was given, and nothing else is in its place
        if self.role == "developer":
            made["role"] = "system"  # OpenAI's newer name for it; templates use the old one
        return made


class JsonSchema(FailFastModel):
    """A named schema, as OpenAI wraps it."""

    model_config = ConfigDict(strict=True, extra="forbid", serialize_by_alias=True)

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    type: Literal["json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Strict):
    """An extension: the answer is a match of a regular expression."""

    type: Literal["regex"]
    regex: Annotated[str, Field(min_length=1)]


class ChoiceFormat(Strict):
    """An extension: the answer is one of these texts."""

    type: Literal["choice"]
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class GrammarFormat(Strict):
    """An extension: the answer follows a grammar, in Lark or GBNF."""

    type: Literal["grammar"]
    grammar: Annotated[str, Field(min_length=1)]


class StructuredOutputs(Strict):
    """vLLM's name for a format: one of these."""

    model_config = ConfigDict(serialize_by_alias=True)

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    # What vLLM's own clients send beside it; JSON is compact here, and no other parser is tried.
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


ResponseFormat = Annotated[
    TextFormat | JsonFormat | SchemaFormat | RegexFormat | ChoiceFormat | GrammarFormat, Field(discriminator="type")
]


def _bounds(name: str) -> Any:
    """The bounds of a number of `Sampling`."""
    number = next(number for number in SAMPLING_NUMBERS if number.name == name)
    return Field(ge=number.low, le=min(number.high, 2**31 - 1))


class StreamOptions(Strict):
    """What a stream carries beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # harmless: nothing here needs hiding by padding


def check_same(alias: str, value: Any, name: str, other: Any) -> None:
    """Refuse two names of one field with two values; one that is not given is None."""
    if value is not None and other is not None and value != other:
        values = f"{alias} is {shown(value)} and {name} is {shown(other)}"
        raise Refusal(400, f"{values}; they are two names of one field, so send one of them", param=alias)


class SamplingBody(Body):
    """The fields that every body with an answer shares: how its tokens are sampled, and whether it is streamed."""

    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, _bounds("temperature")] | None = None
    top_p: Annotated[float, _bounds("top_p")] | None = None
    top_k: Annotated[Annotated[int, _bounds("top_k")] | None, _MINUS_ONE] = None
    min_p: Annotated[float, _bounds("min_p")] | None = None
    stop: StopStrings = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: Annotated[Annotated[int, Field(ge=0, le=MAX_SEED)] | None, _MINUS_ONE] = None
    presence_penalty: Annotated[float, _bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _bounds("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, _bounds("repetition_penalty")] | None = None
    repeat_penalty: Annotated[float, _bounds("repetition_penalty")] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        """The limit of generated tokens, if the request sets one."""
        return None

    @property
    def n_logprobs(self) -> int | None:
        """How many of the likeliest tokens are listed beside each; None for no logprobs at all."""
        return None

    @property
    def format(self) -> ResponseFormat | None:
        """The format that the answer must have."""
        return None

    @model_validator(mode="after")
    def _read_aliases(self) -> SamplingBody:
        for alias, name in ALIASES.items():
            if (value := getattr(self, alias, None)) is not None:
                check_same(alias, value, name, getattr(self, name))
                setattr(self, name, value)
        return self

    def sampling(self) -> Sampling:
        """The sampling options of the body; without a seed, a random one, so that each of `n` answers has its own."""
        same = {field.name for field in dataclasses.fields(Sampling)} & type(self).model_fields.keys()
        same -= FORMAT_ALIASES.keys()
        stated = {name: value for name in same if (value := getattr(self, name)) is not None}
        own = {
            "max_tokens": self.most_tokens,
            "seed": secrets.randbits(53) if self.seed is None else self.seed,
            "logit_bias": self._bias(),
            "logprobs": self.n_logprobs,
        }
        return Sampling(**{**stated, **own, **self._constraint()})

    def _bias(self) -> dict[int, float]:
        bias: dict[int, float] = {}
        for word, value in (self.logit_bias or {}).items():
            if not (word.isascii() and word.isdecimal() and len(word) < 10):
                raise Refusal(400, f"logit_bias has the key {shown(word)}; keys are token ids", param="logit_bias")
            bias[int(word)] = value
        return bias

    def _constraint(self) -> dict[str, Any]:
        """The constraint on the answer, as fields of a `Sampling`."""
        match self.format:
            case None | TextFormat():
                return {}
            case JsonFormat():
                return {"json_mode": True}
            case SchemaFormat(json_schema=wrapped):
                if wrapped.schema_ is None:
                    message = "response_format.json_schema has no schema"
                    raise Refusal(400, message, param="response_format.json_schema.schema")
                return {"schema": json.dumps(wrapped.schema_)}
            case other:
                return other.model_dump(exclude={"type"})


class OpenAIBody(SamplingBody):
    """The fields that OpenAI's bodies with an answer share."""

    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> OpenAIBody:
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "stream_options is for a stream; set stream to true", param="stream_options")
        return self


class GenerationBody(OpenAIBody):
    """The fields that chats and completions share."""

    max_tokens: MostTokens = None
    n_predict: MostTokens = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    response_format: ResponseFormat | None = None
    grammar: Annotated[str | None, _EMPTY] = None
    json_schema: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Annotated[str | None, _EMPTY] = None
    guided_choice: list[str] | None = None
    guided_grammar: Annotated[str | None, _EMPTY] = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def format(self) -> ResponseFormat | None:
        formats = self._formats()
        if len(formats) > 1:
            first, second, *_ = formats
            raise Refusal(400, f"{first} and {second} are both given; an answer has one format", param=second)
        return next(iter(formats.values()), None)

    @property
    def renamed(self) -> dict[str, str]:
        """The field that the format was given by, if it is another than `response_format`."""
        name = next(iter(self._formats()), "response_format")
        return {} if name == "response_format" else {"response_format": name}

    def _formats(self) -> dict[str, ResponseFormat]:
        """The formats that are given, by the names of their fields."""
        found: dict[str, ResponseFormat] = {}
        if self.response_format is not None and not isinstance(self.response_format, TextFormat):
            found["response_format"] = self.response_format
        for name, kind in FORMAT_ALIASES.items():
            if (value := getattr(self, name)) is not None:
                found[name] = _format_of(kind, value, name)
        for name, value in (self.structured_outputs or StructuredOutputs()).model_dump(exclude_none=True).items():
            kind = "schema" if name == "json" else name
            if kind in FORMAT_ALIASES.values() or (name == "json_object" and value):
                found[f"structured_outputs.{name}"] = _format_of(kind, value, f"structured_outputs.{name}")
        return found


def _format_of(kind: str, value: Any, field: str) -> ResponseFormat:
    """A format as other engines write it; a schema may be its JSON text."""
    if kind == "schema":
        try:
            schema = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, dict):
            raise Refusal(400, f"{field} is no JSON schema; it must be an object, or its JSON text", param=field)
        return SchemaFormat(type="json_schema", json_schema=JsonSchema(schema=schema))
    if kind == "json_object":
        return JsonFormat(type="json_object")
    if not value or not all(value):
        raise Refusal(400, f"{field} is empty, or an entry of it is; leave it out, or fill it", param=field)
    if kind == "regex":
        return RegexFormat(type="regex", regex=value)
    if kind == "choice":
        return ChoiceFormat(type="choice", choice=value)
    return GrammarFormat(type="grammar", grammar=value)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: MostTokens = None
    reasoning_effort: Effort | None = None
    verbosity: Annotated[str, Field(max_length=64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = Field(
        default=None, description="Continue the text of the last message, the assistant's; by default where it is free."
    )
    add_generation_prompt: bool | None = Field(default=None, description="The opposite of `continue_final_message`.")

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return self

    @model_validator(mode="after")
    def _check_limits(self) -> ChatBody:
        check_same("max_completion_tokens", self.max_completion_tokens, "max_tokens", self.max_tokens)
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Texts = (
    str
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[TokenIds], Field(min_length=1)]
)


def several(given: Any) -> list[str | list[int]]:
    """A text, token ids, or a list of either, as a list."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`. A prompt is a text, token ids, or a list of either."""

    prompt: Texts
    max_tokens: Annotated[
        Annotated[int, Field(ge=0, description=f"0 generates nothing: a prompt is echoed, and scored. {UNTIL_IT_ENDS}")]
        | None,
        _MINUS_ONE,
    ] = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise Refusal(
                400, "max_tokens is 0, and nothing is to be echoed; ask for a token, or echo", param="max_tokens"
            )
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens or None

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs


class EmbeddingBody(Body):
    """`POST /v1/embeddings`. An input is a text, token ids, or a list of either."""

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = Field(default=None, description="A prompt of the model's files, put before each text.")


class RerankDocument(Strict):
    """A document as an object."""

    text: str


class RerankBody(Body):
    """`POST /v1/rerank`."""

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | RerankDocument], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=1)] | None = Field(default=None, description="How many; by default all of them.")
    return_documents: bool | None = Field(default=None, description="False leaves the documents' texts out.")
    prompt_name: str | None = Field(default=None, description="A prompt of the model's files, such as an instruction.")


class TokenizeBody(Body):
    """`POST /tokenize`: a `content` as llama.cpp's server takes it, or a `prompt` as vLLM's does."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool = Field(default=False, description="Put BOS and EOS around it, as the model's files say.")
    add_special_tokens: bool = Field(default=True, description="The same for a `prompt`.")
    parse_special: bool = Field(default=False, description="Take the names of control tokens for the tokens.")
    with_pieces: bool = Field(default=False, description="The text of each token too, as `pieces`.")
    return_token_strs: bool = Field(default=False, description="The same, as `token_strs`.")

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeBody:
        if self.content is not None and self.prompt is not None:
            raise Refusal(400, "prompt and content are both given; give one of them", param="prompt")
        if self.content is None and self.prompt is None:
            raise Refusal(400, "content is missing, and it is required here; or give a prompt instead", param="content")
        return self

    @property
    def text(self) -> str:
        return self.prompt or "" if self.content is None else self.content

    @property
    def adds_special(self) -> bool:
        return self.add_special_tokens if self.content is None else self.add_special


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: list[TokenId]


class TemplateBody(Body):
    """`POST /apply-template`: render a conversation as a prompt."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
