"""The answers to one HTTP request: submitted together, read as tokens arrive, ended exactly once.

An HTTP request may ask for several answers (prompts times `n`); each is a request to the engine. The owner of
an `Answers` must close it: requests that still run are then cancelled, and their slots are free within a step.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, NamedTuple

from ostinato.engine.answer import Answer, Completion, Piece
from ostinato.engine.request import Request, Token
from ostinato.engine.token_queue import TokenQueue
from ostinato.errors import EngineDead, PromptTooLong
from ostinato.llm import LLM
from ostinato.options import MAX_SEED
from ostinato.serve.errors import TOO_LONG, Refusal, told
from ostinato.serve.log import Record
from ostinato.serve.script import scripted_text
from ostinato.serve.service import Service
from ostinato.text.answer import GenerationInput
from ostinato.text.grammar import with_control_tokens

LONGEST_WAIT_FOR_SUM_S: Final = 1.0


class TokenUpdate(NamedTuple):
    """One token of an answer, and the piece of text that it added."""

    number: int  # of the answer
    token: Token
    piece: Piece


def repeated(inputs: Sequence[GenerationInput], n: int) -> list[GenerationInput]:
    """Each input n times, with consecutive seeds, so that the answers differ."""
    return [
        replace(ask, sampling=replace(ask.sampling, seed=((ask.sampling.seed or 0) + number) % (MAX_SEED + 1)))
        for ask in inputs
        for number in range(n)
    ]


class Answers:
    """All answers of one HTTP request. `n`: answers per prompt; those of a prompt are adjacent."""

    def __init__(
        self, service: Service, llm: LLM, inputs: Sequence[GenerationInput], n: int, record: Record, field: str
    ) -> None:
        """`field` is the field that held the prompts; the error for a prompt that is too long names it."""
        load = service.options.load
        most = min(service.limits.choices, load.slots + load.queue)  # more could never wait
        if len(inputs) > most:
            message = f"{len(inputs)} answers are asked for; at most {most} can be at once"
            raise Refusal(400, message, param="n" if n > 1 else field)
        self._service, self._llm, self._inputs, self._n, self._record = service, llm, inputs, n, record
        self._field = field
        self._box = TokenQueue(service.limits.unread_tokens, self.cancel)
        self._answers: list[Answer] = []
        self._last_ns = [0] * len(inputs)
        self.completions: list[Completion | None] = [None] * len(inputs)
        self._left = len(inputs)
        self.n_tokens = 0
        self.host_s = 0.0

    @property
    def done(self) -> bool:
        """Whether every answer has ended."""
        return self._left == 0

    async def start(self, *, generate: bool = True) -> None:
        """Submit all requests, or refuse all of them. Without `generate` there is nothing to submit."""
        service = self._service
        if service.options.script:
            self._inputs = await service.in_thread(self._scripted)
        service.boxes.add(self._box)
        record = self._record
        record.prompt_tokens = sum(len(ask.ids) for ask in self._inputs[:: self._n])
        if service.options.log_prompts:
            record.prompt = [self._llm.tokenizer.decode(ask.ids, special=True) for ask in self._inputs[:: self._n]]
        if not generate:
            self._left = 0
        try:
            for index, ask in enumerate(self._inputs if generate else ()):
                self._answers.append(await service.in_thread(self._submit, index, ask))
        except BaseException as error:
            self.close()
            if isinstance(error, PromptTooLong):
                raise Refusal(400, told(error), param=self._field, code=TOO_LONG) from error
            raise
        service.metrics.prompt_tokens.inc(record.prompt_tokens)

    def _scripted(self) -> list[GenerationInput]:
        """The inputs with the script's texts as the only possible answers."""
        tokenizer, forced = self._llm.tokenizer, []
        for ask in self._inputs:
            text = scripted_text(self._service.options.script, tokenizer.decode(ask.ids, special=True))
            if text is None:
                raise Refusal(400, "no entry of the script (--script) answers this prompt", param=self._field)
            rule = f"start: {with_control_tokens(text, tokenizer.control_ids(ask.show))}"
            sampling = replace(ask.sampling, schema=None, json_mode=False, regex=None, choice=None, grammar=rule)
            forced.append(replace(ask, sampling=sampling))
        return forced

    def _submit(self, index: int, ask: GenerationInput) -> Answer:
        sink = self._service.dispatcher.sink(self._box, index)
        return self._llm.submit(ask.ids, ask.sampling, fresh=ask.fresh, show=ask.show, sink=sink)

    async def updates(self) -> AsyncGenerator[TokenUpdate, None]:
        """Every token until all answers have ended."""
        while not self.done:
            for update in await self.more():
                yield update

    async def more(self) -> list[TokenUpdate]:
        """Wait for new tokens and return them; empty if none arrived for a while."""
        box, limits = self._box, self._service.limits
        first = box.take()
        if first is None:
            self._check()
            clock = asyncio.get_running_loop().call_later(limits.keep_alive_s, box.wake)
            try:
                await box.look()
            finally:
                clock.cancel()
            self._check()
            first = box.take()
        began = time.perf_counter()
        heard: list[TokenUpdate] = []
        message = first
        while message is not None:
            index, content = message
            if self.completions[index] is None:  # else it has met a stop string
                heard.append(self._receive(index, content))
            message = box.take()
        self.host_s += time.perf_counter() - began
        return heard

    def _receive(self, index: int, message: object) -> TokenUpdate:
        if isinstance(message, EngineDead):
            self._service.die(str(message))
        if isinstance(message, Exception):
            raise message
        if not isinstance(message, Token):
            raise Refusal(503, "the server is being stopped", code="draining")
        metrics, answer = self._service.metrics, self._answers[index]
        last = self._last_ns[index]
        if last:
            metrics.gap.observe((message.time_ns - last) / 1e9)
        self._last_ns[index] = message.time_ns
        self.n_tokens += 1
        piece = answer.push(message)
        if piece.completion is not None:
            answer.source.cancel()  # a stop string ends it before the engine would
            self.completions[index] = piece.completion
            self._left -= 1
        return TokenUpdate(index, message, piece)

    def _check(self) -> None:
        limits = self._service.limits
        if self._service.stopping.is_set():
            raise Refusal(503, "the server is being stopped", code="draining")
        if self._box.overflowed:
            raise Refusal(408, f"{limits.unread_tokens} tokens wait to be read; the reader is too slow")
        if time.perf_counter() - self._record.started > limits.request_s:
            raise Refusal(408, f"no request may take longer than {limits.request_s:.0f} s")

    def cancel(self) -> None:
        """End what still runs."""
        for answer in self._answers:
            answer.source.cancel()

    def close(self) -> None:
        """End in any case: cancel what runs and complete the log record. May be called twice."""
        self.cancel()
        if self._box not in self._service.boxes:
            return
        self._service.boxes.discard(self._box)
        record, metrics = self._record, self._service.metrics
        record.tokens = self.n_tokens
        metrics.tokens.inc(self.n_tokens)
        metrics.host_seconds.inc(self.host_s)
        requests = [answer.source for answer in self._answers if isinstance(answer.source, Request)]
        if not requests:
            return
        record.cached_tokens = self.cached_tokens
        for request in requests:
            if request.prefill_began is not None:
                metrics.wait.observe(request.wait_s)
            if request.first_token is not None:
                metrics.first_token.observe(request.first_token_s)
        record.wait_ms, record.first_token_ms = requests[0].wait_s * 1e3, requests[0].first_token_s * 1e3 or None
        if self._service.options.log_prompts:
            record.answer = [None if one is None else one.text for one in self.completions]

    # What is reported

    @property
    def cached_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(answer.source.cached_tokens for answer in self._answers[:: self._n])

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage` so far: a prompt counts once, however many answers it has."""
        n_prompt = self._record.prompt_tokens or 0
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": self.n_tokens,
            "total_tokens": n_prompt + self.n_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    async def extras(self) -> dict[str, Any]:
        """Fields beyond OpenAI's shape, when all answers have ended: the seed, the digest and the timings."""
        completions = [one for one in self.completions if one is not None]
        if not completions:
            return {}
        digest = await self._service.in_thread(_digest, completions, self._service.has_sum)
        return {"seed": completions[0].seed, "digest": digest, "timings": self._timings(completions)}

    def _timings(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The fields of `Timings`, of several answers those of the first; and the same by the names of llama.cpp's
        server, which the first versions had alone."""
        timings, n = completions[0].timings, len(completions[0].token_ids)
        return {
            **asdict(timings),
            "host_us_per_token": self.host_s * 1e6 / max(1, self.n_tokens),
            "wait_ms": timings.wait_s * 1e3,
            "prompt_n": len(completions[0].prompt_ids),
            "cached_n": completions[0].cached_tokens,
            "prompt_ms": timings.prefill_s * 1e3,
            "first_token_ms": timings.first_token_s * 1e3,
            "predicted_n": n,
            "predicted_ms": timings.decode_s * 1e3,
            "predicted_per_token_ms": timings.decode_s * 1e3 / (n - 1) if n > 1 else None,
            "predicted_per_second": timings.decode_tok_s,
        }


def _digest(completions: Sequence[Completion], has_sum: threading.Event) -> str | None:
    """The answer's digest, or one over those of several. None while a large model's files are still being hashed."""
    if not has_sum.wait(LONGEST_WAIT_FOR_SUM_S):
        return None
    if len(completions) == 1:
        return completions[0].digest
    return hashlib.sha256("".join(one.digest for one in completions).encode()).hexdigest()
