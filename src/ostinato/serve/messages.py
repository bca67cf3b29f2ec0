"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's form of a chat.

The bodies are in `messages_body.py`, blocks and their events in `messages_output.py`, errors in `errors.py`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ostinato.llm import LLM
from ostinato.serve.answer_parts import AnswerParts, Event
from ostinato.serve.answers import Answers, TokenUpdate
from ostinato.serve.conversation import (
    AnswerDeltas,
    TranslatedBody,
    effort_options,
    ignored_header,
    n_prompt_tokens,
    submitted,
    thinking_options,
)
from ostinato.serve.errors import Refusal, anthropic_error
from ostinato.serve.log import Record
from ostinato.serve.messages_body import CountBody, CustomTool, MessagesBody, messages_of
from ostinato.serve.messages_output import NewBlock
from ostinato.serve.service import Service
from ostinato.serve.stream import EventStream, at_once, formatted, json_response, named_event
from ostinato.text.chat import ChatRequest, FieldNames
from ostinato.text.tools import TemplateMessage, Tool, ToolChoice, ToolPlace, read_choice, read_tools

PING: Final = named_event({"type": "ping"})
_NAMES: Final = FieldNames("messages", "output_config.format")
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


async def create_message(service: Service, body: MessagesBody, request: Request) -> Response:
    """Answer with a message."""
    record: Record = request.state.record
    llm = service.llm(body.model)
    asked = await service.in_thread(translated, service, llm, body)
    answers, reader = await submitted(service, llm, asked.conversation, record)
    omitted = body.thinking is not None and body.thinking.display == "omitted"
    content = AnswerParts(AnswerDeltas(reader(), logprobs=False), NewBlock(shows_thinking=not omitted))
    reply = MessageReply(service.answers_as(body.model), body.max_tokens, answers, content, record)
    headers = ignored_header(asked.ignored)
    if body.stream:
        write_s = service.limits.write_s
        return EventStream(reply.events(), answers, record, write_s, headers=headers, failed=anthropic_error_event)
    return await at_once(request, reply.whole(), answers, headers)


async def count_tokens(service: Service, body: CountBody, request: Request) -> Response:
    """How many tokens the prompt of a message would have."""
    llm = service.llm(body.model)
    asked = await service.in_thread(translated, service, llm, body)
    n_tokens = await n_prompt_tokens(service, llm, asked.conversation)
    return json_response({"input_tokens": n_tokens}, headers=ignored_header(asked.ignored))


# Before


def translated(service: Service, llm: LLM, body: CountBody) -> TranslatedBody:
    """The body, checked."""
    given = body.tools or []
    ignored = [f"tools.{tool.type}" for tool in given if not isinstance(tool, CustomTool)]
    options: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        known = effort_options(llm.template, body.output_config.effort)
        options |= known or {}
        ignored += ["output_config.effort"] if known is None else []
    if (thinking := body.thinking) is not None:
        wanted = thinking.type != "disabled"
        known = thinking_options(llm, wanted)
        options |= known or {}
        ignored += ["thinking"] if known is None else []
        ignored += ["thinking.budget_tokens"] if thinking.budget_tokens is not None else []
    choice, tools, messages = body.tool_choice, _tools(body), messages_of(body)
    asked = ChatRequest(
        messages=messages,
        sampling=body.sampling(),
        tools=tools if (chosen := _chosen(body, tools)) != "none" else (),
        choice=chosen,
        parallel=choice is None or not choice.disable_parallel_tool_use,
        continues=_continues(body, messages, chosen),
        template_options={**options, **(body.chat_template_kwargs or {})},
        names=_NAMES,
    )
    return TranslatedBody(asked, ignored)


def _continues(body: CountBody, messages: Sequence[TemplateMessage], choice: ToolChoice) -> bool:
    """Whether the answer continues the last message: it does if that is the assistant's."""
    if body.messages[-1].role != "assistant":
        return False
    where = f"messages[{len(body.messages) - 1}]"
    if messages[-1].get("tool_calls"):
        raise Refusal(400, f"{where} is the assistant's and calls a tool; end with the call's result", param=where)
    if body.format is not None or choice not in ("none", "auto"):
        told = "the last message is the assistant's; an answer that continues it has no format and no forced call"
        raise Refusal(400, f"{where}: {told}", param=where)
    return True


def _tools(body: CountBody) -> tuple[Tool, ...]:
    """The functions that the model may call."""
    functions = {index: tool for index, tool in enumerate(body.tools or ()) if isinstance(tool, CustomTool)}
    return read_tools(
        [
            {"function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}}
            for tool in functions.values()
        ],
        [ToolPlace(f"tools[{index}]", f"tools[{index}]", f"tools[{index}].input_schema") for index in functions],
    )


def _chosen(body: CountBody, tools: Sequence[Tool]) -> ToolChoice:
    """Whether the model must call a tool, or which."""
    choice = body.tool_choice
    if choice is None:
        return read_choice(None, tools)
    if choice.type == "tool":
        if choice.name is None:
            raise Refusal(
                400, "tool_choice.name is missing; with the type 'tool' it names one", param="tool_choice.name"
            )
        return read_choice({"function": {"name": choice.name}}, tools)
    if choice.type == "any" and not tools:
        raise Refusal(400, "tool_choice is 'any', and there are no tools that can be called here", param="tool_choice")
    return read_choice(_CHOICES[choice.type], tools)


# After


class MessageReply:
    """A message while its answer is made: as events, or whole."""

    def __init__(self, model: str, max_tokens: int, answers: Answers, content: AnswerParts, record: Record) -> None:
        self._model, self._max_tokens = model, max_tokens
        self._answers, self._content, self._record = answers, content, record

    async def whole(self) -> dict[str, Any]:
        """The whole message as one object."""
        async for update in self._answers.updates():
            self._content.format_update(update)
        return {**self._message(), "content": self._content.whole(), **self._end(), **await self._answers.extras()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream: the message begins, its blocks are made one after the other, and it ends."""
        n_parts, pinged = 0, False

        def format(updates: Sequence[TokenUpdate]) -> bytes:
            nonlocal pinged
            events = [event for update in updates for event in self._content.format_update(update)]
            if pinged or not events:
                return _encoded(events)
            pinged = True
            return _encoded(events[:1]) + PING + _encoded(events[1:])

        async for part in formatted(self._answers, format, PING):
            # Only when a slot has taken the request it is known how much of its prompt was in memory.
            yield part if n_parts else _encoded([{"type": "message_start", "message": self._message()}]) + part
            n_parts += 1
        end = self._end()
        usage = end.pop("usage")
        ended = {"type": "message_delta", "delta": end, "usage": usage, **await self._answers.extras()}
        yield _encoded([ended, {"type": "message_stop"}])

    def _message(self) -> dict[str, Any]:
        """The message before its first token."""
        return {
            "id": f"msg_{self._record.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0, 0),
        }

    def _end(self) -> dict[str, Any]:
        """How the message ended, after its last token."""
        self._record.outcome = self._content.reason
        usage = self._usage(self._answers.n_tokens, self._content.n_reasoning)
        return {"stop_reason": self._stop_reason(), "stop_sequence": self._content.stop, "usage": usage}

    def _stop_reason(self) -> str:
        if self._content.stop is not None:
            return "stop_sequence"
        match self._content.reason:
            case "tool_calls":
                return "tool_use"
            case "length":
                is_limit = self._answers.n_tokens >= self._max_tokens
                return "max_tokens" if is_limit else "model_context_window_exceeded"
        return "end_turn"

    def _usage(self, n_tokens: int, n_reasoning: int) -> dict[str, Any]:
        """Tokens of the prompt that were in memory are counted apart from the others."""
        n_cached = self._answers.cached_tokens
        return {
            "input_tokens": (self._record.prompt_tokens or 0) - n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": n_cached,
            "output_tokens": n_tokens,
            "output_tokens_details": {"thinking_tokens": n_reasoning},
        }


def _encoded(events: Iterable[Event]) -> bytes:
    return b"".join(map(named_event, events))


def anthropic_error_event(refusal: Refusal) -> bytes:
    """The last event of a stream that failed."""
    # The standard library's JSON can encode any text that a client sent, even a lone surrogate.
    return b"event: error\ndata: " + json.dumps(anthropic_error(refusal)).encode() + b"\n\n"


# Models


def anthropic_model(id: str, created: int, context: int | None) -> dict[str, Any]:
    """A model in Anthropic's form."""
    return {
        "type": "model",
        "id": id,
        "display_name": id,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }
