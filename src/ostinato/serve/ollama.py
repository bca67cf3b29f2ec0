"""`POST /api/chat`, `/api/generate`, `/api/embed` and `/api/embeddings`: Ollama's forms of chats and embeddings.

The bodies are in `ollama_body.py`, messages and their parts in `ollama_output.py`, what is said about the model in
`ollama_models.py`. A stream is one JSON object on each line; the last has the reason of the end, counts and durations.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ostinato.llm import LLM
from ostinato.serve.answer_parts import AnswerParts
from ostinato.serve.answers import Answers, TokenUpdate
from ostinato.serve.completions import prompt_ids
from ostinato.serve.conversation import (
    AnswerDeltas,
    TranslatedBody,
    effort_options,
    ignored_header,
    submitted,
    submitted_in_room,
    thinking_options,
)
from ostinato.serve.embeddings import vectors_of
from ostinato.serve.errors import Refusal, ollama_error
from ostinato.serve.log import Record
from ostinato.serve.ollama_body import AnswerBody, EmbedBody, GenerateBody, OldEmbedBody, OllamaChatBody
from ostinato.serve.ollama_output import NewMessagePart, joined
from ostinato.serve.service import Service
from ostinato.serve.stream import LINES, EventStream, at_once, client_gone, encode, formatted, json_response
from ostinato.text.answer import AnswerReader, GenerationInput
from ostinato.text.chat import ChatRequest, FieldNames
from ostinato.text.tools import read_allowed, read_tools

_CHAT_NAMES: Final = FieldNames("messages", "format")
_PROMPT_NAMES: Final = FieldNames("prompt", "format")


async def chat(service: Service, body: OllamaChatBody, request: Request) -> Response:
    """Answer a conversation."""
    return await _answer(service, body, request, as_message)


async def generate(service: Service, body: GenerateBody, request: Request) -> Response:
    """Answer a prompt, or continue it."""
    return await _answer(service, body, request, as_response)


async def _answer(service: Service, body: AnswerBody, request: Request, shape: MessageShape) -> Response:
    record: Record = request.state.record
    llm = service.llm(body.model)
    asked = await service.in_thread(translated, service, llm, body)
    head = AnswerHead(service.answers_as(body.model), shape, service.clock)
    headers = ignored_header(asked.ignored)
    streams = body.stream is not False
    if not asked.conversation.messages:
        # Clients of Ollama have a model loaded in this way; here it is already.
        loaded = head.last({}, "load")
        if streams:
            return Response(_line(loaded), media_type=LINES, headers=headers)
        return json_response(loaded, headers=headers)
    answers, reader = await _submitted(service, llm, body, asked.conversation, record)
    deltas = AnswerDeltas(reader, logprobs=bool(body.logprobs))
    reply = OllamaReply(head, answers, AnswerParts(deltas, NewMessagePart(llm.tokenizer)), record)
    if streams:
        write_s = service.limits.write_s
        return EventStream(
            reply.lines(), answers, record, write_s, headers=headers, failed=ollama_error_line, media_type=LINES
        )
    return await at_once(request, reply.whole(), answers, headers)


# Before


def translated(service: Service, llm: LLM, body: AnswerBody) -> TranslatedBody:
    """The body, checked."""
    wanted, ignored = body.wanted, body.without_effect(llm.context)
    given = read_tools(body.tools) if isinstance(body, OllamaChatBody) else ()
    tools, choice = read_allowed(None if body.is_raw else wanted.tool_choice, given)
    messages, sampling = body.conversation(), body.sampling()
    is_text = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    options: dict[str, Any] = {}
    if body.think is not None and not body.is_raw:
        known = (
            thinking_options(llm, body.think)
            if isinstance(body.think, bool)
            else effort_options(llm.template, body.think)
        )
        options |= known or {}
        ignored += ["think"] if known is None else []
    asked = ChatRequest(
        messages=messages,
        sampling=sampling,
        tools=tools if choice != "none" else (),
        choice=choice,
        parallel=wanted.parallel_tool_calls is not False,
        # A schema or a call is an answer's from its first character.
        continues=is_text and sampling.rule is None and choice in ("none", "auto"),
        template_options={**options, **(wanted.chat_template_kwargs or {})},
        names=_CHAT_NAMES if isinstance(body, OllamaChatBody) else _PROMPT_NAMES,
    )
    return TranslatedBody(asked, ignored)


async def _submitted(
    service: Service, llm: LLM, body: AnswerBody, asked: ChatRequest, record: Record
) -> tuple[Answers, AnswerReader]:
    """The answer, started, and the parser of its text."""
    if isinstance(body, GenerateBody) and body.is_raw:
        ids = await service.in_thread(prompt_ids, service, llm, body.prompt)
        answers = Answers(service, llm, [GenerationInput(ids, asked.sampling, False)], 1, record, "prompt")
        await answers.start()
        return answers, AnswerReader()
    submit = submitted if body.truncate is False else submitted_in_room
    answers, reader = await submit(service, llm, asked, record)
    return answers, reader()


# After


MessageShape = Callable[[Mapping[str, Any]], dict[str, Any]]


def as_message(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a message as `/api/chat` has it.

    >>> as_message({"thinking": "hm"})
    {'message': {'role': 'assistant', 'content': '', 'thinking': 'hm'}}
    """
    message: dict[str, Any] = {"role": "assistant", "content": "", **part}
    listed = message.pop("logprobs", None)
    return {"message": message} if listed is None else {"message": message, "logprobs": listed}


def as_response(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a message as `/api/generate` has it.

    >>> as_response({"content": "yes"})
    {'response': 'yes'}
    """
    response = {"response": "", **part}
    response["response"] = response.pop("content", "")
    return response


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every line of an answer begins with."""

    model: str
    shape: MessageShape
    clock: Callable[[], float]

    def last(self, part: Mapping[str, Any], reason: str, **more: Any) -> dict[str, Any]:
        """The last line, or the whole answer; with the message, or what is left of it."""
        now = timestamp(self.clock())
        ended = {"done": True, "done_reason": reason, **more}
        return {"model": self.model, "created_at": now, **self.shape(part), **ended}

    def lines(self, parts: Iterable[Mapping[str, Any]]) -> bytes:
        """Lines with parts of the message."""
        now = timestamp(self.clock())
        return b"".join(
            _line({"model": self.model, "created_at": now, **self.shape(part), "done": False}) for part in parts
        )


class OllamaReply:
    """An answer while it is made: as lines, or whole."""

    def __init__(self, head: AnswerHead, answers: Answers, parts: AnswerParts, record: Record) -> None:
        self._head, self._answers, self._parts, self._record = head, answers, parts, record

    async def whole(self) -> dict[str, Any]:
        """The whole answer as one object."""
        async for update in self._answers.updates():
            self._parts.format_update(update)
        return self._head.last(joined(self._parts.whole()), **await self._end())

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The stream."""

        def format(updates: Sequence[TokenUpdate]) -> bytes:
            parts = [part for update in updates for part in self._parts.format_update(update)]
            return self._head.lines(parts) if parts else b""

        # Clients parse every line, so a part without text keeps the connection alive.
        async for part in formatted(self._answers, format, self._head.lines([{}])):
            yield part
        yield _line(self._head.last({}, **await self._end()))

    async def _end(self) -> dict[str, Any]:
        """How the answer ended, after its last token."""
        reason = self._record.outcome = self._parts.reason
        completion = self._answers.completions[0]
        assert completion is not None, "the answer has not ended"
        timings = completion.timings
        return {
            "reason": "length" if reason == "length" else "stop",
            "total_duration": _ns(time.perf_counter() - self._record.started),
            "load_duration": 0,
            "prompt_eval_count": len(completion.prompt_ids),
            "prompt_eval_duration": _ns(timings.prefill_s),
            "eval_count": self._answers.n_tokens,
            "eval_duration": _ns(timings.decode_s),
            **await self._answers.extras(),
        }


def _ns(seconds: float) -> int:
    """Seconds as nanoseconds; at least one, because clients divide by durations."""
    return max(1, round(seconds * 1e9))


def timestamp(seconds: float) -> str:
    """A time as Ollama writes it.

    >>> timestamp(0.5)
    '1970-01-01T00:00:00.500000Z'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _line(content: dict[str, Any]) -> bytes:
    return encode(content) + b"\n"


def ollama_error_line(refusal: Refusal) -> bytes:
    """The last line of a stream that failed."""
    # The standard library's JSON can encode any text that a client sent, even a lone surrogate.
    return json.dumps(ollama_error(refusal)).encode() + b"\n"


# Embeddings


async def embed(service: Service, body: EmbedBody, request: Request) -> Response:
    """A vector for each text."""
    record: Record = request.state.record
    llm, texts = service.llm(body.model), body.texts
    vectors: Any = []
    if texts:
        truncate = body.truncate is not False
        vectors = await vectors_of(service, request, body.model, texts, body.dimensions, truncate=truncate)
    if vectors is None:
        return client_gone(record)
    content = {
        "model": service.answers_as(body.model),
        "embeddings": vectors,
        "total_duration": _ns(time.perf_counter() - record.started),
        "load_duration": 0,
        "prompt_eval_count": record.prompt_tokens or 0,
    }
    return json_response(content, headers=ignored_header(body.without_effect(llm.context)))


async def old_embed(service: Service, body: OldEmbedBody, request: Request) -> Response:
    """A vector for one text."""
    record: Record = request.state.record
    llm = service.llm(body.model)
    vectors: Any = [[]]
    if body.prompt:
        vectors = await vectors_of(service, request, body.model, [body.prompt], truncate=True)
    if vectors is None:
        return client_gone(record)
    return json_response({"embedding": vectors[0]}, headers=ignored_header(body.without_effect(llm.context)))
