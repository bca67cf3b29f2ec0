"""`POST /v1/responses`: items become a conversation, and tokens become the items of a response; kept responses.

The body is in `responses_body.py`, items and events in `responses_output.py`, what is kept in `response_store.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ostinato.llm import LLM
from ostinato.serve.answer_parts import AnswerParts, Event
from ostinato.serve.answers import Answers, TokenUpdate
from ostinato.serve.conversation import (
    AnswerDeltas,
    effort_options,
    ignored_header,
    n_prompt_tokens,
    submitted,
    submitted_in_room,
    verbosity_options,
)
from ostinato.serve.errors import Refusal, renamed
from ostinato.serve.log import Record
from ostinato.serve.response_keeper import Continued, ResponseKeeper
from ostinato.serve.response_store import KeptResponse
from ostinato.serve.responses_body import (
    ENCRYPTED,
    AllowedTools,
    ChoiceOfTool,
    FlatSchemaFormat,
    FunctionTool,
    Item,
    MessageItem,
    NamespaceTool,
    OtherTool,
    ReferenceItem,
    ResponsesBody,
    functions_of,
    ignored_of,
    listed,
    messages_of,
    namespaces_of,
    offered_of,
)
from ostinato.serve.responses_output import NewItem
from ostinato.serve.sealed import sealed
from ostinato.serve.service import Service
from ostinato.serve.shapes import JsonFormat
from ostinato.serve.stream import EventStream, at_once, formatted, json_response, named_event
from ostinato.text.chat import ChatRequest, FieldNames
from ostinato.text.tools import Tool, ToolChoice, ToolPlace, allowed, read_choice, read_tools

NOT_KEPT: Final = (
    "this server keeps no responses (--keep-responses); send the whole conversation as input, with store false"
)
_NAMES: Final = FieldNames("input", "text.format")
# Messages are numbered otherwise than the items that they are made of: an error names only the field.
_PARAMS: Final = {"messages": "input", "prompt": "input", "response_format": "text.format"}


async def respond(service: Service, body: ResponsesBody, request: Request) -> Response:
    """Answer with a response."""
    record: Record = request.state.record
    llm = service.llm(body.model)
    previous = await _previous(service, body, record.id)
    items = [await _resolved(service.keeper, item) for item in body.items]
    with renamed(_PARAMS):
        asked = await service.in_thread(translated, llm, body, previous, items)
        submit = submitted_in_room if body.truncation == "auto" else submitted
        answers, reader = await submit(service, llm, asked.conversation, record)
    deltas = AnswerDeltas(reader(), logprobs=body.n_logprobs is not None)
    seal = sealed if ENCRYPTED in (body.include or ()) else None
    new_item = NewItem(record.id, llm.tokenizer, seal, namespaces_of(asked.offered))
    output = AnswerParts(deltas, new_item)
    reply = ResponseReply(service, body, asked, previous, answers, output, record)
    headers = ignored_header(asked.ignored)
    if body.stream:
        write_s = service.limits.write_s
        return EventStream(reply.events(), answers, record, write_s, headers=headers, failed=reply.failed)
    return await at_once(request, reply.whole(), answers, headers)


# Before


async def _previous(service: Service, body: ResponsesBody, request: str) -> Continued | None:
    """The conversation that this response continues. `request`: its id."""
    id, keeper = body.previous_response_id, service.keeper
    if keeper is None:
        for name in ("store", "previous_response_id"):
            if getattr(body, name):
                raise Refusal(400, f"{name} is given, and {NOT_KEPT}", param=name)
    if id is None or keeper is None:
        return None
    found = await keeper.continued(request, id)
    if found is None:
        message = f"previous_response_id: there is no response {id!r} here; {_why_gone(service)}"
        raise Refusal(400, message, param="previous_response_id", code="previous_response_not_found")
    return found


async def _resolved(keeper: ResponseKeeper | None, item: Item) -> Item:
    """An item; for a reference, the one that it names."""
    if not isinstance(item, ReferenceItem):
        return item
    if keeper is None:
        raise Refusal(400, f"the input refers to the item {item.id!r}, and {NOT_KEPT}", param="input")
    found = await keeper.item(item.id)
    if found is None:
        message = f"the input refers to the item {item.id!r}, and no kept response has an item of this id"
        raise Refusal(404, message, param="input")
    return found


@dataclass(frozen=True, slots=True)
class Translated:
    """A body as a conversation.

    Attributes:
        conversation: of the body, and of the responses before it.
        items: of the body.
        offered: the tools that can be called.
        ignored: names what of the body has no effect.
    """

    conversation: ChatRequest
    items: Sequence[Item]
    offered: Sequence[FunctionTool | NamespaceTool]
    ignored: Sequence[str]


def translated(llm: LLM, body: ResponsesBody, previous: Continued | None, items: Sequence[Item]) -> Translated:
    """The body, checked."""
    if not items and previous is None:
        raise Refusal(400, "input is missing, and it is required here", param="input")
    given = body.tools or []
    offered = [offered_of(tool) for tool in given if not isinstance(tool, OtherTool)]
    ignored = [*body.ignored, *(name for tool in given for name in ignored_of(tool))]
    tools, choice = _tools(body)
    options: dict[str, Any] = {}
    if body.reasoning is not None:
        effort = body.reasoning.effort
        known = {} if effort is None else effort_options(llm.template, effort)
        options = known or {}
        ignored += ["reasoning.effort"] if known is None else []
        ignored += [f"reasoning.{name}" for name in body.reasoning.model_dump(exclude={"effort"}, exclude_none=True)]
    if body.text is not None and body.text.verbosity is not None:
        known = verbosity_options(llm.template, body.text.verbosity)
        options = options | (known or {})
        ignored += ["text.verbosity"] if known is None else []
    before = [] if previous is None else list(previous.items)
    if body.instructions is not None:
        before = [MessageItem(role="system", content=body.instructions), *before]
    asked = ChatRequest(
        messages=messages_of(before, items),
        sampling=body.sampling(),
        tools=tools if choice != "none" else (),
        choice=choice,
        parallel=body.parallel_tool_calls is not False,
        template_options={**options, **(body.chat_template_kwargs or {})},
        names=_NAMES,
    )
    return Translated(asked, items, offered, ignored)


def _tools(body: ResponsesBody) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The functions, and whether the model must call one."""
    functions = functions_of(body.tools or [])
    tools = read_tools(
        [{"function": tool.model_dump(exclude={"type"})} for tool in functions.values()],
        [ToolPlace(place, place, f"{place}.parameters") for place in functions],
    )
    choice = body.tool_choice
    match choice:
        case None | str():
            return tools, read_choice(choice, tools)
        case AllowedTools(mode=mode, tools=named):
            tools = allowed(tools, [tool.name for tool in named if tool.type == "function"])
            return tools, read_choice(mode, tools)
        case _:
            if choice.type != "function":
                message = f"tool_choice names a tool of the type {choice.type!r}; only functions can be called here"
                raise Refusal(400, message, param="tool_choice")
            return tools, read_choice({"function": {"name": choice.name}}, tools)


# After


class ResponseReply:
    """A response while its answer is made: as events, or whole."""

    def __init__(
        self,
        service: Service,
        body: ResponsesBody,
        asked: Translated,
        previous: Continued | None,
        answers: Answers,
        output: AnswerParts,
        record: Record,
    ) -> None:
        self._service, self._body, self._asked, self._previous = service, body, asked, previous
        self._answers, self._output, self._record = answers, output, record
        self._keeper = service.keeper if body.store is not False else None
        self._head = self._begun(int(service.clock()))
        self._n_events = 0

    async def whole(self) -> dict[str, Any]:
        """The whole response as one object."""
        async for update in self._answers.updates():
            self._output.format_update(update)
        return await self._finished()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream: the response begins, its items are made one after the other, and it ends."""
        yield self._encoded({"type": f"response.{name}", "response": self._head} for name in ("created", "in_progress"))

        def format(updates: Sequence[TokenUpdate]) -> bytes:
            return self._encoded(event for update in updates for event in self._output.format_update(update))

        async for part in formatted(self._answers, format):
            yield part
        response = await self._finished()
        yield self._encoded([{"type": f"response.{response['status']}", "response": response}])

    def failed(self, refusal: Refusal) -> bytes:
        """The last event of a stream that failed."""
        # Of the codes that clients know, the one that fits.
        error = {"code": "server_error", "message": refusal.body()["error"]["message"]}
        response = {**self._head, "status": "failed", "error": error, "output": self._output.cut_off()}
        return self._encoded([{"type": "response.failed", "response": response}])

    def _encoded(self, events: Iterable[Event]) -> bytes:
        parts = []
        for number, event in enumerate(events, start=self._n_events):
            parts.append(named_event({**event, "sequence_number": number}))
        self._n_events += len(parts)
        return b"".join(parts)

    async def _finished(self) -> dict[str, Any]:
        """The response after its last token; kept for later requests if it should be."""
        reason = self._output.reason
        self._record.outcome = reason
        cut = reason == "length"
        response = {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(self._service.clock()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output.whole(),
            "usage": self._usage(),
            **await self._answers.extras(),
        }
        if self._keeper is not None:
            kept = await self._keeper.keep(self._record.id, response, self._asked.items, self._previous)
            response["store"] = kept  # one that is too large is not kept
        return response

    def _usage(self) -> dict[str, Any]:
        usage = self._answers.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self._answers.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._output.n_reasoning},
            "total_tokens": usage["total_tokens"],
        }

    def _begun(self, created: int) -> dict[str, Any]:
        """The response before its first token: what was asked for."""
        body, reasoning, text = self._body, self._body.reasoning, self._body.text
        asked = None if text is None else text.format
        # To a client, a format of ours is text: its types have no others.
        shape = {"type": "text"}
        if isinstance(asked, JsonFormat | FlatSchemaFormat):
            shape = asked.model_dump(exclude_none=True)
        return {
            "id": f"resp_{self._record.id}",
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._service.answers_as(body.model),
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": self._keeper is not None,
            "temperature": body.temperature,
            "text": {"format": shape, "verbosity": (text and text.verbosity) or "medium"},
            "tool_choice": _echoed(body.tool_choice),
            "tools": [tool.model_dump() for tool in self._asked.offered],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": None,
        }


def _echoed(choice: ChoiceOfTool | None) -> Any:
    return choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump(exclude_none=True)


# Kept responses


def _why_gone(service: Service) -> str:
    options = service.options
    return (
        f"the last {options.n_kept_responses} are kept for {options.keep_responses_s:.0f} s, in the server's memory, "
        "unless store is false"
    )


def kept_response(service: Service, id: str) -> KeptResponse:
    """A kept response; refused if there is none of this id."""
    if service.responses is None:
        raise Refusal(404, f"there is no response {id!r}: {NOT_KEPT}")
    found = service.responses.get(id)
    if found is None:
        raise Refusal(404, f"there is no response {id!r} here; {_why_gone(service)}")
    return found


def retrieve(service: Service, id: str, stream: bool) -> Response:
    """`GET /v1/responses/{id}`."""
    found = kept_response(service, id)
    if stream:
        raise Refusal(400, "stream: a kept response is returned whole; leave it out", param="stream")
    return json_response(found.response)


def delete(service: Service, id: str) -> Response:
    """`DELETE /v1/responses/{id}`."""
    kept_response(service, id)
    assert service.responses is not None
    service.responses.delete(id)
    return json_response({"id": id, "object": "response", "deleted": True})


def input_items(service: Service, id: str, limit: int, order: str, after: str | None) -> Response:
    """`GET /v1/responses/{id}/input_items`: what a kept response was given, a page at a time."""
    items = listed(kept_response(service, id).input, id)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise Refusal(400, f"after: the input of this response has no item {after!r}", param="after")
    rest = items if after is None else items[ids.index(after) + 1 :]
    page = rest[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return json_response(
        {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(rest) > len(page)}
    )


async def input_tokens(service: Service, body: ResponsesBody, request: Request) -> Response:
    """`POST /v1/responses/input_tokens`: how many tokens the prompt of a response would have."""
    llm = service.llm(body.model)
    record: Record = request.state.record
    previous = await _previous(service, body, record.id)
    items = [await _resolved(service.keeper, item) for item in body.items]
    with renamed(_PARAMS):
        asked = (await service.in_thread(translated, llm, body, previous, items)).conversation
        n_tokens = await n_prompt_tokens(service, llm, asked)
    return json_response({"object": "response.input_tokens", "input_tokens": n_tokens})
