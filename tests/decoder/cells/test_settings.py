"""Derived sizes, and the combinations that are refused."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.decoder.cells.settings import settle
from ostinato.errors import InvalidBatch


def test_a_unified_stream_takes_any_id_and_streams_only_their_own_c_4() -> None:
    assert settle(n_seq_max=3, unified=True).n_seq_limit == 256
    assert settle(n_seq_max=3, unified=False).n_seq_limit == 3
    assert (settle(n_seq_max=3, unified=True).n_streams, settle(n_seq_max=3).n_streams) == (1, 3)


def test_only_causal_batches_are_cut_to_the_context_c_5() -> None:
    assert settle(n_ctx=100, n_batch=400, causal=False).n_batch == 400
    assert settle(n_ctx=100, n_batch=400, n_ubatch=300).n_ubatch == 100


def test_models_with_an_encoder_may_output_every_token_c_6() -> None:
    assert settle(n_batch=64, n_outputs_max=8, has_encoder=True).n_outputs_max == 64


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"n_seq_max": 257}, "n_seq_max"),
        ({"n_seq_max": -1}, "n_seq_max"),
        ({"n_ctx": 0}, "n_ctx"),
        ({"n_batch": 0}, "n_batch"),
        ({"n_ubatch": -1}, "n_ubatch"),
        ({"n_rs_seq": -1}, "n_rs_seq"),
        ({"n_rs_seq": 3, "n_ubatch": 4}, "n_rs_seq"),  # C-7
        ({"n_outputs_max": 3, "n_seq_max": 4}, "n_outputs_max"),
        ({"n_batch": 3, "n_seq_max": 4}, "n_outputs_max"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_by_name(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidBatch, match=reason) as refused:
        settle(**asked)
    assert refused.value.reason == reason


def test_snapshots_need_ubatches_that_hold_more_than_their_tail_c_7() -> None:
    assert settle(n_rs_seq=3, n_ubatch=5).n_rs_seq == 3
    assert settle(n_rs_seq=0, n_ubatch=1).n_ubatch == 1


@given(n_ctx=st.integers(1, 5_000), n_batch=st.integers(256, 3_000), n_seqs=st.integers(0, 256), unified=st.booleans())
@settings(max_examples=100, derandomize=True, deadline=None)
def test_streams_hold_together_at_least_the_context_in_steps_of_256_c_3(
    n_ctx: int, n_batch: int, n_seqs: int, unified: bool
) -> None:
    made = settle(n_ctx=max(n_ctx, 256), n_batch=n_batch, n_seq_max=n_seqs, unified=unified)
    assert made.capacity % 256 == 0
    assert made.n_ctx == made.capacity * made.n_streams >= n_ctx
    assert made.n_seq_max == max(1, n_seqs)
    assert made.n_ubatch <= made.n_batch <= made.n_ctx


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        settle().n_ctx = 1  # type: ignore[misc]  # frozen, which mypy sees too
