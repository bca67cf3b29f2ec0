"""The way of tokens through the model: in chunks, with the sequence's keys and values kept between calls.

Prompts, scoring, embeddings and single decode steps all come through `Decoder.extend`. It knows tokens and rows,
not requests or text.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ostinato.memory.kv_cache import KVCache
from ostinato.memory.store import KVStore
from ostinato.models.blocks import Model

# Rows of one forward. Fixed, so that a prompt's bits do not depend on anything but the prompt; wide enough that the
# matrix products are at full speed, narrow enough that a mask over a long context stays small.
CHUNK_ROWS = 512


class Decoder:
    """One sequence at a time through one model."""

    def __init__(self, model: Model, store: KVStore) -> None:
        self._model = model
        self._cache = KVCache(store)

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self._cache.length

    def begin(self) -> None:
        """Start a new sequence."""
        self._cache.clear()

    @torch.inference_mode()
    def last_logits(self, tokens: Sequence[int]) -> Tensor:
        """Extend the sequence by tokens; float32 logits [1, vocab] of the token that comes next."""
        for hidden in self._chunks(tokens):
            last = hidden[-1:]
        return self._model.logits(last)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Iterator[Tensor]:
        """Extend the sequence by tokens; float32 logits of every row, a chunk [rows, vocab] at a time."""
        for hidden in self._chunks(tokens):
            yield self._model.logits(hidden)

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """Extend the sequence by tokens; their last hidden rows [tokens, hidden], float32."""
        return torch.cat([hidden.float() for hidden in self._chunks(tokens)])

    def _chunks(self, tokens: Sequence[int]) -> Iterator[Tensor]:
        device = self._model.device
        rows = torch.tensor(tokens, dtype=torch.int64, device=device)
        for begin in range(0, len(rows), CHUNK_ROWS):
            chunk = rows[begin : begin + CHUNK_ROWS]
            start = self._cache.length
            positions = torch.arange(start, start + len(chunk), device=device)
            yield self._model.hidden(chunk, positions, self._cache)
            self._cache.advance(len(chunk))
