"""What a forward's rows may look at, against the plainest rule: itself and before, no further back than the window."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import BadOption
from ostinato.memory.kv_cache import KVCache
from ostinato.memory.store import KVStore, kv_bytes
from ostinato.models.rope import Rope
from ostinato.models.shape import Shape
from ostinato.options import KVType

CPU = torch.device("cpu")


def shape_of(head_width: int = 32, n_layers: int = 1) -> Shape:
    return Shape(
        family="llama",
        n_layers=n_layers,
        hidden=64,
        n_heads=2,
        n_kv_heads=1,
        head_width=head_width,
        ff_width=8,
        vocab=10,
        context=64,
        norm_eps=1e-5,
        ropes=(Rope(1e4, head_width, "halves"),) * n_layers,
        windows=(None,) * n_layers,
        query_scale=1.0,
    )


def numbered(start: int, n: int) -> torch.Tensor:
    """Rows that carry their own position."""
    return torch.arange(start, start + n).float().view(n, 1, 1).expand(n, 1, 32)


@given(chunks=st.lists(st.integers(1, 9), min_size=1, max_size=6), window=st.none() | st.integers(1, 12))
@settings(max_examples=150, derandomize=True, deadline=None)
def test_a_row_sees_itself_and_what_is_before_it_within_the_window(chunks: list[int], window: int | None) -> None:
    cache = KVCache(KVStore(shape_of(), "f32", 64, CPU))
    for n_rows in chunks:
        start = cache.length
        rows = numbered(start, n_rows)
        keys, values, mask = cache.extend(0, rows, -rows, window)
        assert torch.equal(keys, -values)
        seen = torch.ones((n_rows, len(keys)), dtype=torch.bool) if mask is None else mask
        for row in range(n_rows):
            position = start + row
            first = 0 if window is None else max(0, position - window + 1)
            assert keys[seen[row], 0, 0].tolist() == list(range(first, position + 1))
        cache.advance(n_rows)


def test_a_cleared_cache_starts_at_position_zero_again() -> None:
    cache = KVCache(KVStore(shape_of(), "f32", 64, CPU))
    cache.extend(0, numbered(0, 3), numbered(0, 3), None)
    cache.advance(3)
    cache.clear()
    keys, _, _ = cache.extend(0, numbered(7, 1), numbered(7, 1), None)
    assert keys[:, 0, 0].tolist() == [7]


@pytest.mark.parametrize(("kv_type", "tolerance"), [("f32", 0), ("bf16", 0.02), ("f16", 0.002), ("q8_0", 0.02)])
def test_keys_and_values_come_back_as_they_went_in_to_the_precision_of_their_type(
    kv_type: KVType, tolerance: float
) -> None:
    store = KVStore(shape_of(), kv_type, 8, CPU)
    rows = torch.randn((5, 1, 32), generator=torch.Generator().manual_seed(0))
    store.keys[0].write(2, rows)
    back = store.keys[0].read(2, 7, torch.float32)
    assert float((back - rows).abs().max()) <= tolerance * float(rows.abs().max())


@pytest.mark.parametrize(
    ("kv_type", "expected"), [("f32", 2 * 3 * 32 * 4), ("bf16", 2 * 3 * 32 * 2), ("q8_0", 2 * 3 * 34)]
)
def test_bytes_are_counted_as_the_tensors_take_them(kv_type: KVType, expected: int) -> None:
    assert kv_bytes(shape_of(n_layers=3), kv_type, 1) == expected
    assert kv_bytes(shape_of(n_layers=3), kv_type, 7) == 7 * expected


def test_q8_0_refuses_heads_that_do_not_fill_its_blocks() -> None:
    with pytest.raises(BadOption, match="multiple of 32"):
        KVStore(shape_of(head_width=16), "q8_0", 8, CPU)
