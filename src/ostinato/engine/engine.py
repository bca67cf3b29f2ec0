"""Turns a prompt into tokens: prefill, then one step per token until an end, a limit, or the caller has enough.

Token ids in, tokens out; what ends an answer is decided here, except stop strings, which only text can know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ostinato.decoder.flow import Decoder
from ostinato.engine.placement import Placement
from ostinato.engine.sampler import Choice, Sampler
from ostinato.errors import BadInput, PromptTooLong
from ostinato.memory.store import KVStore
from ostinato.models.blocks import Model
from ostinato.options import Sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer and when it was there, in seconds of `time.perf_counter`; the last has a reason."""

    choice: Choice
    at: float
    finish_reason: FinishReason | None


class Engine:
    """One model, one sequence at a time."""

    def __init__(self, model: Model, placement: Placement, eog_ids: frozenset[int]) -> None:
        self._model = model
        self._eog_ids = eog_ids
        self.context = placement.context
        self._decoder = Decoder(model, KVStore(model.shape, placement.kv_type, placement.context, placement.device))
        self._turn = threading.Lock()
        self._holder: int | None = None

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[Token]:
        """The answer to a prompt, token by token; `sampling` is settled. Closing the iterator ends the request."""
        self.check(prompt, room=1)
        ends = frozenset(sampling.stop_ids) | (frozenset() if sampling.ignore_eos else self._eog_ids)
        most = self.context - len(prompt)
        if sampling.max_tokens is not None:
            most = min(most, sampling.max_tokens)
        sampler = Sampler.of(sampling, prompt, ends, self._model.shape.vocab, self._model.ops, self._model.device)
        with self._own_turn():
            self._decoder.begin()
            logits = self._decoder.last_logits(prompt)
            for n_made in range(1, most + 1):
                choice = sampler.choose(logits)
                reason: FinishReason | None = None
                if choice.token in ends:
                    reason = "stop"
                elif n_made == most:
                    reason = "length"
                yield Token(choice, time.perf_counter(), reason)
                if reason is not None:
                    return
                logits = self._decoder.last_logits([choice.token])

    def logits(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """Teacher forced: float32 logits [rows, vocab] of every position, a chunk at a time."""
        self.check(ids)
        with self._own_turn():
            self._decoder.begin()
            yield from self._decoder.logits(ids)

    def hidden(self, ids: Sequence[int]) -> Tensor:
        """The last hidden rows, float32 [tokens, hidden]."""
        self.check(ids)
        with self._own_turn():
            self._decoder.begin()
            return self._decoder.hidden(ids)

    def check(self, ids: Sequence[int], *, room: int = 0) -> None:
        """Refuse ids that are no tokens of this model, or too many for the context with `room` to spare."""
        if not ids:
            raise BadInput("the prompt is empty; give it at least one token")
        vocab = self._model.shape.vocab
        for index, token in enumerate(ids):
            if not isinstance(token, int) or not 0 <= token < vocab:
                raise BadInput(f"token id {token!r} at index {index}: this model has ids from 0 to {vocab - 1}")
        if len(ids) + room > self.context:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens and the context holds {self.context}"
                + (f", of which {room} must be left for the answer" if room else "")
                + "; shorten it, or give a larger --context (`ostinato inspect` tells what the model was trained for)"
            )

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        """One sequence at a time: other threads wait; the same thread would wait for itself, so it is told."""
        me = threading.get_ident()
        if self._holder == me and self._turn.locked():
            raise BadInput("another stream of this LLM is still open in this thread; finish or close it first")
        with self._turn:
            self._holder = me
            try:
                yield
            finally:
                self._holder = None
