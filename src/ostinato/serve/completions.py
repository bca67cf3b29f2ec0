"""`POST /v1/completions`: text goes on from a prompt, or from each of several."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ostinato.engine.request import Token
from ostinato.llm import LLM
from ostinato.serve import logprobs
from ostinato.serve.answers import Answers, Ask, Heard, repeated
from ostinato.serve.errors import Refusal
from ostinato.serve.log import Record
from ostinato.serve.reply import Head, events, whole
from ostinato.serve.service import Service
from ostinato.serve.shapes import CompletionBody, StreamOptions
from ostinato.serve.stream import EventStream, at_once
from ostinato.text.tokenizer import Tokenizer


async def complete(service: Service, body: CompletionBody, request: Request) -> Response:
    """Go on from prompts."""
    record: Record = request.state.record
    llm = service.llm(body.model)
    n = body.n_choices
    asks = repeated(await service.in_thread(prepare, service, llm, body), n)
    answers = Answers(service, llm, asks, n, record, "prompt")
    await answers.start()
    echoes = [llm.tokenizer.decode(ask.ids) if body.echo else "" for ask in asks]
    teller = CompletionTeller(llm.tokenizer, echoes, body.logprobs)
    head = Head(f"cmpl-{record.id}", "text_completion", int(service.clock()), service.model_id)
    if body.stream:
        options = body.stream_options or StreamOptions()
        made = events(answers, teller, head, options, record, head.kind)
        return EventStream(made, answers, record, service.limits.write_s)
    return await at_once(request, whole(answers, teller, head, record), answers)


def prepare(service: Service, llm: LLM, body: CompletionBody) -> list[Ask]:
    """Tokenize and check; in a thread, because a prompt may be long."""
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options is for a stream; set stream to true", param="stream_options")
    if body.echo and body.logprobs is not None:
        raise Refusal(400, "logprobs of an echoed prompt are not supported; leave echo or logprobs out", param="echo")
    sampling = body.sampling(seed=body.seed if body.seed is not None else secrets.randbits(53))
    return [Ask(_ids(service, llm, prompt), sampling, False) for prompt in body.prompts]


def _ids(service: Service, llm: LLM, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise Refusal(400, "the prompt is empty; give it some text", param="prompt")
        service.check_length(prompt, "prompt")
        return llm.tokenize(prompt)
    return prompt


class CompletionTeller:
    """Tells answers as texts."""

    def __init__(self, tokenizer: Tokenizer, echoes: Sequence[str], n_top: int | None) -> None:
        self._tokenizer, self._n_top = tokenizer, n_top
        self._texts = [[echo] for echo in echoes]
        self._offsets = [len(echo) for echo in echoes]
        self._untold = [logprobs.Untold() for _ in echoes]
        self._told: list[list[Token]] = [[] for _ in echoes]
        self._reasons = ["" for _ in echoes]

    def opening(self) -> list[dict[str, Any]]:
        """Nothing, unless a prompt is to be echoed."""
        return [self._choice(index, texts[0], None, None) for index, texts in enumerate(self._texts) if texts[0]]

    def told(self, heard: Heard) -> list[dict[str, Any]]:
        index, token, piece = heard
        untold = self._untold[index]
        if self._n_top is not None:
            untold.add(token, met_stop=piece.finish_reason == "stop" and token.finish_reason != "stop")
        if not piece.text and piece.finish_reason is None:
            return []
        self._texts[index].append(piece.text)
        tokens = untold.take()
        self._told[index] += tokens
        self._reasons[index] = piece.finish_reason or ""
        told = self._logprobs(index, tokens) if tokens else None
        return [self._choice(index, piece.text, told, piece.finish_reason)]

    def choices(self) -> list[dict[str, Any]]:
        whole = []
        for index, texts in enumerate(self._texts):
            self._offsets[index] = len(texts[0])
            told = None if self._n_top is None else self._logprobs(index, self._told[index])
            whole.append(self._choice(index, "".join(texts), told, self._reasons[index]))
        return whole

    def reasons(self) -> list[str]:
        return self._reasons

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        told, self._offsets[index] = logprobs.for_completion(
            self._tokenizer, tokens, self._n_top or 0, self._offsets[index]
        )
        return told

    def _choice(self, index: int, text: str, told: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}
