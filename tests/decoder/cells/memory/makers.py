"""Batches, caches and digests that the tests of memory share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.cache.window import Window, WindowKind
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.batch.sanitizer import MemoryView, sanitize
from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.cells.memory.kv_cache import KVCache

N_VOCAB = 1 << 16


def cache_of(
    size: int = 8, *, n_seq_max: int = 4, unified: bool = True, kind: WindowKind = "none", n_swa: int = 0
) -> KVCache:
    return KVCache(size, n_seq_max=n_seq_max, unified=unified, window=Window(kind, n_swa))


def splitter_of(
    seq_id: Sequence[Sequence[int]],
    pos: Sequence[int] | None = None,
    *,
    token: Sequence[int] | None = None,
    memory: MemoryView | None = None,
    limit: int = 256,
) -> Splitter:
    """A batch of these tokens, judged against what memory holds."""
    batch = Batch(token=range(len(seq_id)) if token is None else token, seq_id=seq_id, pos=pos)
    return Splitter(sanitize(batch, n_vocab=N_VOCAB, n_seq_limit=limit, memory=memory))


def digest(cache: KVCache) -> tuple[object, ...]:
    """Every byte of a cache's bookkeeping, but for what is only remembered to save time."""
    parts: list[object] = [tuple(cache.pending_copies)]
    for stream in cache.streams:
        cells = stream.cells
        arrays = (cells.position, cells.shift, np.packbits(cells.member), cells.n_owners, cells._id_sum)
        parts += [stream.head, cells.used, cells.has_shift, *(array.tobytes() for array in arrays)]
        parts.append(None if cells.grid is None else cells.grid.tobytes())
        parts.append(tuple((cells.pos_min(s), cells.pos_max(s)) for s in range(256)))
    return tuple(parts)
