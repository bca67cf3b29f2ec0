"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, as records, and their translation to messages.

Parsed once here, and the source of the OpenAPI document, as `shapes.py` is for the other endpoints. Unknown fields are
ignored, and so are `cache_control` and the billing header: they change from turn to turn and would hide that a
conversation begins as an earlier one did.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from ostinato.options import MAX_STOP_STRINGS, Sampling
from ostinato.serve.errors import NO_THREADS, Refusal
from ostinato.serve.sealed import unsealed
from ostinato.serve.shapes import (
    FunctionName,
    JsonSchema,
    ResponseFormat,
    SamplingBody,
    SchemaFormat,
    Sent,
    StopString,
    Word,
    check_same,
    type_of,
)
from ostinato.text.tools import TemplateMessage

_BILLING: Final = "x-anthropic-billing-header:"


def is_billing(block: Any) -> bool:
    """Whether a block of a body as it was sent is for the provider's accounts and no part of the prompt.

    >>> is_billing({"type": "text", "text": "x-anthropic-billing-header: cch=1;"}), is_billing("be brief")
    (True, False)
    """
    text = block.get("text") if isinstance(block, dict) else getattr(block, "text", None)
    return isinstance(text, str) and text.startswith(_BILLING)


# Blocks


class TextContent(Sent):
    type: Literal["text"]
    text: str


class ThinkingContent(Sent):
    """What a model has thought; without the text, if that was omitted, the signature holds it."""

    type: Literal["thinking"]
    thinking: str = ""
    signature: str = ""


class RedactedContent(Sent):
    """Reasoning that only its own server can read."""

    type: Literal["redacted_thinking"]


class ToolUseContent(Sent):
    """A call that a model has made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OtherContent(Sent):
    """A block that is refused by the name of its type: an image, a document, the result of a server's tool."""

    type: Word


def _one_of(*names: str) -> Discriminator:
    """Chooses the branch of a block by its type, and `OTHER` for types that are not named."""

    def branch(block: Any) -> str:
        kind = type_of(block)
        return kind.upper() if kind in names else "OTHER"

    return Discriminator(branch)


Text: TypeAlias = Annotated[
    Annotated[TextContent, Tag("TEXT")] | Annotated[OtherContent, Tag("OTHER")],
    _one_of("text"),
]


class ToolResultContent(Sent):
    """What a call brought."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Text] | None = None
    is_error: bool | None = None


Block: TypeAlias = Annotated[
    Annotated[TextContent, Tag("TEXT")]
    | Annotated[ThinkingContent, Tag("THINKING")]
    | Annotated[RedactedContent, Tag("REDACTED_THINKING")]
    | Annotated[ToolUseContent, Tag("TOOL_USE")]
    | Annotated[ToolResultContent, Tag("TOOL_RESULT")]
    | Annotated[OtherContent, Tag("OTHER")],
    _one_of("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]


class SentMessage(Sent):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> Sequence[Block]:
        if isinstance(self.content, str):
            return [TextContent(type="text", text=self.content)]
        return self.content


# Tools


class CustomTool(Sent):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]


class ServerTool(Sent):
    """A tool without a schema, which only Anthropic's servers or models know: it is left out, and named in a header."""

    type: Word


def _kind_of_tool(tool: Any) -> str:
    return "CUSTOM" if type_of(tool) in (None, "custom") else "SERVER"


MessagesTool: TypeAlias = Annotated[
    Annotated[CustomTool, Tag("CUSTOM")] | Annotated[ServerTool, Tag("SERVER")], Discriminator(_kind_of_tool)
]


class MessagesToolChoice(Sent):
    """Whether the model must call a tool, or which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


# The bodies


class ThinkingOptions(Sent):
    """Whether the model reasons before it answers. A budget has no effect."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputSchema(Sent):
    """A schema that the answer follows."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputOptions(Sent):
    """How much the model reasons, and the form of the answer's text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchema | None = None


class CountBody(SamplingBody):
    """`POST /v1/messages/count_tokens`: all that a prompt is made of."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})

    messages: Annotated[list[SentMessage], Field(min_length=1)]
    system: str | list[Text] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    thread: dict[str, Any] | None = Field(default=None, description="Refused: no conversation is kept here.")
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def format(self) -> ResponseFormat | None:
        given = None if self.output_config is None else self.output_config.format
        if given is None:
            return None
        return SchemaFormat(type="json_schema", json_schema=JsonSchema(schema=given.schema_))


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None

    @model_validator(mode="after")
    def _check_stop(self) -> MessagesBody:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        check_same("stop", stop, "stop_sequences", self.stop_sequences)
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    def sampling(self) -> Sampling:
        sampling = super().sampling()
        return sampling if self.stop_sequences is None else replace(sampling, stop=tuple(self.stop_sequences))


# Into messages


def messages_of(body: CountBody) -> list[TemplateMessage]:
    """The conversation as chat templates expect it."""
    if body.thread is not None:
        # Ignored, it would cost a client its conversation: it would send only what is new from now on.
        told = "thread: messages are not kept here; send the whole conversation with each request"
        raise Refusal(400, told, param="thread", code=NO_THREADS)
    messages: list[TemplateMessage] = []
    if system := _system(body.system):
        messages.append({"role": "system", "content": system})
    called: set[str] = set()
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        if message.role == "assistant":
            made = _of_model(message.blocks, f"{where}.content")
            called |= {call["id"] for call in made.get("tool_calls", ())}
            _add(messages, made)
        else:
            for made in _of_client(message, where, called):
                _add(messages, made)
    return messages


def _system(given: str | Sequence[Text] | None) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    return _text([block for block in given if not is_billing(block)], "system")


def _text(blocks: Sequence[Text], where: str) -> str:
    """The text of blocks; they are joined as the parts of a chat's message are."""
    return "\n".join(
        block.text if isinstance(block, TextContent) else _refuse(block, f"{where}[{index}]")
        for index, block in enumerate(blocks)
    )


def _refuse(block: Any, where: str) -> Any:
    kind = block.type
    if kind in ("image", "document"):
        why = f"this model reads no {kind}s, only text"
    else:
        why = "a block of this type cannot be here; leave it out"
    raise Refusal(400, f"{where} is of the type {kind!r}; {why}", param=where)


def _of_model(blocks: Sequence[Block], where: str) -> TemplateMessage:
    """A message of the model."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        match block:
            case TextContent(text=text):
                texts.append(text)
            case ThinkingContent(thinking=thought, signature=signature):
                thoughts.append(thought or unsealed(signature, f"{where}[{index}].signature"))
            case RedactedContent():
                pass  # what it says is unknown here
            case ToolUseContent(id=id, name=name, input=arguments):
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": id, "type": "function", "function": function})
            case _:
                _refuse(block, f"{where}[{index}]")
    made: TemplateMessage = {"role": "assistant"}
    if texts or not calls:
        made["content"] = "".join(texts)
    if thought := "".join(thoughts):
        made["reasoning_content"] = thought
    return made | ({"tool_calls": calls} if calls else {})


def _of_client(message: SentMessage, where: str, called: set[str]) -> Iterator[TemplateMessage]:
    """The messages in one of the client's: results of calls, and texts between them."""
    if not message.blocks:
        raise Refusal(400, f"{where}.content is empty; give it a block or a text", param=f"{where}.content")
    texts: list[str] = []
    for index, block in enumerate(message.blocks):
        place = f"{where}.content[{index}]"
        match block:
            case TextContent(text=text):
                texts.append(text)
            case ToolResultContent(tool_use_id=id) if message.role == "user":
                if id not in called:
                    told = f"{place} is the result of the call {id!r}, and no tool_use before it has this id"
                    raise Refusal(400, told, param=place)
                if texts:
                    yield {"role": "user", "content": "\n".join(texts)}
                    texts = []
                yield {"role": "tool", "tool_call_id": id, "content": _result(block, f"{place}.content")}
            case _:
                _refuse(block, place)
    if texts:
        yield {"role": message.role, "content": "\n".join(texts)}


def _result(block: ToolResultContent, where: str) -> str:
    content = block.content or ""
    text = content if isinstance(content, str) else _text(content, where)
    # Templates know no failed call: the text says it.
    return f"Error: {text}" if block.is_error else text


def _add(messages: list[TemplateMessage], made: TemplateMessage) -> None:
    """Add a message. Texts of one role that follow each other become one message: many templates take no second."""
    last = messages[-1] if messages else {}
    if last.get("role") == made["role"] and "content" in last and made.keys() == last.keys() == {"role", "content"}:
        messages[-1] = {**last, "content": f"{last['content']}\n\n{made['content']}"}
    else:
        messages.append(made)
