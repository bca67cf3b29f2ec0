"""Vectors of texts by an encoder: one forward takes as many texts as fit a batch; one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from ostinato.backends.torch.model import Model, through_head
from ostinato.cache.sequences import MAX_SEQ
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.decoder import Decoder
from ostinato.decoder.pooling import Pooled, Pooling
from ostinato.errors import BadInput, InternalError
from ostinato.files.unpack import Floats
from ostinato.processes import OpenedHere

# Tokens of one batch, unless a text has more: attention multiplies each row with all rows of the batch.
BATCH_TOKENS: Final = 512


class TextEncoder:
    """An encoder and the buffers of its last batch, which grow with the longest text."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._made: tuple[str, Decoder] | None = None
        self._opened = OpenedHere()
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Refuse further texts."""
        self._closed = True

    def vectors(
        self, texts: Sequence[Sequence[int]], pooling: str, segments: Sequence[Sequence[int]] | None = None
    ) -> Floats:
        """One float32 vector per text [texts, hidden], or its scores [texts, classes] with pooling `rank`.

        `segments`: which of two texts each token belongs to, for models that have segment embeddings.
        """
        return np.stack(list(self.each_vector(texts, pooling, segments)))

    def each_vector(
        self,
        texts: Sequence[Sequence[int]],
        pooling: str,
        segments: Sequence[Sequence[int]] | None = None,
        firsts: Sequence[int] | None = None,
    ) -> Iterator[Floats]:
        """The vector of each text, batch after batch; between two batches, other callers have their turn. `firsts`: of
        each text, the first token whose row may be part of its vector."""
        self._opened.check()
        firsts = firsts or [0] * len(texts)
        by_rows = any(firsts)
        longest = max(map(len, texts))
        for own in _batches(texts):
            ids = [token for text in own for token in texts[text]]
            owners = [[number] for number, text in enumerate(own) for _ in texts[text]]
            kinds = None if segments is None else [kind for text in own for kind in segments[text]]
            with self._lock:
                if self._closed:
                    raise BadInput("this LLM is closed; open it again to ask more")
                decoder = self._decoder("none" if by_rows else pooling, longest)
                decoder.decode(Batch(token=ids, seq_id=owners, segment=kinds))
                if by_rows:
                    found = _pooled(decoder, Pooling(pooling), [(len(texts[text]), firsts[text]) for text in own])
                else:
                    found = [self._vector(decoder, number) for number in range(len(own))]
                if self._model.projections and pooling != "rank":
                    found = [through_head(self._model.project, vector) for vector in found]
            yield from found

    def pairs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Floats:
        """The scores [pairs, classes] of pairs of texts, by a model that ranks."""
        types = self._model.type_embedding
        second_kind = 1 if types is not None and len(types) > 1 else 0
        segments = [[0] * len(first) + [second_kind] * len(second) for first, second in pairs]
        return self.vectors([[*first, *second] for first, second in pairs], "rank", segments)

    def _decoder(self, pooling: str, n_tokens: int) -> Decoder:
        made = self._made
        if made is None or made[0] != pooling or made[1].settings.n_batch < n_tokens:
            self._made = None  # released before a larger one is allocated
            size = -(-n_tokens // BATCH_TOKENS) * BATCH_TOKENS
            decoder = Decoder(
                self._model,
                n_ctx=size,
                n_batch=size,
                n_ubatch=size,
                n_seq_max=MAX_SEQ,
                embeddings=True,
                pooling=pooling,
            )
            self._made = made = pooling, decoder
        return made[1]

    def _vector(self, decoder: Decoder, number: int) -> Floats:
        vector = decoder.pooled(number)
        if vector is None:
            raise InternalError("a pooled vector was asked for and is not there")
        found: Floats = vector.numpy()
        return found


def _pooled(decoder: Decoder, kind: Pooling, sizes: Sequence[tuple[int, int]]) -> list[Floats]:
    """The vectors of texts whose rows the decoder has one after the other; of each, its length and the first row that
    counts."""
    rows = decoder.outputs.all_embeddings().value
    if rows is None:
        raise InternalError("rows to pool were asked for and are not there")
    pooled, start = Pooled(kind), 0
    for number, (n, first) in enumerate(sizes):
        own = kind.rows_of(n, first)
        pooled.add_rows(number, np.arange(own.start, own.stop), rows[start + own.start : start + own.stop].numpy())
        start += n
    return list(pooled.results().values())


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[range]:
    """Texts that go together, one after the other."""
    first = n_tokens = 0
    for number, text in enumerate(texts):
        if number > first and (n_tokens + len(text) > BATCH_TOKENS or number - first == MAX_SEQ):
            yield range(first, number)
            first, n_tokens = number, 0
        n_tokens += len(text)
    yield range(first, len(texts))
