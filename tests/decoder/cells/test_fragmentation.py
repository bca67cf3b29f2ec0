"""Why there is nothing to optimise (UP-7): a batch takes any free cells, so gaps between cells cost no room.

Over the real memory kinds: a memory full of gaps takes a batch of exactly as many tokens as it has free cells, with the
logits of an empty memory, and one token more is refused however the cells were arranged.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import Batch
from ostinato.cache.window import Window
from ostinato.decoder.cells.decoder import Decoder
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.status import Status
from ostinato.errors import NoSlot
from tests.random_model import random_model
from tests.vectors.ubatches import ubatch_of

N_CELLS, N_SEQS = 256, 8


def batch_of(sequence: int, n: int) -> Batch:
    ids = np.random.default_rng(5).integers(0, 100, n)
    return Batch(token=ids, seq_id=[[sequence]] * n, output=[0] * (n - 1) + [1])


def decoder() -> Decoder:
    return Decoder(random_model("kv"), n_ctx=N_CELLS, n_seq_max=N_SEQS + 1, unified=True, n_ubatch=64)


def test_a_batch_fits_into_as_many_gaps_as_it_has_tokens_and_computes_what_it_does_in_an_empty_memory() -> None:
    full, empty = decoder(), decoder()
    each = N_CELLS // N_SEQS
    order = [s for _ in range(each) for s in range(N_SEQS)]  # neighbours are of different sequences
    full.decode(Batch(token=[1] * N_CELLS, seq_id=[[s] for s in order], output=[0] * N_CELLS))
    with pytest.raises(NoSlot):
        full.decode(batch_of(N_SEQS, 1))
    for s in range(0, N_SEQS, 2):
        full.memory.seq_rm(s)  # every second cell is a gap of one
    with pytest.raises(NoSlot):
        full.decode(batch_of(N_SEQS, N_CELLS // 2 + 1))
    assert full._parts.memory.prepare_update(optimise=True) is Status.NO_UPDATE
    for one in (full, empty):
        one.decode(batch_of(N_SEQS, N_CELLS // 2))
    found, expected = full.logits(-1), empty.logits(-1)
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)  # sums over cells in another order


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.booleans()), min_size=1, max_size=25),
    st.integers(1, 40),
    st.sampled_from([None, 4]),
)
def test_there_is_room_for_a_ubatch_wherever_as_many_cells_are_free(
    acts: list[tuple[int, int, bool]], n: int, window: int | None
) -> None:
    """Cells beyond a window count as free: what they hold is not seen any more."""
    cache = KVCache(32, n_seq_max=6, unified=True, window=None if window is None else Window("standard", window))
    for s, length, removes in acts:
        if removes:
            cache.seq_rm(s)
            continue
        first = (cache.pos_max(s) if cache.pos_max(s) is not None else -1) + 1  # type: ignore[operator]  # checked here
        ubatch = ubatch_of([[s]] * length, list(range(first, first + length)))
        slots = cache.prepare([ubatch])
        if slots is not None:
            cache.apply(ubatch, slots[0])
    stream = cache.streams[0]
    n_usable = int(stream._usable().sum())
    found = cache.prepare([ubatch_of([[5]] * n, [1000 + k for k in range(n)])])
    assert (found is not None) == (n <= n_usable)
    assert cache.prepare_update(optimise=True) is Status.NO_UPDATE
