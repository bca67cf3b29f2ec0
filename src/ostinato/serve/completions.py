"""`POST /v1/completions`: continue one prompt or several; echo and score prompts."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ostinato.engine.request import check_prompt
from ostinato.llm import LLM
from ostinato.serve.answers import Answers, TokenUpdate, repeated
from ostinato.serve.conversation import ignored_header
from ostinato.serve.errors import Refusal, renamed
from ostinato.serve.log import Record
from ostinato.serve.logprobs import CompletionLogprobs, Entry, PendingTokens, joined
from ostinato.serve.reply import reply
from ostinato.serve.service import Service
from ostinato.serve.shapes import CompletionBody, several
from ostinato.serve.stream import client_gone, while_connected
from ostinato.text.answer import GenerationInput
from ostinato.text.tokenizer import Tokenizer


async def complete(service: Service, body: CompletionBody, request: Request) -> Response:
    """Continue prompts."""
    record: Record = request.state.record
    llm, n = service.llm(body.model), body.n or 1
    prompts = await service.in_thread(prepare, service, llm, body)
    asks = repeated(prompts, n)
    answers = Answers(service, llm, asks, n, record, "prompt")
    echoes = await while_connected(request.receive, _echoes(service, llm, body, prompts))
    if echoes is None:
        return client_gone(record)
    with renamed(body.renamed):
        await answers.start(generate=body.max_tokens != 0)
    choices = [CompletionChoice(index, llm.tokenizer, echoes[index // n], body) for index in range(len(asks))]
    kinds = ("text_completion", "text_completion")
    headers = ignored_header(body.ignored)
    return await reply(service, request, body, answers, choices, f"cmpl-{record.id}", kinds, headers)


# Before


def prepare(service: Service, llm: LLM, body: CompletionBody) -> list[GenerationInput]:
    """Tokenize and check; in a thread, because a prompt may be long."""
    sampling = body.sampling()
    return [GenerationInput(prompt_ids(service, llm, prompt), sampling, False) for prompt in several(body.prompt)]


def prompt_ids(service: Service, llm: LLM, prompt: str | list[int]) -> list[int]:
    """The tokens of a prompt as it is, without a template."""
    if isinstance(prompt, str):
        if not prompt:
            raise Refusal(400, "the prompt is empty; give it some text", param="prompt")
        service.check_length(prompt, "prompt")
        return llm.tokenize(prompt)
    check_prompt(prompt, shape=llm.shape, context=llm.context)
    return prompt


class Echo(NamedTuple):
    """A prompt that is echoed before its answers; `entries` if its logprobs are requested."""

    text: str
    entries: Sequence[Entry]


async def _echoes(
    service: Service, llm: LLM, body: CompletionBody, prompts: Sequence[GenerationInput]
) -> list[Echo | None]:
    """The echo of each prompt."""
    if not body.echo:
        return [None] * len(prompts)
    texts = await service.in_thread(lambda: [llm.tokenizer.decode(prompt.ids) for prompt in prompts])
    n_top = body.logprobs
    if n_top is None:
        return [Echo(text, ()) for text in texts]
    entries = await service.beside(_entries(llm, [list(prompt.ids) for prompt in prompts], n_top))
    return [Echo(*echo) for echo in zip(texts, entries, strict=True)]


def _entries(llm: LLM, prompts: list[list[int]], n_top: int) -> Generator[list[Entry], None, None]:
    for ids, later in zip(prompts, llm.each_token_logprobs(prompts, n_top), strict=True):
        yield [Entry(ids[0], None), *(Entry(one.token_id, one.logprob, one.top) for one in later)]


# After


class CompletionChoice:
    """One answer, so far."""

    def __init__(self, index: int, tokenizer: Tokenizer, echo: Echo | None, body: CompletionBody) -> None:
        self.index, self.echo = index, echo
        self.reason = "length" if body.max_tokens == 0 else ""
        text = "" if echo is None else echo.text
        self._texts = [text]
        self._parts: list[dict[str, Any]] = []  # of the logprobs
        self._logprobs: CompletionLogprobs | None = None
        if body.logprobs is not None:
            of_prompt = CompletionLogprobs(tokenizer, body.logprobs, at_start=True)
            self._parts.append(of_prompt.part([] if echo is None else echo.entries))
            self._logprobs = CompletionLogprobs(tokenizer, body.logprobs, len(text), at_start=False)
        self._pending = PendingTokens()

    def opening(self) -> dict[str, Any] | None:
        """None, unless the prompt is echoed."""
        if self.echo is None:
            return None
        return self._chunk(self._texts[0], self._parts[0] if self._parts else None, self.reason or None)

    def format_update(self, update: TokenUpdate) -> list[dict[str, Any]]:
        _, token, piece = update
        self._pending.add(token, met_stop=piece.finish_reason == "stop" and token.finish_reason != "stop")
        if not piece.text and piece.finish_reason is None:
            return []
        self._texts.append(piece.text)
        self.reason = piece.finish_reason or ""
        tokens, part = self._pending.take(), None
        if tokens and self._logprobs is not None:
            part = self._logprobs.part(tokens)
            self._parts.append(part)
        return [self._chunk(piece.text, part, piece.finish_reason)]

    def whole(self) -> dict[str, Any]:
        return self._chunk("".join(self._texts), joined(self._parts) if self._parts else None, self.reason)

    def _chunk(self, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
