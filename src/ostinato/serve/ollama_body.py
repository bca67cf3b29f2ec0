"""The bodies of Ollama's API, as records, and their translation to messages.

Parsed once here, and the source of the OpenAPI document, as `shapes.py` is for the other endpoints. Ollama ignores what
it does not know; here a header names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from ostinato.options import MAX_LOGPROBS, Sampling
from ostinato.serve.errors import Refusal
from ostinato.serve.shapes import (
    Body,
    FunctionCall,
    MadeCall,
    Message,
    MostTokens,
    Role,
    SamplingBody,
    Sent,
    check_same,
)
from ostinato.text.tools import TemplateMessage

# An object with one of these may have properties that it does not name.
_OPEN: Final = frozenset({"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"})
_NO_IMAGES: Final = "this model reads no images, only text; leave them out"


def _unknown(body: Body) -> list[str]:
    """The fields of a body that are not known here, as a header can name them."""
    given = {name for name, value in (body.model_extra or {}).items() if value is not None}
    return [re.sub("[^A-Za-z0-9_.-]", "?", name)[:64] for name in sorted(given)]


# Options


class OllamaOptions(SamplingBody):
    """Sampling options: by Ollama's names, by ours, and what a chat has beyond them.

    Clients of Ollama can send fields of their own only here.
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    names_unknown: ClassVar[bool] = True

    num_predict: int | None = Field(default=None, description="At most so many tokens; below 1 there is no limit.")
    num_ctx: int | None = Field(default=None, description="No effect: the server's operator sets the context.")
    max_tokens: MostTokens = None
    n_predict: MostTokens = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_limit(self) -> OllamaOptions:
        if self.num_predict is not None:
            check_same("num_predict", max(0, self.num_predict), "max_tokens", self.max_tokens)
        return self

    @property
    def most_tokens(self) -> int | None:
        if self.num_predict is None:
            return self.max_tokens
        return self.num_predict if self.num_predict > 0 else None

    def without_effect(self, context: int) -> list[str]:
        """The options that have no effect on a model of this context."""
        given = [name for name in ("model", "stream") if getattr(self, name) is not None]  # they are no options
        given += ["num_ctx"] if self.num_ctx not in (None, context) else []
        return [f"options.{name}" for name in (*given, *_unknown(self))]


# Bodies


class OllamaBody(Body):
    """What all bodies of Ollama's API share."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    names_unknown: ClassVar[bool] = True

    options: OllamaOptions | None = None
    keep_alive: float | str | None = Field(
        default=None, description="No effect: a model leaves memory only when another needs the room."
    )

    @property
    def wanted(self) -> OllamaOptions:
        """The options; none if none were given."""
        return self.options or OllamaOptions()

    def without_effect(self, context: int) -> list[str]:
        """The fields that have no effect on a model of this context."""
        kept = [] if self.keep_alive is None else ["keep_alive"]
        return [*kept, *_unknown(self), *self.wanted.without_effect(context)]


class AnswerBody(OllamaBody):
    """What bodies with an answer share."""

    stream: bool | None = Field(default=None, description="True by default.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(default=None, description="`json`, or a schema.")
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    truncate: bool | None = Field(default=None, description="False: a conversation that is too long is refused.")
    shift: bool | None = Field(default=None, description="True has no effect: a full context ends an answer.")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def sampling(self) -> Sampling:
        """The sampling options, with the format of the answer."""
        sampling = self.wanted.sampling()
        if self.logprobs:
            sampling = replace(sampling, logprobs=self.top_logprobs or 0)
        if self.format == "json":
            return replace(sampling, json_mode=True)
        return replace(sampling, schema=json.dumps(closed(self.format))) if self.format else sampling

    def without_effect(self, context: int) -> list[str]:
        return [*super().without_effect(context), *(["shift"] if self.shift else [])]

    @property
    def is_raw(self) -> bool:
        """Whether the prompt is continued as it is."""
        return False

    def conversation(self) -> list[TemplateMessage]:
        """The conversation as chat templates expect it; empty if there is nothing to answer."""
        raise NotImplementedError


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, changed: its objects take no other properties than they name, which is how Ollama reads schemas.

    >>> closed({"properties": {"a": {"items": {"properties": {}}}}})
    {'properties': {'a': {'items': {'properties': {}, 'additionalProperties': False}}}, 'additionalProperties': False}
    """
    left: list[Any] = [schema]
    while left:
        one = left.pop()
        if not isinstance(one, dict):
            continue
        if "properties" in one and not _OPEN & one.keys():
            one["additionalProperties"] = False
        for name in ("properties", "$defs", "definitions"):
            left += one[name].values() if isinstance(one.get(name), dict) else ()
        for name in ("anyOf", "oneOf", "prefixItems"):
            left += one[name] if isinstance(one.get(name), list) else ()
        left.append(one.get("items"))
    return schema


class OllamaFunction(Sent):
    """The function of a call that a model has made."""

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)

    @property
    def text(self) -> str:
        """The arguments as JSON."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


class OllamaCall(Sent):
    """A call that a model has made."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Sent):
    """One message of a conversation."""

    role: Role
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = Field(default=None, description="Refused.")
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(AnswerBody):
    """`POST /api/chat`. Without messages nothing is generated."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None

    def conversation(self) -> list[TemplateMessage]:
        made: list[TemplateMessage] = []
        waiting: dict[str, str] = {}  # the names of calls without a result, by the ids of the calls
        for index, message in enumerate(self.messages or ()):
            if message.images:
                raise Refusal(400, f"messages[{index}].images: {_NO_IMAGES}", param=f"messages[{index}].images")
            calls = [
                MadeCall(
                    id=call.id or f"call_{index}_{number}",
                    function=FunctionCall(name=call.function.name, arguments=call.function.text),
                )
                for number, call in enumerate(message.tool_calls or ())
            ]
            waiting |= {call.id or "": call.function.name for call in calls}
            answered = None
            if message.role.lower() == "tool":
                answered = message.tool_call_id or _answered(waiting, message.tool_name)
                waiting.pop(answered or "", None)
            translated = Message(
                role=message.role.lower(),
                content=message.content if calls else message.content or "",
                name=message.tool_name,
                tool_calls=calls or None,
                tool_call_id=answered,
                reasoning_content=message.thinking or None,
            )
            made.append(translated.for_template())
        return made


def _answered(waiting: dict[str, str], name: str | None) -> str | None:
    """The id of the call whose result has no id: the first that waits, of this name if the result has one.

    >>> _answered({"a": "look", "b": "go", "c": "go"}, "go"), _answered({"a": "look"}, None), _answered({}, "go")
    ('b', 'a', None)
    """
    return next((id for id, called in waiting.items() if name in (None, called)), None)


class GenerateBody(AnswerBody):
    """`POST /api/generate`. Without a prompt nothing is generated."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(default=None, description="The prompt is continued as it is, without a chat template.")
    suffix: str | None = Field(default=None, description="Refused.")
    template: str | None = Field(default=None, description="Refused.")
    context: list[int] | None = Field(default=None, description="Refused.")
    images: list[Any] | None = Field(default=None, description="Refused.")

    @property
    def is_raw(self) -> bool:
        return bool(self.raw)

    def without_effect(self, context: int) -> list[str]:
        """A raw prompt meets no template, no parser and no truncation."""
        given = super().without_effect(context)
        if self.is_raw:
            given += [] if self.think is None else ["think"]
            given += ["truncate"] if self.truncate else []
            unread = ("tool_choice", "parallel_tool_calls", "chat_template_kwargs")
            given += [f"options.{name}" for name in unread if getattr(self.wanted, name) is not None]
        return given

    def conversation(self) -> list[TemplateMessage]:
        self._refuse(
            {
                "images": _NO_IMAGES,
                "suffix": "text before a suffix cannot be generated here; leave it out",
                "template": "the model's own chat template is used; send raw true with a prompt that is rendered",
                "context": "tokens of earlier answers are not taken back; send the conversation to /api/chat",
            }
        )
        if self.raw:
            self._refuse({"system": "a raw prompt has no system message; put it into the prompt"})
        if not self.prompt:
            return []
        system: list[TemplateMessage] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]

    def _refuse(self, fields: dict[str, str]) -> None:
        for name, why in fields.items():
            if getattr(self, name):
                raise Refusal(400, f"{name}: {why}", param=name)


class EmbedBody(OllamaBody):
    """`POST /api/embed`."""

    input: str | list[str] | None = None
    truncate: bool | None = Field(default=None, description="False: a text that is too long is refused.")
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def texts(self) -> Sequence[str]:
        """The texts; none if one empty text was given."""
        return self.input if isinstance(self.input, list) else [self.input] if self.input else []


class OldEmbedBody(OllamaBody):
    """`POST /api/embeddings`, Ollama's older form."""

    prompt: str | None = None


class ShowBody(OllamaBody):
    """`POST /api/show`."""

    name: str | None = Field(default=None, description="An older name of `model`.")
    verbose: bool | None = None
