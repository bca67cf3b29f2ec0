"""Saved states: what was remembered comes back to the bit, in any memory that can hold it, and nothing else does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.backends.torch.kv_store import StateStore
from ostinato.cache import state_bytes
from ostinato.cache.state_bytes import describe
from ostinato.cache.state_file import load, save
from ostinato.cache.window import Window
from ostinato.errors import BadFile, BadInput, InternalError, InvalidBatch, NoSlot
from ostinato.options import KVType
from tests.decoder.cells.memory.states import (
    KINDS,
    Cell,
    SavedParts,
    content,
    content_sorted,
    fill,
    fresh,
    hybrid,
    in_reach,
    kv_content,
    kv_part,
    nothing,
    of,
    one_cache,
    recurrent,
    run_states,
    several_streams,
    state_of,
    state_part,
    two_caches,
)

# Round trips


def n_cells(saved: bytes) -> int:
    return sum(stream.n_cells for section in describe(saved).sections for stream in section.streams)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_memory_comes_back_as_it_was(kind: Callable[[], SavedParts]) -> None:
    source = kind()
    target = fresh(source)
    before = content(source)
    load(target, None, save(source))
    assert content(target) != nothing(source)
    assert content(source) == before  # saving changes nothing
    assert [stream.head for part in target.kv for stream in part.cache.streams] == [
        0 for part in target.kv for _ in part.cache.streams
    ]
    assert content(target) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_memory_forgets_what_it_held(kind: Callable[[], SavedParts]) -> None:
    source, target = kind(), kind()
    expected = content(source)
    load(target, None, save(source))
    assert content(target) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target_id", [0, 2])
def test_one_sequence_comes_back_under_any_id_and_the_others_stay(
    kind: Callable[[], SavedParts], target_id: int
) -> None:
    source, target = kind(), kind()
    saved = save(source, 0)
    others = [s for s in range(3) if s != target_id]
    before = [in_reach(target, s, 1) for s in others]
    load(target, target_id, saved)
    assert in_reach(target, target_id, 0) == content_sorted(target, target_id) == in_reach(source, 0, 0)
    # What is out of reach of a sequence's next token may have been overwritten, as in any run (SW-3).
    assert [in_reach(target, s, 1) for s in others] == before


@pytest.mark.parametrize("kv_type", ["f32", "bf16", "f16", "q8_0"])
def test_every_type_comes_back_to_the_bit(kv_type: KVType) -> None:
    source, target = of(kv_part(kv_type=kv_type)), of(kv_part(40, kv_type=kv_type, seed=5))
    fill(source.kv[0].cache.streams[0], {3: (0, [1]), 4: (1, [1]), 15: (2, [1, 3])})
    load(target, None, save(source))
    assert content(target) == content(source)
    load(target, 0, save(source, 1))
    assert content(target, 0) == content(source, 1)


def test_a_sequence_moves_between_one_stream_for_all_and_one_for_each() -> None:
    shared, own = one_cache(), of(kv_part(32, n_seq_max=3, unified=False, seed=4))
    load(own, 2, save(shared, 0))
    assert content(own, 2) == content(shared, 0)
    back = of(kv_part(seed=7))
    load(back, 200, save(own, 2))
    assert content(back, 200) == content(shared, 0)


def test_positions_of_several_dimensions_come_back() -> None:
    source, target = of(kv_part(n_pos_dims=3)), of(kv_part(n_pos_dims=3, seed=1))
    table = source.kv[0].cache.streams[0].cells
    table.set_position([2, 5], [7, 7], np.array([[1, 2], [3, 4]]))
    table.add([2, 5], [0, 0])
    load(target, None, save(source))
    assert [row[3] for row in kv_content(target.kv[0])] == [(1, 2), (3, 4)]
    load(target, 1, save(source, 0))
    assert content(target, 1) == content(source, 0)


@st.composite
def tables(draw: st.DrawFn) -> dict[int, Cell]:
    cells = draw(st.sets(st.integers(0, 15), max_size=16))
    ids = st.sets(st.sampled_from([0, 1, 2, 3, 7, 254, 255]), min_size=1, max_size=4)
    return {cell: (draw(st.integers(0, 20)), sorted(draw(ids))) for cell in cells}


@pytest.mark.slow
@given(table=tables(), other=tables(), size=st.integers(16, 40), s=st.sampled_from([0, 3, 255]))
@settings(max_examples=80, derandomize=True, deadline=None)
def test_any_table_of_cells_comes_back(table: dict[int, Cell], other: dict[int, Cell], size: int, s: int) -> None:
    source, target = of(kv_part(layers=(0,))), of(kv_part(size, layers=(0,), seed=3))
    fill(source.kv[0].cache.streams[0], table)
    load(target, None, save(source))
    assert content(target) == content(source)

    crowded = of(kv_part(size, layers=(0,), seed=8))
    fill(crowded.kv[0].cache.streams[0], other)
    saved = save(source, s)
    rest = [content(crowded, i) for i in (1, 2, 7, 254)]
    room = size - sum(1 for _, ids in other.values() if set(ids) != {1})
    if n_cells(saved) <= room:
        load(crowded, 1, saved)
        assert sorted(content(crowded, 1)[0]) == sorted(content(source, s)[0])
    else:
        with pytest.raises(NoSlot):
            load(crowded, 1, saved)
        assert content(crowded, 1) == [[]]
    assert [content(crowded, i) for i in (2, 7, 254)] == rest[1:]


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["load", "copy", "back", "remove"]), st.integers(0, 4), st.integers(0, 4))))
@settings(max_examples=150, derandomize=True, deadline=None)
def test_recurrent_states_survive_whatever_is_loaded_beside_them(steps: list[tuple[str, int, int]]) -> None:
    parts = of(None, state_part(5, n_snapshots=2))
    assert parts.recurrent is not None
    memory = parts.recurrent.memory
    other = of(None, state_part(5, seed=77))
    assert other.recurrent is not None
    run_states(other.recurrent, {s: 10 + s for s in range(5)})
    for name, a, b in steps:
        before = {s: state_of(parts.recurrent, s) for s in range(5) if s != a}
        if name == "load":
            load(parts, a, save(other, b))
            assert state_of(parts.recurrent, a) == state_of(other.recurrent, b)
            memory.state.n_last[a] = 3
        elif name == "copy":
            memory.seq_cp(b, a)
        elif name == "back":
            memory.seq_rm(a, 9 + b)
        else:
            memory.seq_rm(a)
        assert {s: state_of(parts.recurrent, s) for s in range(5) if s != a} == before
        target = of(None, state_part(5, seed=5))
        load(target, None, save(parts))
        assert content(target) == content(parts)


# Rules of their own


def test_ids_above_the_number_of_sequences_are_saved_where_they_can_be() -> None:
    source, target = of(kv_part(n_seq_max=2)), of(kv_part(n_seq_max=1, seed=1))
    fill(source.kv[0].cache.streams[0], {0: (0, [3, 255])})
    load(target, None, save(source))
    assert content(target) == content(source)
    assert target.kv[0].cache.pos_max(255) == 0


def test_all_streams_come_back_and_not_only_the_last() -> None:
    source, target = several_streams(), fresh(several_streams())
    load(target, None, save(source))
    assert [target.kv[0].cache.pos_max(s) for s in range(3)] == [1, None, 9]


def test_an_empty_sequence_empties_its_target() -> None:
    for parts in (one_cache(), two_caches(), hybrid(), recurrent()):
        saved = save(fresh(parts), 3)
        load(parts, 0, saved)
        assert all(rows in ([], [None]) for rows in content(parts, 0))
        assert content(parts, 1) != [[] for _ in parts.all]


def test_without_room_the_target_stays_empty_in_every_part_and_the_others_stay() -> None:
    parts = hybrid()
    fill(parts.kv[0].cache.streams[0], {cell: (cell, [3]) for cell in range(4, 16)})
    saved = save(parts, 3)
    before = content(parts, 0)
    with pytest.raises(NoSlot, match="sequence 1 was not loaded and is empty now: it needs 12 cells"):
        load(parts, 1, saved)
    assert content(parts, 1) == [[], [None]]
    assert content(parts, 0) == before
    assert parts.recurrent is not None
    assert parts.recurrent.memory.pos_max(1) is None


def test_cells_out_of_the_window_are_left_out_of_a_sequence_and_kept_in_the_whole() -> None:
    parts = two_caches()
    target = fresh(parts)
    load(target, 0, save(parts, 0))
    assert [row[0] for row in content(target, 0)[0]] == list(range(8))
    assert [row[0] for row in content(target, 0)[1]] == [4, 5, 6, 7]
    load(target, None, save(parts))
    assert [row[0] for row in content(target, 0)[1]] == [2, 3, 4, 5, 6, 7]


def test_a_pending_roll_back_is_saved_as_the_state_it_selects() -> None:
    source = recurrent()
    assert source.recurrent is not None
    assert source.recurrent.memory.seq_rm(3, 8)
    expected = state_of(source.recurrent, 3)
    assert expected is not None
    assert expected[0] == 7
    whole, one = fresh(source), fresh(source)
    load(whole, None, save(source))
    load(one, 0, save(source, 3))
    for parts, s in ((whole, 3), (one, 0)):
        assert parts.recurrent is not None
        assert state_of(parts.recurrent, s) == expected
        assert parts.recurrent.memory.state.back[s] == 0
        assert not parts.recurrent.memory.seq_rm(s, 7)  # a loaded state is one token long (RM-14)
    assert content(whole) == content(source)


def test_sequences_that_share_a_state_share_it_again() -> None:
    source, target = recurrent(), fresh(recurrent())
    load(target, None, save(source))
    assert target.recurrent is not None
    state = target.recurrent.memory.state
    assert state.tail[2] is not None
    assert state.tail[2] == state.tail[3]
    assert state.ids[state.tail[2]] == {2, 3}


def test_a_state_loaded_over_a_row_that_another_reads_leaves_the_other_its_own() -> None:
    parts = of(None, state_part(n_snapshots=2))
    assert parts.recurrent is not None
    memory = parts.recurrent.memory
    run_states(parts.recurrent, {0: 5})
    memory.seq_cp(0, 1)
    assert memory.seq_rm(1, 5)  # reads an earlier plane of the row of 0, from a cell of its own
    memory.seq_rm(0)
    before = state_of(parts.recurrent, 1)
    other = recurrent()
    saved = save(other, 1)
    load(parts, 0, saved)
    load(parts, 2, saved)
    assert state_of(parts.recurrent, 1) == before
    assert content(parts, 0) == content(parts, 2) == content(other, 1)


def test_a_partial_state_brings_back_the_window_where_the_rest_still_is() -> None:
    parts = two_caches()
    expected = content(parts, 0)
    saved = save(parts, 0, partial=True)
    assert describe(saved).partial
    assert len(saved) < len(save(parts, 0))
    full, windowed = (part.cache.streams[0] for part in parts.kv)
    windowed.cells.remove(np.flatnonzero(windowed.cells.member[0]), 0)
    for stream in (full, windowed):
        fill(stream, {13: (8, [0])})  # it went on
    load(parts, 0, saved)
    assert content(parts, 0)[0] == expected[0]
    assert [row for row in expected[1] if row[0] >= 4] == sorted(content(parts, 0)[1])


def test_a_partial_state_without_the_rest_is_refused() -> None:
    parts = two_caches()
    target = fresh(parts)
    with pytest.raises(BadFile, match="ends at position 7, and of sequence 0 the part that it left out ends at None"):
        load(target, 0, save(parts, 0, partial=True))
    assert content(target) == [[], []]


def test_a_partial_state_of_nothing_empties_all_parts() -> None:
    parts = hybrid()
    load(parts, 0, save(fresh(parts), 0, partial=True))
    assert content(parts, 0) == [[], [None]]


def test_a_partial_state_of_a_memory_with_one_part_is_a_full_one() -> None:
    source, target = one_cache(), fresh(one_cache())
    load(target, 1, save(source, 0, partial=True))
    assert content(target, 1) == content(source, 0)


def test_pending_work_must_have_been_done() -> None:
    shifted, copied = one_cache(), several_streams()
    shifted_data, copied_data = save(shifted), save(copied)
    shifted.kv[0].cache.streams[0].cells.has_shift = True
    copied.kv[0].cache.seq_cp(0, 1)
    for parts, data in ((shifted, shifted_data), (copied, copied_data)):
        before = content(parts)
        with pytest.raises(InternalError, match="are pending"):
            save(parts)
        with pytest.raises(InternalError, match="are pending"):
            load(parts, None, data)
        with pytest.raises(InternalError, match="are pending"):
            save(parts, 0)
        assert content(parts) == before


@pytest.mark.parametrize(("kind", "s"), [(one_cache, 256), (several_streams, 3), (recurrent, 4), (hybrid, 4)])
def test_a_sequence_that_cannot_be_is_refused_and_nothing_changes(kind: Callable[[], SavedParts], s: int) -> None:
    parts = kind()
    before, saved = content(parts), save(parts, 0)
    with pytest.raises(InvalidBatch):
        save(parts, s)
    with pytest.raises(InvalidBatch):
        load(parts, s, saved)
    assert content(parts) == before


def test_the_note_comes_back_with_what_the_state_is() -> None:
    note = {"tokens": [1, 2, 3], "text": "λ\ud800", "nested": {"a": None}}
    sequence, whole = save(hybrid(), 0, note=note), save(one_cache())
    for saved, kind, n, told in ((sequence, "sequence", 3, note), (whole, "whole", 4, None)):
        identity, header = state_bytes.identify(saved), describe(saved)
        assert (identity.kind, identity.architecture) == (kind, "llama")
        assert (n_cells(saved), header.partial, header.note) == (n, False, told)


@pytest.mark.parametrize("note", [{"a": float("nan")}, {"a": b"bytes"}, {"a": "x" * (1 << 25)}])
def test_a_note_that_cannot_be_kept_is_refused(note: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="note"):
        save(one_cache(), note=note)


# What does not fit


def test_a_state_of_another_kind_or_architecture_changes_nothing() -> None:
    parts = one_cache()
    before = content(parts)
    for data in (save(parts, 0), save(replace(parts, architecture="qwen3")), b"", b"GGUF" * 20):
        with pytest.raises(BadFile):
            load(parts, None, data)
        assert content(parts) == before
    for data in (save(parts), save(replace(parts, architecture="qwen3"), 0), b"\x8fOSTATE\n"):
        with pytest.raises(BadFile):
            load(parts, 0, data)
        assert content(parts) == before


NOT_FITTING = [
    (of(kv_part(kv_type="bf16")), "tensors.0. is float32 1x32, not bfloat16 1x32"),
    (of(kv_part(kv_type="q8_0")), "it has 4 tensors, not 8"),
    (of(kv_part(layers=(0, 1, 2))), "it has 2 layers, not 3"),
    (of(kv_part(layers=(0, 2))), "layers.1. is 1, not 2"),
    (of(kv_part(head_width=64)), "float32 1x32, not float32 1x64"),
    (of(kv_part(window=Window("standard", 4))), "window is none 0, not standard 4"),
    (of(kv_part(n_pos_dims=3)), "grid is False, not True"),
    (of(None, state_part()), "part is attention, not recurrent"),
    (hybrid(), "has 1 parts and this memory 2"),
    (SavedParts("llama"), "has 1 parts and this memory 0"),
]


@pytest.mark.parametrize(("target", "words"), NOT_FITTING)
def test_a_memory_of_another_make_is_left_empty(target: SavedParts, words: str) -> None:
    source = one_cache()
    with pytest.raises(BadFile, match=words):
        load(target, 0, save(source, 0))
    assert all(rows in ([], [None]) for rows in content(target, 0))
    with pytest.raises(BadFile, match=words):
        load(target, None, save(source))
    assert content(target) == nothing(target)


def test_a_whole_memory_needs_as_many_streams_and_cells_as_it_was_saved_with() -> None:
    with pytest.raises(BadFile, match="has 1 streams and this memory takes 3"):
        load(of(kv_part(n_seq_max=3, unified=False)), None, save(one_cache()))
    with pytest.raises(BadFile, match="has 4 cells and this memory only 3: load it with a context as large"):
        load(of(kv_part(3)), None, save(one_cache()))
    with pytest.raises(BadFile, match="has 3 cells and this memory only 2"):
        load(of(kv_part(2)), 0, save(one_cache(), 0))
    with pytest.raises(BadFile, match="has sequence 3, and this memory only 0 to 2"):
        load(of(None, state_part(3, n_snapshots=2)), None, save(recurrent()))


def test_the_number_of_snapshots_may_differ() -> None:
    source, target = recurrent(), of(None, state_part(6, seed=1))
    load(target, None, save(source))
    assert [content(target, s) for s in range(4)] == [content(source, s) for s in range(4)]


def test_a_failure_in_one_part_empties_all(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = hybrid(), hybrid()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StateStore, "commit", fail)
    with pytest.raises(KeyboardInterrupt):
        load(target, 0, save(source, 0))
    assert content(target, 0) == [[], [None]]
    assert content(target, 1) == content(source, 1)
    with pytest.raises(KeyboardInterrupt):
        load(target, None, save(source))
    assert content(target) == nothing(target)
