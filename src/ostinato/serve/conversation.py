"""A request to answer a conversation, in the one form that every API's body is translated to.

The module of an API (`chat.py`, `responses.py`, `messages.py`, `ollama.py`) parses its own body into a `ChatRequest`,
`submitted` renders it and starts the engine's requests, and an `AnswerDeltas` reads each answer's tokens back as text,
reasoning and calls, which that module puts into its own shape. Nothing here knows the shape of any API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from ostinato.engine.request import Token, check_generates
from ostinato.errors import BadOption
from ostinato.llm import LLM
from ostinato.options import Sampling
from ostinato.serve.answers import Answers, GenerationInput, TokenUpdate, repeated
from ostinato.serve.errors import TOO_LONG, Refusal
from ostinato.serve.log import Record
from ostinato.serve.logprobs import PendingTokens
from ostinato.serve.service import Service
from ostinato.text.answer import AnswerReader, Delta
from ostinato.text.template import ChatTemplate
from ostinato.text.tools import TemplateMessage, Tool, ToolChoice, ToolFormat

IGNORED: Final = "x-ostinato-ignored"  # the header that names what of a request had no effect
MOST_NAMED: Final = 32  # a client reads a header of a few kilobytes only
_OF_THE_REQUEST: Final = ("self", "messages", "tools", "documents", "continue_final_message")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What an API calls the fields that an error may name."""

    messages: str = "messages"
    format: str = "response_format"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a model is to answer, and how.

    Attributes:
        messages: as chat templates expect them.
        sampling: with the constraint on the answer, if there is one.
        tools: the functions that the model may call; none if `choice` is none.
        choice: whether it must call one, or which.
        parallel: whether it may make several calls.
        continues: whether the answer continues the text of the last message, the assistant's; it has no format then,
            and no forced call.
        template_options: variables of the template.
        names: of the fields, for errors.
    """

    messages: Sequence[TemplateMessage]
    sampling: Sampling
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "none"
    parallel: bool = True
    continues: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)
    names: FieldNames = FieldNames()


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
    text = await service.in_template_thread(rendered, service, llm, asked)
    ask, reader = await service.in_thread(prepare, service, llm, asked, text)
    answers = Answers(service, llm, repeated([ask], n), n, record, asked.names.messages)
    await answers.start()
    return answers, reader


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
    """The conversation from the earliest turn from which it fits; None if even the last is too long.

    An answer needs room: its limit if it has one, otherwise a quarter of the context; at most half of the context."""
    room = min(asked.sampling.max_tokens or llm.context // 4, llm.context // 2)
    messages = asked.messages
    n_system = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [index for index in range(n_system + 1, len(messages)) if messages[index]["role"] == "user"]

    async def fits(shorter: ChatRequest) -> bool:
        try:
            return await n_prompt_tokens(service, llm, shorter) + room <= llm.context
        except Refusal as refusal:
            if refusal.code != TOO_LONG:
                raise
            return False

    found, low, high = None, 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        shorter = replace(asked, messages=[*messages[:n_system], *messages[starts[middle] :]])
        if await fits(shorter):
            found, high = shorter, middle
        else:
            low = middle + 1
    return found


async def n_prompt_tokens(service: Service, llm: LLM, asked: ChatRequest) -> int:
    """How many tokens the prompt of a conversation has."""
    text = await service.in_template_thread(rendered, service, llm, asked)
    ask, _ = await service.in_thread(prepare, service, llm, asked, text)
    return len(ask.ids)


def rendered(service: Service, llm: LLM, asked: ChatRequest) -> str:
    """The prompt: the conversation as its model reads it, with the tools that the model may call."""
    if llm.template is None:
        check_generates(llm.shape)
        message = "this model has no chat template; send its prompt as text, to /v1/completions"
        raise Refusal(400, message, param=asked.names.messages)
    speaks, words = service.tool_format, dict(asked.template_options)
    for name in _OF_THE_REQUEST:
        if name in words:
            message = f"chat_template_kwargs.{name} would replace what the request says; leave it out"
            raise Refusal(400, message, param="chat_template_kwargs")
    messages = list(asked.messages)
    if asked.tools or any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
        messages = speaks.prompt_messages(messages, asked.tools)
        words["tools"] = speaks.prompt_tools(asked.tools) if asked.tools else None
    if asked.continues:
        words["continue_final_message"] = True
    return llm.chat_text(messages, **words)


def prepare(
    service: Service, llm: LLM, asked: ChatRequest, text: str
) -> tuple[GenerationInput, Callable[[], AnswerReader]]:
    """The engine's request, and what makes the parser of one answer's text."""
    service.check_length(text, asked.names.messages)
    speaks, tools, sampling = service.tool_format, asked.tools, asked.sampling
    thinking = service.reasoning

    def after_thinking(sampling: Sampling) -> Sampling:
        calls = sampling.rule != asked.sampling.rule
        return sampling if thinking is None else thinking.before(sampling, text, calls=calls)

    if tools:
        sampling = _calling(speaks, asked)
    if tools and asked.choice == "auto" and sampling.rule is None:
        sampling = _triggered(speaks, llm, asked, after_thinking) or sampling
    else:
        sampling = after_thinking(sampling)
    show = (*(speaks.markers if tools else ()), *(thinking.markers if thinking is not None else ()))

    said = _text_of(asked.messages[-1]) if asked.continues else ""

    def reader() -> AnswerReader:
        return AnswerReader(
            None if thinking is None else thinking.continued(said) if said else thinking.parser(text),
            speaks.parser(tools) if tools else None,
            most_calls=None if asked.parallel else 1,  # an optional call may have no grammar that limits it to one
        )

    return GenerationInput(llm.tokenizer.encode_rendered(text), sampling, not said, show), reader


def _text_of(message: TemplateMessage) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _calling(speaks: ToolFormat, asked: ChatRequest) -> Sampling:
    """The sampling whose answer is the forced call, if there is one, and otherwise follows the requested format."""
    sampling = asked.sampling
    format = sampling.rule
    if format is not None and format.kind != "schema":
        name = asked.names.format
        raise Refusal(400, f"{name}: tools can be had with text and with JSON, not with another format", param=name)
    schema = None if format is None else format.text
    rule = speaks.grammar(asked.tools, asked.choice, parallel=asked.parallel, schema=schema)
    return sampling if rule is None else replace(sampling, schema=None, json_mode=False, grammar=rule)


def _triggered(
    speaks: ToolFormat, llm: LLM, asked: ChatRequest, after_thinking: Callable[[Sampling], Sampling]
) -> Sampling | None:
    """The sampling whose optional calls follow their functions' schemas; None where the loop cannot follow that by
    itself: then they are unconstrained, since masks of the host would delay every token."""
    if not llm.loop_follows() or (asked.continues and speaks.writes_messages):
        return None
    for loose in (False, True):  # with all schemas it may be too long, or take too many states
        rule = speaks.triggered_grammar(asked.tools, parallel=asked.parallel, loose=loose)
        if rule is None:
            return None
        try:
            made = replace(asked.sampling, grammar=rule)
            made = made if speaks.writes_messages else after_thinking(made)  # messages hold the reasoning already
        except BadOption:  # it is too long
            continue
        if llm.loop_follows(made):
            return made
    return None


def effort_options(template: ChatTemplate | None, effort: str) -> dict[str, Any] | None:
    """A requested effort of reasoning as variables of the template; None if the template has none for it."""
    source = "" if template is None else template.source
    if "reasoning_effort" in source:
        return {"reasoning_effort": effort}
    if "enable_thinking" in source:
        return {"enable_thinking": effort not in ("none", "minimal")}
    return None


def verbosity_options(template: ChatTemplate | None, verbosity: str) -> dict[str, Any] | None:
    """A requested verbosity as variables of the template; None if the template has none for it, and it is not the
    usual one."""
    if template is not None and "verbosity" in template.source:
        return {"verbosity": verbosity}
    return {} if verbosity == "medium" else None


def thinking_options(service: Service, template: ChatTemplate | None, wanted: bool) -> dict[str, Any] | None:
    """Whether the model should reason, as variables of the template; None if the template has none for it and the
    model does the other."""
    if template is not None and "enable_thinking" in template.source:
        return {"enable_thinking": wanted}
    known = effort_options(template, "none")
    if known is None:
        return {} if wanted == (service.reasoning is not None) else None
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
