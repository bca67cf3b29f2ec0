"""`POST /v1/chat/completions`: a conversation becomes a prompt, and tokens become messages with reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ostinato.engine.request import Token
from ostinato.llm import LLM
from ostinato.serve import logprobs
from ostinato.serve.answers import TokenUpdate
from ostinato.serve.conversation import (
    AnswerDeltas,
    effort_options,
    ignored_header,
    submitted,
    verbosity_options,
)
from ostinato.serve.errors import Refusal, renamed
from ostinato.serve.log import Record
from ostinato.serve.reply import reply
from ostinato.serve.service import Service
from ostinato.serve.shapes import ChatBody
from ostinato.text.answer import AnswerReader, CallDelta, Delta
from ostinato.text.chat import ChatRequest
from ostinato.text.tokenizer import Tokenizer
from ostinato.text.tools import read_allowed, read_tools


async def chat(service: Service, body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    record: Record = request.state.record
    llm = service.llm(body.model)
    n = body.n or 1
    with renamed(body.renamed):
        asked, ignored = await service.in_thread(conversation, llm, body)
        answers, reader = await submitted(service, llm, asked, record, n)
    choices = [ChatChoice(index, llm.tokenizer, reader(), bool(body.logprobs)) for index in range(n)]
    kinds = ("chat.completion", "chat.completion.chunk")
    headers = ignored_header(ignored)
    return await reply(service, request, body, answers, choices, f"chatcmpl-{record.id}", kinds, headers)


# Before


def conversation(llm: LLM, body: ChatBody) -> tuple[ChatRequest, list[str]]:
    """The body, checked; and the names of its fields that have no effect."""
    tools, choice = read_allowed(body.tool_choice, read_tools(body.tools))
    options, ignored = _template_options(llm, body)
    asked = ChatRequest(
        messages=[message.for_template() for message in body.messages],
        sampling=body.sampling(),
        tools=tools if choice != "none" else (),
        choice=choice,
        parallel=body.parallel_tool_calls is not False,
        continues=_continues(body, forced=choice not in ("none", "auto")),
        template_options=options,
    )
    return asked, [*body.ignored, *ignored]


def _continues(body: ChatBody, *, forced: bool) -> bool:
    """Whether the answer continues the last message. Without a word about it, it does if that is the assistant's and
    nothing is said of the answer's form: a schema or a call is an answer's from its first character."""
    last, asked, opens = body.messages[-1], body.continue_final_message, body.add_generation_prompt
    is_text = last.role == "assistant" and not last.tool_calls
    is_free = not forced and body.format is None
    continues = is_text and is_free and not opens if asked is None else asked
    if continues == opens:
        message = "continue_final_message and add_generation_prompt must differ"
        if asked is None:
            message = "add_generation_prompt is false, and the last message is none to continue"
        raise Refusal(400, message, param="add_generation_prompt")
    if continues and not is_text:
        message = "continue_final_message is true; the last message must be a text of the assistant then"
        raise Refusal(400, message, param="continue_final_message")
    if continues and not is_free:
        message = "continue_final_message is true; an answer that continues another has no format and no forced call"
        raise Refusal(400, message, param="continue_final_message")
    return continues


def _template_options(llm: LLM, body: ChatBody) -> tuple[dict[str, Any], list[str]]:
    """The variables of the template, and the names of fields for which it has none."""
    options: dict[str, Any] = {}
    ignored = []
    if body.reasoning_effort is not None:
        known = effort_options(llm.template, body.reasoning_effort)
        options |= known or {}
        ignored += ["reasoning_effort"] if known is None else []
    if body.verbosity is not None:
        known = verbosity_options(llm.template, body.verbosity)
        options |= known or {}
        ignored += ["verbosity"] if known is None else []
    return {**options, **(body.chat_template_kwargs or {})}, ignored


# After


class ChatChoice:
    """One answer of a chat, so far."""

    def __init__(self, index: int, tokenizer: Tokenizer, reader: AnswerReader, wants_logprobs: bool) -> None:
        self.index = index
        self._tokenizer, self._wants_logprobs = tokenizer, wants_logprobs
        self._deltas = AnswerDeltas(reader, logprobs=wants_logprobs)
        self._sent: list[Token] = []  # tokens whose logprobs were sent
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    @property
    def reason(self) -> str:
        return self._deltas.reason

    def opening(self) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def format_update(self, update: TokenUpdate) -> list[dict[str, Any]]:
        chunks = [self._chunk(self._shaped(delta), tokens) for delta, tokens in self._deltas.read(update)]
        if self.reason:
            chunks.append(self._chunk({}, self._deltas.unsent(), self.reason))
        return chunks

    def _chunk(self, delta: dict[str, Any], tokens: Sequence[Token], reason: str | None = None) -> dict[str, Any]:
        self._sent += tokens
        listed = logprobs.for_chat(self._tokenizer, tokens) if tokens else None
        return {"index": self.index, "delta": delta, "logprobs": listed, "finish_reason": reason}

    def _shaped(self, delta: Delta) -> dict[str, Any]:
        """A delta in OpenAI's shape; it is also kept for the whole message."""
        if delta.call is not None:
            return {"tool_calls": [self._call(delta.call)]}
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
            return {"reasoning_content": delta.reasoning}
        self._content.append(delta.content)
        return {"content": delta.content}

    def _call(self, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            self._calls[call.index]["function"]["arguments"] += call.arguments
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        self._calls.append({"id": call.id, "type": "function", "function": dict(function)})
        return {"index": call.index, "id": call.id, "type": "function", "function": function}

    def whole(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message |= {"content": content or None, "tool_calls": self._calls}
        listed = logprobs.for_chat(self._tokenizer, self._sent) if self._wants_logprobs else None
        return {"index": self.index, "message": message, "logprobs": listed, "finish_reason": self.reason}
