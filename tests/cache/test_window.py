"""Windows against their definitions, one pair of positions at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.cache.window import Window, WindowKind, round_up, windowed_size
from ostinato.errors import InternalError
from tests.decoder.cells.memory.kv_oracle import masked

KINDS: list[WindowKind] = ["none", "standard", "chunked", "symmetric"]


@given(kind=st.sampled_from(KINDS), size=st.integers(1, 9), far=st.integers(1, 40))
@settings(max_examples=80, derandomize=True, deadline=None)
def test_whole_tables_are_masked_as_single_pairs_are_sw_2(kind: WindowKind, size: int, far: int) -> None:
    keys, queries = np.arange(far)[None, :], np.arange(far)[:, None]
    table = Window(kind, size).masked(keys, queries)
    assert table.shape == (far, far)
    for query in range(far):
        for key in range(far):
            assert table[query, key] == masked(kind, size, key, query)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_window_holds_at_least_one_position_sw_1(kind: WindowKind) -> None:
    with pytest.raises(InternalError, match="at least one position"):
        Window(kind, 0)
    assert Window().reaches_all
    assert not Window(kind, 1).reaches_all


@given(base=st.integers(1, 40), n_swa=st.integers(1, 3_000), n_seqs=st.integers(1, 16), n_ubatch=st.integers(1, 900))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_the_windowed_cache_holds_the_windows_and_a_ubatch_but_never_more_than_the_other_sw_5(
    base: int, n_swa: int, n_seqs: int, n_ubatch: int
) -> None:
    base = 256 * base
    for unified, n_windows in ((True, n_seqs), (False, 1)):
        size = windowed_size(base, n_swa, n_seq_max=n_seqs, unified=unified, n_ubatch=n_ubatch)
        assert size % 256 == 0
        assert size <= base
        assert size == base or size >= n_windows * n_swa + n_ubatch
    assert windowed_size(base, n_swa, n_seq_max=n_seqs, unified=True, n_ubatch=n_ubatch, full=True) == base


def test_rounding_up_keeps_multiples() -> None:
    assert [round_up(n, 256) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]
