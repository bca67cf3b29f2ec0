"""The body of `POST /v1/responses` and its items, as records, and their translation to messages.

Parsed once here, and the source of the OpenAPI document, as `shapes.py` is for the other endpoints. A client sends
items back as it received them, with fields that only a server fills in: of an item, unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from ostinato.options import MAX_LOGPROBS
from ostinato.serve.errors import Refusal
from ostinato.serve.sealed import unsealed
from ostinato.serve.shapes import (
    ChoiceFormat,
    Effort,
    FunctionName,
    GrammarFormat,
    JsonFormat,
    JsonSchema,
    MostTokens,
    OpenAIBody,
    RegexFormat,
    ResponseFormat,
    SchemaFormat,
    Sent,
    TextFormat,
    Word,
    type_of,
)
from ostinato.text.tools import TemplateMessage

# What a client may ask to be added to a response; those of tools that are not here add nothing.
LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"
_INCLUDED: Final = frozenset(
    {
        LOGPROBS,
        ENCRYPTED,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)


# Items


class InputText(Sent):
    """A part of a message. Only text is supported."""

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str = ""
    refusal: str = ""


Parts: TypeAlias = str | list[InputText]


class MessageItem(Sent):
    """One message; an assistant's has been an answer."""

    type: Literal["message"] = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class CallItem(Sent):
    """A call that a model has made: its arguments are JSON as text."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CallOutputItem(Sent):
    """What a call brought."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str
    output: Parts


class ReasoningItem(Sent):
    """What a model has thought."""

    type: Literal["reasoning"]
    id: str | None = None
    content: list[InputText] | None = None
    summary: list[InputText] | None = None
    encrypted_content: str | None = None


class ReferenceItem(Sent):
    """An item of a kept response, by its id."""

    type: Literal["item_reference"]
    id: str


_ITEMS: Final = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _kind_of_item(item: Any) -> str:
    """By its `type`, which a message may lack, and a reference too."""
    kind = type_of(item)
    if kind is None:
        kind = "message" if not isinstance(item, dict) or "role" in item else "item_reference"
    return str(kind).upper()


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("MESSAGE")]
    | Annotated[CallItem, Tag("FUNCTION_CALL")]
    | Annotated[CallOutputItem, Tag("FUNCTION_CALL_OUTPUT")]
    | Annotated[ReasoningItem, Tag("REASONING")]
    | Annotated[ReferenceItem, Tag("ITEM_REFERENCE")],
    Discriminator(
        _kind_of_item,
        custom_error_type="item_type",
        custom_error_message=f"the type of an item here is one of {', '.join(_ITEMS)}",
    ),
]


# Tools


class FunctionTool(Sent):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OtherTool(Sent):
    """A tool that only OpenAI's servers run: it is left out, and named in a header of the response."""

    type: Word


class NamespaceTool(Sent):
    """Functions under a common name, which a call names beside the function's own."""

    type: Literal["namespace"]
    name: Word
    description: str | None = None
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag("FUNCTION")] | Annotated[OtherTool, Tag("OTHER")],
            Discriminator(lambda tool: "FUNCTION" if type_of(tool) == "function" else "OTHER"),
        ]
    ]


def _kind_of_tool(tool: Any) -> str:
    kind = type_of(tool)
    return kind.upper() if kind in ("function", "namespace") else "OTHER"


ResponsesTool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("FUNCTION")]
    | Annotated[NamespaceTool, Tag("NAMESPACE")]
    | Annotated[OtherTool, Tag("OTHER")],
    Discriminator(_kind_of_tool),
]


def qualified(name: str, namespace: str | None) -> str:
    """What the model calls a function; templates know no namespaces."""
    return name if namespace is None else f"{namespace}.{name}"


def offered_of(tool: FunctionTool | NamespaceTool) -> FunctionTool | NamespaceTool:
    """What of a tool can be called."""
    if isinstance(tool, FunctionTool):
        return tool
    functions = [one for one in tool.tools if isinstance(one, FunctionTool)]
    return tool.model_copy(update={"description": tool.description or "", "tools": functions})


def functions_of(tools: Sequence[ResponsesTool]) -> dict[str, FunctionTool]:
    """The functions among the tools by their place in the request, each as the model calls it."""
    found = {}
    for index, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            found[f"tools[{index}]"] = tool
        elif isinstance(tool, NamespaceTool):
            for number, one in enumerate(tool.tools):
                if isinstance(one, FunctionTool):
                    named = one.model_copy(update={"name": qualified(one.name, tool.name)})
                    found[f"tools[{index}].tools[{number}]"] = named
    return found


def namespaces_of(tools: Sequence[FunctionTool | NamespaceTool]) -> dict[str, tuple[str, str]]:
    """Namespace and name of the functions that have a namespace, by what the model calls them."""
    return {
        qualified(one.name, tool.name): (tool.name, one.name)
        for tool in tools
        if isinstance(tool, NamespaceTool)
        for one in tool.tools
        if isinstance(one, FunctionTool)
    }


def ignored_of(tool: ResponsesTool) -> list[str]:
    """What of a tool has no effect."""
    match tool:
        case FunctionTool():
            return []
        case NamespaceTool(description=description, tools=tools):
            others = [f"tools.namespace.{one.type}" for one in tools if not isinstance(one, FunctionTool)]
            return ["tools.namespace.description", *others] if description else others
    return [f"tools.{tool.type}"]


class NamedTool(Sent):
    """One tool, by type and name."""

    type: Word
    name: str | None = None


class AllowedTools(Sent):
    """Of the tools, those that may be called now."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, str):
        return "WORD"
    return "ALLOWED" if type_of(choice) == "allowed_tools" else "NAMED"


ChoiceOfTool: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("WORD")]
    | Annotated[AllowedTools, Tag("ALLOWED")]
    | Annotated[NamedTool, Tag("NAMED")],
    Discriminator(_kind_of_choice),
]


# The body


class FlatSchemaFormat(JsonSchema):
    """A named schema, as this API has it: without a wrapper."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


TextFormatHere: TypeAlias = Annotated[
    TextFormat | JsonFormat | FlatSchemaFormat | RegexFormat | ChoiceFormat | GrammarFormat,
    Field(discriminator="type"),
]


class TextOptions(Sent):
    """The form of the answer's text."""

    format: TextFormatHere | None = None
    verbosity: Word | None = None


class ReasoningOptions(Sent):
    """How the model reasons; beyond the effort, nothing here has an effect."""

    effort: Effort | None = None
    summary: Word | None = None
    generate_summary: Word | None = None
    context: Word | None = None
    mode: Word | None = None


class ResponsesBody(OpenAIBody):
    """`POST /v1/responses`."""

    input: str | Annotated[list[Item], Field(min_length=1)] | None = None
    instructions: str | None = None
    max_output_tokens: MostTokens = None
    tools: list[ResponsesTool] | None = None
    tool_choice: ChoiceOfTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[Word] | None = Field(default=None, description="Names that are not known are ignored, and noted.")
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def n_logprobs(self) -> int | None:
        wanted = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None

    @property
    def format(self) -> ResponseFormat | None:
        given = None if self.text is None else self.text.format
        if isinstance(given, FlatSchemaFormat):
            return SchemaFormat(type="json_schema", json_schema=given)
        return given

    @property
    def ignored(self) -> list[str]:
        unknown = [name for name in self.include or () if name not in _INCLUDED]
        return [*super().ignored, *(f"include.{name}" for name in unknown)]

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input or []


# Into messages


def messages_of(before: Sequence[Item], items: Sequence[Item]) -> list[TemplateMessage]:
    """The items of a conversation, earlier ones and those of the input, as messages: what a model made in one turn is
    one message."""
    messages: list[TemplateMessage] = []
    called: set[str] = set()
    for index, item in enumerate((*before, *items), start=-len(before)):
        match item:
            case MessageItem(role="assistant", content=content):
                _turn(messages, fresh="content")["content"] = text_of(content)
            case MessageItem(role=role, content=content):
                _add_message(messages, "user" if role == "user" else "system", text_of(content))
            case CallItem(call_id=id, name=name, namespace=namespace, arguments=arguments):
                function = {"name": qualified(name, namespace), "arguments": arguments}
                calls = _turn(messages).setdefault("tool_calls", [])
                calls.append({"id": id, "type": "function", "function": function})
                called.add(id)
            case CallOutputItem(call_id=id, output=output):
                if id not in called:
                    message = f"input[{index}] is the output of the call {id!r}, and no call before it has this id"
                    raise Refusal(400, message, param="input")
                messages.append({"role": "tool", "tool_call_id": id, "content": text_of(output)})
            case ReasoningItem():
                if thought := reasoning_of(item):
                    turn = _turn(messages, fresh="content")
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
    for made in messages:
        if "tool_calls" not in made:
            made.setdefault("content", "")  # the model was cut while it reasoned
    return messages


def _turn(messages: list[TemplateMessage], fresh: str | None = None) -> TemplateMessage:
    """The message of the model's turn that goes on; a new one if there is none, or if it has `fresh` already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (fresh is not None and (fresh in last or "tool_calls" in last)):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _add_message(messages: list[TemplateMessage], role: str, text: str) -> None:
    """System messages at the start become one: many templates take no second."""
    if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
        messages[0] = {"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}
    else:
        messages.append({"role": role, "content": text})


def text_of(parts: Parts) -> str:
    return parts if isinstance(parts, str) else "".join(part.text or part.refusal for part in parts)


def reasoning_of(item: ReasoningItem) -> str:
    """The text of an item of reasoning, also of one that came back sealed; empty if another server sealed it."""
    if item.content:
        return text_of(item.content)
    return unsealed(item.encrypted_content or "", "encrypted_content")


# Back to a client


def input_id(response: str, index: int) -> str:
    """The id of an item of a response's input that was sent without one."""
    return f"{response}_{index}"


def listed(items: Sequence[Item], prefix: str) -> list[dict[str, Any]]:
    """Items as a client gets them: each with an id, made from `prefix` where it was sent without one."""
    return [
        {**_sent_back(item), "id": item.id or input_id(prefix, index), "status": "completed"}
        for index, item in enumerate(items)
    ]


def _sent_back(item: Item) -> dict[str, Any]:
    match item:
        case MessageItem(role="assistant", content=content):
            part = {"type": "output_text", "text": text_of(content), "annotations": []}
            return {"type": "message", "role": "assistant", "content": [part]}
        case MessageItem(role=role, content=content):
            return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text_of(content)}]}
        case CallOutputItem(call_id=call_id, output=output):
            return {"type": "function_call_output", "call_id": call_id, "output": text_of(output)}
        case ReasoningItem(content=content):
            thought = [{"type": "reasoning_text", "text": part.text} for part in content or ()]
            sealed = item.encrypted_content
            return {"type": "reasoning", "summary": [], "content": thought, "encrypted_content": sealed}
    return item.model_dump(exclude_none=True)
