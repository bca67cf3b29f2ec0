"""One sequence at a time through the decoder: scores, embeddings, ranking, and answers that go on from a saved state.

What needs rows of a whole prompt, or memory in a file; everything else is the engine's (`engine.py`). Every forward
goes through `decoder/decoder.py`, as a batch of one sequence; a decoder is made when it is first needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
from torch import Tensor

from ostinato.backends.base import Settled
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.decoder import Decoder
from ostinato.decoder.memory.state_file import describe
from ostinato.engine.constraint import Constrain
from ostinato.engine.prompt import check_prompt
from ostinato.engine.request import FinishReason, Token
from ostinato.engine.sampler import Sampler
from ostinato.errors import BadFile, BadInput, InternalError, Unsupported
from ostinato.models.blocks import Model
from ostinato.options import Sampling

# Rows of one forward. Fixed, so that a prompt's bits do not depend on anything but the prompt; wide enough that the
# matrix products are at full speed, narrow enough that a mask over a long context stays small.
CHUNK_ROWS: Final = 512
SEQUENCE: Final = 0
LONGEST_WAIT_S: Final = 3600


class Continuation:
    """An answer that goes on from what memory holds: tokens as they are read. Read like a `Request`."""

    def __init__(self, engine: Sequential, prompt: Sequence[int], sampling: Sampling) -> None:
        self.cached_tokens = 0
        self.prefill_s = self.first_token_s = self.mask_s = 0.0
        self._tokens = engine._continue(self, prompt, sampling)

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    def cancel(self) -> None:
        """It ends here."""
        self._tokens.close()


class Sequential:
    """One model, one sequence at a time; other threads wait for their turn."""

    def __init__(
        self,
        model: Model,
        settled: Settled,
        eog_ids: frozenset[int],
        n_tokens: int,
        constrain: Constrain = lambda _: None,
    ) -> None:
        """`n_tokens`: what the tokenizer knows; ids beyond it, padding of the embedding, are never chosen. `constrain`
        makes what an answer must follow of what its sampling says."""
        self._constrain = constrain
        self._model = model
        self._n_tokens = n_tokens
        self._settled = settled
        self._eog_ids = eog_ids
        self.context = settled.context
        self._decoder: Decoder | None = None
        self._ids: list[int] = []  # the tokens that memory holds
        self._embedder: tuple[str, Decoder] | None = None
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._closed = False

    def close(self) -> None:
        """No request is taken any more."""
        self._closed = True

    # Answers

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> Continuation:
        """The answer to a prompt, token by token, without computing what memory holds of its beginning.

        `sampling` is settled. The prompt is computed when the first token is read.
        """
        self.check(prompt, room=1)
        return Continuation(self, prompt, sampling)

    def _continue(
        self, answer: Continuation, prompt: Sequence[int], sampling: Sampling
    ) -> Generator[Token, None, None]:
        ends = frozenset(sampling.stop_ids) | (frozenset() if sampling.ignore_eos else self._eog_ids)
        constraint = self._constrain(sampling)
        if constraint is not None:
            ends |= constraint.ends
            sampling = replace(sampling, min_tokens=0)  # its masks say when an answer is long enough
        most = self.context - len(prompt)
        if sampling.max_tokens is not None:
            most = min(most, sampling.max_tokens)
        sampler = Sampler.of(sampling, prompt, ends, self._model, self._n_tokens)
        began = time.perf_counter()
        with self._exclusive():
            answer.cached_tokens = self._keep_prefix(prompt)
            logits = self._last_logits(prompt[answer.cached_tokens :])
            answer.prefill_s = time.perf_counter() - began
            for n_made in range(1, most + 1):
                choice = sampler.choose(logits, None if constraint is None else constraint.mask())
                reason: FinishReason | None = None
                if choice.token in ends:
                    reason = "stop"
                elif n_made == most:
                    reason = "length"
                if n_made == 1:
                    answer.first_token_s = time.perf_counter() - began
                token = Token(*choice, len(prompt) + n_made - 1, time.perf_counter_ns(), reason)
                if reason is not None:
                    break
                yield token
                if constraint is not None:
                    asked = time.perf_counter()
                    constraint.take(choice.token)
                    answer.mask_s += time.perf_counter() - asked
                logits = self._last_logits([choice.token])
        yield token  # after the turn is over: whoever has the last token need not come back for more

    # What the model computes

    def logits(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """Teacher forced: float32 logits [rows, vocab] of every position, a chunk at a time, each the reader's own."""
        self.check(ids)
        with self._exclusive():
            self._keep_prefix([])
            for chunk in _chunks(ids):
                self._decode(chunk, outputs=len(chunk))
                rows = self._causal().outputs.all_logits().value
                if rows is None:
                    raise InternalError("logits of a whole chunk were asked for and not all are there")
                yield rows.clone()

    def embed(self, texts: Sequence[Sequence[int]], pooling: str) -> list[Tensor]:
        """One float32 vector per text [hidden], or its scores with pooling `rank`."""
        for ids in texts:
            self.check(ids)
        with self._exclusive():
            decoder = self._pooling_decoder(pooling, max(map(len, texts)))
            return [_pooled(decoder, ids) for ids in texts]

    def rank(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        """The scores [classes] of each pair of texts, by a model that ranks."""
        if not pairs:
            return []
        for first, second in pairs:
            self.check([*first, *second])
        types = self._model.type_embedding
        second_kind = 1 if types is not None and len(types) > 1 else 0
        with self._exclusive():
            decoder = self._pooling_decoder("rank", max(len(first) + len(second) for first, second in pairs))
            return [
                _pooled(decoder, [*first, *second], segment=[0] * len(first) + [second_kind] * len(second))
                for first, second in pairs
            ]

    def check(self, ids: Sequence[int], *, room: int = 0) -> None:
        """Refuse ids that are no tokens of this model, or too many for the context with `room` to spare."""
        check_prompt(ids, vocab=self._model.shape.vocab, context=self.context, room=room)

    # Saved state

    @property
    def largest_state_bytes(self) -> int:
        """No saved state of this engine is larger."""
        return self._causal().largest_state_bytes

    def save(self, note: Mapping[str, Any], ids: Sequence[int] | None = None) -> bytes:
        """The sequence in memory with its token ids, and a note of the caller's; `ids` are put into memory first."""
        with self._exclusive():
            if ids is not None:
                self._hold(ids)
            return self._causal().save_sequence(SEQUENCE, {**note, "ids": self._ids})

    def load(self, data: bytes) -> None:
        """Put a saved sequence into memory; BadFile where its token ids are not those of its cells."""
        ids = (describe(data).note or {}).get("ids")
        with self._exclusive():
            memory = self._causal().memory
            self._ids = []
            self._causal().load_sequence(SEQUENCE, data)
            last = memory.pos_max(SEQUENCE)
            n_held = 0 if last is None else last + 1
            if not isinstance(ids, list) or len(ids) != n_held or not all(isinstance(token, int) for token in ids):
                memory.clear()
                raise BadFile("this state does not say which tokens it holds; save it again")
            self._ids = ids

    # Inside

    def _new_decoder(self, **settings: Any) -> Decoder:
        wanted: dict[str, Any] = {"n_ctx": self.context, "n_batch": CHUNK_ROWS, "n_ubatch": CHUNK_ROWS, **settings}
        return Decoder(self._model, kv_type=self._settled.kv_type, **wanted)

    def _causal(self) -> Decoder:
        if not self._model.shape.causal:
            raise Unsupported(f"{self._model.shape.family} is an encoder: it embeds text and generates none")
        if self._decoder is None:
            self._decoder = self._new_decoder()
        return self._decoder

    def _pooling_decoder(self, pooling: str, n_tokens: int) -> Decoder:
        """A decoder of its own for embeddings, just large enough for one text of that length at a time."""
        kept = self._embedder
        if kept is None or kept[0] != pooling or kept[1].settings.n_batch < n_tokens:
            self._embedder = None  # given back before more is asked for
            size = -(-n_tokens // CHUNK_ROWS) * CHUNK_ROWS
            n_ubatch = CHUNK_ROWS if self._model.shape.causal else size
            wanted = {"n_ctx": size, "n_batch": size, "n_ubatch": n_ubatch, "embeddings": True, "pooling": pooling}
            self._embedder = kept = (pooling, self._new_decoder(**wanted))
        return kept[1]

    def _keep_prefix(self, prompt: Sequence[int]) -> int:
        """Make memory hold just a beginning of the prompt, as long as it can be; how many tokens that is."""
        memory = self._causal().memory
        n_kept = 0
        while n_kept < min(len(self._ids), len(prompt) - 1) and self._ids[n_kept] == prompt[n_kept]:
            n_kept += 1
        if n_kept < len(self._ids) and not memory.seq_rm(SEQUENCE, n_kept, None):
            n_kept = 0  # recurrent states cannot go back that far
        if n_kept == 0:
            memory.clear()
        self._ids = list(prompt[:n_kept])
        return n_kept

    def _hold(self, ids: Sequence[int]) -> None:
        """Make memory hold just these tokens, computing what it does not hold."""
        if list(ids) != self._ids:
            kept = self._keep_prefix(ids)
            for chunk in _chunks(ids[kept:]):
                self._decode(chunk, outputs=0)

    def _last_logits(self, tokens: Sequence[int]) -> Tensor:
        """Extend the sequence by tokens; float32 logits [1, vocab] of the token that comes next."""
        chunks = _chunks(tokens)
        for number, chunk in enumerate(chunks):
            self._decode(chunk, outputs=1 if number == len(chunks) - 1 else 0)
        last = self._causal().logits(-1)
        if last is None:
            raise InternalError("the logits of the last token were asked for and are not there")
        return last.unsqueeze(0).to(self._model.device)

    def _decode(self, tokens: Sequence[int], *, outputs: int) -> None:
        flags = np.zeros(len(tokens), np.int8)
        flags[len(tokens) - outputs :] = 1
        self._causal().decode(Batch(token=tokens, output=flags))
        self._ids.extend(tokens)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One sequence at a time: other threads wait; the same thread would wait for itself, so it is told."""
        if self._closed:
            raise BadInput("this LLM is closed; open it again to ask more")
        me = threading.get_ident()
        if self._holder == me and self._lock.locked():
            raise BadInput("another stream with reuse=True is still open in this thread; finish or close it first")
        if not self._lock.acquire(timeout=LONGEST_WAIT_S):
            raise BadInput(f"another request has held this LLM for {LONGEST_WAIT_S} seconds; finish or close it first")
        self._holder = me
        try:
            yield
        finally:
            self._holder = None
            self._lock.release()


def _chunks(tokens: Sequence[int]) -> list[Sequence[int]]:
    return [tokens[start : start + CHUNK_ROWS] for start in range(0, len(tokens), CHUNK_ROWS)]


def _pooled(decoder: Decoder, ids: Sequence[int], segment: Sequence[int] | None = None) -> Tensor:
    if decoder.model.shape.causal:
        decoder.memory.clear()
    decoder.decode(Batch(token=ids, segment=segment))
    vector = decoder.pooled(SEQUENCE)
    if vector is None:
        raise InternalError("a pooled vector was asked for and is not there")
    return vector.clone()
