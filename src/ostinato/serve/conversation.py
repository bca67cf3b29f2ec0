"""Answers a conversation, whatever API asked for it.

The module of an API (`chat.py`, `responses.py`, `messages.py`, `ollama.py`) parses its own body into a `ChatRequest`
(`text/chat.py`), `submitted` renders it and starts the engine's requests, and an `AnswerDeltas` reads each answer's
tokens back as text, reasoning and calls, which that module puts into its own shape. Nothing here knows the shape of
any API.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from ostinato.engine.request import Token, check_generates
from ostinato.llm import LLM
from ostinato.serve.answers import Answers, TokenUpdate, repeated
from ostinato.serve.errors import TOO_LONG, Refusal
from ostinato.serve.log import Record
from ostinato.serve.logprobs import PendingTokens
from ostinato.serve.service import Service
from ostinato.text.answer import AnswerReader, Delta, GenerationInput
from ostinato.text.chat import ChatRequest, room_for_answer, without_oldest_turns
from ostinato.text.template import ChatTemplate

IGNORED: Final = "x-ostinato-ignored"  # the header that names what of a request had no effect
MOST_NAMED: Final = 32  # a client reads a header of a few kilobytes only
_THINKING: Final = re.compile(r"\{%-?\s*(el)?if (not )?thinking\b")
_OF_THE_REQUEST: Final = ("self", "messages", "tools", "documents", "continue_final_message")


@dataclass(frozen=True, slots=True)
class TranslatedBody:
    """A body as a conversation. `ignored` names what of it has no effect."""

    conversation: ChatRequest
    ignored: Sequence[str]


# Before


async def submitted(
    service: Service, llm: LLM, asked: ChatRequest, record: Record, n: int = 1
) -> tuple[Answers, Callable[[], AnswerReader]]:
    """The `n` answers to a conversation, started, and what makes the parser of one answer's text."""
    prompt = await service.in_template_thread(rendered, llm, asked)
    ask = await service.in_thread(prepare, service, llm, asked, prompt)
    answers = Answers(service, llm, repeated([ask], n), n, record, asked.names.messages)
    await answers.start()
    return answers, ask.reader


async def submitted_in_room(
    service: Service, llm: LLM, asked: ChatRequest, record: Record
) -> tuple[Answers, Callable[[], AnswerReader]]:
    """The one answer to a conversation, started; if the conversation is too long, without its oldest turns."""
    try:
        return await submitted(service, llm, asked, record)
    except Refusal as refusal:
        if refusal.code != TOO_LONG:
            raise
        shorter = await _shortened(service, llm, asked)
        if shorter is None:
            raise
    return await submitted(service, llm, shorter, record)


async def _shortened(service: Service, llm: LLM, asked: ChatRequest) -> ChatRequest | None:
    """The conversation from the earliest turn from which it fits; None if even the last is too long."""
    room, candidates = room_for_answer(asked.sampling, llm.context), without_oldest_turns(asked.messages)

    async def fits(shorter: ChatRequest) -> bool:
        try:
            return await n_prompt_tokens(service, llm, shorter) + room <= llm.context
        except Refusal as refusal:
            if refusal.code != TOO_LONG:
                raise
            return False

    found, low, high = None, 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        shorter = replace(asked, messages=candidates[middle])
        if await fits(shorter):
            found, high = shorter, middle
        else:
            low = middle + 1
    return found


async def n_prompt_tokens(service: Service, llm: LLM, asked: ChatRequest) -> int:
    """How many tokens the prompt of a conversation has."""
    prompt = await service.in_template_thread(rendered, llm, asked)
    ask = await service.in_thread(prepare, service, llm, asked, prompt)
    return len(ask.ids)


def rendered(llm: LLM, asked: ChatRequest) -> str:
    """The prompt: the conversation as its model reads it, with the tools that the model may call."""
    if llm.template is None:
        check_generates(llm.shape)
        message = "this model has no chat template; send its prompt as text, to /v1/completions"
        raise Refusal(400, message, param=asked.names.messages)
    for name in _OF_THE_REQUEST:
        if name in asked.template_options:
            message = f"chat_template_kwargs.{name} would replace what the request says; leave it out"
            raise Refusal(400, message, param="chat_template_kwargs")
    return llm.chat_format.render(asked)


def prepare(service: Service, llm: LLM, asked: ChatRequest, prompt: str) -> GenerationInput:
    """The engine's request, of the rendered prompt."""
    service.check_length(prompt, asked.names.messages)
    if asked.tools_and_other_format:
        name = asked.names.format
        raise Refusal(400, f"{name}: tools can be had with text and with JSON, not with another format", param=name)
    return llm.chat_format.prepare(asked, prompt)


def effort_options(template: ChatTemplate | None, effort: str) -> dict[str, Any] | None:
    """A requested effort of reasoning as variables of the template; None if the template has none for it."""
    source = "" if template is None else template.source
    if "reasoning_effort" in source:
        return {"reasoning_effort": effort}
    switch = _switch_of(source)
    return None if switch is None else {switch: effort not in ("none", "minimal")}


def _switch_of(source: str) -> str | None:
    """The variable by which a template's model reasons or does not; None if it has none."""
    if "enable_thinking" in source:
        return "enable_thinking"
    return "thinking" if _THINKING.search(source) is not None else None  # Granite 3, DeepSeek V3.1


def verbosity_options(template: ChatTemplate | None, verbosity: str) -> dict[str, Any] | None:
    """A requested verbosity as variables of the template; None if the template has none for it, and it is not the
    usual one."""
    if template is not None and "verbosity" in template.source:
        return {"verbosity": verbosity}
    return {} if verbosity == "medium" else None


def thinking_options(llm: LLM, wanted: bool) -> dict[str, Any] | None:
    """Whether the model should reason, as variables of the template; None if the template has none for it and the
    model does the other."""
    switch = None if llm.template is None else _switch_of(llm.template.source)
    if switch is not None:
        return {switch: wanted}
    known = effort_options(llm.template, "none")
    if known is None:
        return {} if wanted == (llm.chat_format.reasoning is not None) else None
    return {} if wanted else known


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that names what of a request had no effect, if anything had none."""
    known = list(dict.fromkeys(names))
    listed = ", ".join(known[:MOST_NAMED] + (["..."] if len(known) > MOST_NAMED else []))
    return {IGNORED: listed} if listed else {}


# After


class DeltaTokens(NamedTuple):
    """A delta of an answer, and the tokens whose log-probabilities are sent with it."""

    delta: Delta
    tokens: list[Token]


class AnswerDeltas:
    """Reads one answer: its tokens as deltas of text, reasoning and calls, for an API to shape.

    Attributes:
        reason: how the answer ended: `stop`, `length` or `tool_calls`; empty before.
        stop: the stop string that ended it; None if none did.
        n_reasoning: tokens up to the last that added to the reasoning.
    """

    def __init__(self, reader: AnswerReader, *, logprobs: bool) -> None:
        self._reader = reader
        self._pending = PendingTokens() if logprobs else None
        self._n_tokens = 0
        self.reason = ""
        self.stop: str | None = None
        self.n_reasoning = 0

    def read(self, update: TokenUpdate) -> list[DeltaTokens]:
        """What a token adds."""
        _, token, piece = update
        self._n_tokens += 1
        if self._pending is not None:
            self._pending.add(token, met_stop=piece.finish_reason == "stop" and token.finish_reason != "stop")
        deltas = self._reader.feed(piece.text)
        if piece.finish_reason is not None:
            deltas += self._reader.finish()
            called = piece.finish_reason == "stop" and self._reader.n_calls > 0
            self.reason = "tool_calls" if called else piece.finish_reason
            self.stop = piece.stop
        if any(delta.reasoning for delta in deltas):
            self.n_reasoning = self._n_tokens
        return [DeltaTokens(delta, self.unsent()) for delta in deltas]

    def unsent(self) -> list[Token]:
        """The tokens whose log-probabilities were requested and not sent yet."""
        return [] if self._pending is None else self._pending.take()
