"""`POST /v1/chat/completions`: a conversation becomes a prompt, and tokens become messages with reasoning and calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ostinato.llm import LLM
from ostinato.options import Sampling
from ostinato.serve import logprobs
from ostinato.serve.answers import Answers, GenerationInput, TokenUpdate, repeated
from ostinato.serve.errors import Refusal
from ostinato.serve.log import Record
from ostinato.serve.reply import reply
from ostinato.serve.service import Service
from ostinato.serve.shapes import ChatBody, Message, TemplateBody
from ostinato.text.answer import AnswerReader, CallDelta, Delta
from ostinato.text.tokenizer import Tokenizer
from ostinato.text.tools import Tool, ToolChoice, ToolFormat, read_choice, read_tools


async def chat(service: Service, body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    record: Record = request.state.record
    llm = service.llm(body.model)
    asked = await service.in_template_thread(rendered, service, llm, body)
    ask, reader = await service.in_thread(prepare, service, llm, body, *asked)
    n = body.n or 1
    answers = Answers(service, llm, repeated([ask], n), n, record, "messages")
    await answers.start()
    choices = [ChatChoice(index, llm.tokenizer, reader(), bool(body.logprobs)) for index in range(n)]
    kinds = ("chat.completion", "chat.completion.chunk")
    return await reply(service, request, body, answers, choices, f"chatcmpl-{record.id}", kinds)


# Before


def rendered(service: Service, llm: LLM, body: ChatBody) -> tuple[str, tuple[Tool, ...], ToolChoice]:
    """Check the conversation and render it: as its model reads it, with the tools that the model may call."""
    tools = read_tools(body.tools)
    choice = read_choice(body.tool_choice, tools)
    callable_now = tools if choice != "none" else ()
    return _text(service, llm, body.messages, callable_now, body.chat_template_kwargs), callable_now, choice


def prepare(
    service: Service, llm: LLM, body: ChatBody, text: str, tools: tuple[Tool, ...], choice: ToolChoice
) -> tuple[GenerationInput, Callable[[], AnswerReader]]:
    """The engine's request, and what makes the parser of one answer's text."""
    service.check_length(text, "messages")
    speaks, sampling = service.tool_format, body.sampling()
    parallel = body.parallel_tool_calls is not False
    if tools:
        sampling = _calling(speaks, tools, choice, sampling, parallel=parallel)
    thinking = service.reasoning
    if thinking is not None:
        sampling = thinking.before(sampling, text)
    show = (*(speaks.markers if tools else ()), *((thinking.begin, thinking.end) if thinking is not None else ()))

    def reader() -> AnswerReader:
        return AnswerReader(
            None if thinking is None else thinking.parser(text),
            speaks.parser(tools) if tools else None,
            most_calls=None if parallel else 1,  # an optional call has no grammar that could limit it to one
        )

    return GenerationInput(llm.tokenizer.encode_rendered(text), sampling, True, show), reader


def _calling(
    speaks: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, sampling: Sampling, *, parallel: bool
) -> Sampling:
    """A sampling whose answer is the forced call, if there is one, and otherwise follows `response_format`."""
    asked = sampling.rule
    if asked is not None and asked.kind != "schema":
        message = "response_format: tools can be had with text and with JSON, not with another format"
        raise Refusal(400, message, param="response_format")
    rule = speaks.grammar(tools, choice, parallel=parallel, schema=None if asked is None else asked.text)
    return sampling if rule is None else replace(sampling, schema=None, json_mode=False, grammar=rule)


def _text(
    service: Service, llm: LLM, messages: Sequence[Message], tools: Sequence[Any], options: dict[str, Any] | None
) -> str:
    speaks = service.tool_format
    words = dict(options or {})
    for name in ("self", "messages", "tools", "documents"):
        if name in words:
            message = f"chat_template_kwargs.{name} would replace what the request says; leave it out"
            raise Refusal(400, message, param="chat_template_kwargs")
    plain = [message.for_template() for message in messages]
    if tools or any(message.tool_calls or message.role == "tool" for message in messages):
        plain = speaks.prompt_messages(plain, tools)
        words["tools"] = speaks.prompt_tools(tools) if tools else None
    return llm.chat_text(plain, **words)


def template_text(service: Service, llm: LLM, body: TemplateBody) -> str:
    """`POST /apply-template`."""
    options = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    return _text(service, llm, body.messages, read_tools(body.tools), options)


# After


class ChatChoice:
    """One answer of a chat, so far."""

    def __init__(self, index: int, tokenizer: Tokenizer, reader: AnswerReader, wants_logprobs: bool) -> None:
        self.index, self.reason = index, ""
        self._tokenizer, self._reader = tokenizer, reader
        self._pending = logprobs.PendingTokens() if wants_logprobs else None
        self._sent: list[Any] = []  # tokens whose logprobs were sent
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def opening(self) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def format_update(self, update: TokenUpdate) -> list[dict[str, Any]]:
        _, token, piece = update
        if self._pending is not None:
            self._pending.add(token, met_stop=piece.finish_reason == "stop" and token.finish_reason != "stop")
        deltas = self._reader.feed(piece.text)
        if piece.finish_reason is not None:
            deltas += self._reader.finish()
        chunks = [self._chunk(self._shaped(delta)) for delta in deltas]
        if piece.finish_reason is not None:
            called = piece.finish_reason == "stop" and self._reader.n_calls > 0
            self.reason = "tool_calls" if called else piece.finish_reason
            chunks.append(self._chunk({}, self.reason))
        return chunks

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": self._logprobs(), "finish_reason": reason}

    def _logprobs(self) -> dict[str, Any] | None:
        tokens = [] if self._pending is None else self._pending.take()
        self._sent += tokens
        return logprobs.for_chat(self._tokenizer, tokens) if tokens else None

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
        listed = None
        if self._pending is not None:
            listed = logprobs.for_chat(self._tokenizer, [*self._sent, *self._pending.take()])
        return {"index": self.index, "message": message, "logprobs": listed, "finish_reason": self.reason}
