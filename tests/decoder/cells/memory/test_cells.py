"""The cell table against a plain list of cells, and its refusal of misuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.cache.window import Window
from ostinato.decoder.cells.memory.cells import Cells
from ostinato.errors import InternalError
from tests.counts import soak
from tests.decoder.cells.memory.kv_oracle import Cell

SIZE, N_SEQ = 7, 4


def told(cells: Cells) -> list[Any]:
    return [
        None if cells.position[i] < 0 else (int(cells.position[i]), cells.ids(i), int(cells.shift[i]))
        for i in range(cells.size)
    ]


def check(cells: Cells, plain: list[Cell | None]) -> None:
    """KC-1 to KC-4 hold, and the table says what the list says."""
    assert told(cells) == [None if c is None else (c.position, sorted(c.ids), c.shift) for c in plain]
    used = [i for i, c in enumerate(plain) if c is not None]
    assert cells.used == len(used)
    assert cells.used_min == min(used, default=0)
    assert cells.used_stop == max(used, default=-1) + 1
    for s in range(N_SEQ):
        positions = [c.position for c in plain if c is not None and s in c.ids]
        assert cells.pos_min(s) == min(positions, default=None)
        assert cells.pos_max(s) == max(positions, default=None)
    assert cells.n_owners.tolist() == [0 if c is None else len(c.ids) for c in plain]
    assert not cells.shift[cells.position < 0].any()


def fresh(*filled: tuple[int, int, list[int]]) -> Cells:
    cells = Cells(SIZE)
    for cell, position, ids in filled:
        cells.set_position(cell, position)
        cells.add([cell] * len(ids), ids)
    return cells


@pytest.mark.soak
@pytest.mark.slow
@given(st.data())
@settings(max_examples=soak(2_000), derandomize=True, deadline=None)
def test_any_calls_leave_the_table_as_a_plain_list_would_be(data: st.DataObject) -> None:
    cells = Cells(SIZE)
    plain: list[Cell | None] = [None] * SIZE
    for _ in range(data.draw(st.integers(1, 25))):
        step(data, cells, plain)
        check(cells, plain)


def step(data: st.DataObject, cells: Cells, plain: list[Cell | None]) -> None:
    """One legal call on several cells at once."""
    name = data.draw(st.sampled_from(["fill", "fill", "fill", "remove", "empty", "keep", "shift", "divide", "flush"]))
    s = data.draw(st.integers(0, N_SEQ - 1))
    some = data.draw(st.lists(st.integers(0, SIZE - 1), unique=True, max_size=SIZE))
    used = [i for i in some if plain[i] is not None]
    if name == "fill":
        for i in (i for i in some if plain[i] is None):
            ids = data.draw(st.sets(st.integers(0, N_SEQ - 1), min_size=1))
            position = data.draw(st.integers(0, 9))
            cells.set_position(i, position)
            cells.add([i] * len(ids), sorted(ids))
            plain[i] = Cell(position, set(ids))
    elif name == "remove":
        drop(cells.remove([i for i in used if s in at(plain, i).ids], s).tolist(), plain, {s}, used)
    elif name == "empty":
        cells.empty(used)
        for i in used:
            plain[i] = None
    elif name == "keep":
        drop(cells.keep(some, s).tolist(), plain, set(range(N_SEQ)) - {s}, used)
    elif name in ("shift", "divide"):
        move(data, name, used, cells, plain)
    else:
        cells.reset_shift()
        for cell in plain:
            if cell is not None:
                cell.shift = 0
        assert not cells.has_shift


def at(plain: list[Cell | None], i: int) -> Cell:
    cell = plain[i]
    assert cell is not None
    return cell


def drop(freed: list[int], plain: list[Cell | None], ids: set[int], used: list[int]) -> None:
    expected = []
    for i in used:
        had = at(plain, i).ids
        at(plain, i).ids = had - ids
        if had and not at(plain, i).ids:
            plain[i] = None
            expected.append(i)
    assert sorted(freed) == sorted(expected)


def move(data: st.DataObject, name: str, used: list[int], cells: Cells, plain: list[Cell | None]) -> None:
    by = data.draw(st.integers(-6, 6) if name == "shift" else st.integers(1, 4))
    before = cells.has_shift
    freed = cells.shift_by(used, by).tolist() if name == "shift" else []
    if name == "divide":
        cells.divide_by(used, by)
    for i in used:
        cell = at(plain, i)
        new = cell.position + by if name == "shift" else cell.position // by
        cell.shift += new - cell.position
        cell.position = new
        if new < 0:
            plain[i] = None
            assert i in freed
    assert cells.has_shift == (before or bool(used))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("set_position", (1, 4)),  # in use
        ("set_position", ([4, 4], [1, 2])),  # one cell twice
        ("set_position", (4, -1)),  # no position
        ("add", (1, 0)),  # has it already
        ("add", ([1, 1], [2, 2])),  # the same twice
        ("add", (5, 0)),  # empty
        ("remove", (1, 3)),  # has it not
        ("remove", ([1, 1], 0)),
        ("remove", (5, 0)),
        ("empty", (5,)),
        ("empty", ([1, 5],)),
        ("shift_by", ([1, 5], 1)),
        ("divide_by", (5, 2)),
    ],
)
def test_misuse_raises_and_changes_nothing_kc_12(name: str, arguments: tuple[Any, ...]) -> None:
    cells = fresh((1, 4, [0, 1]), (2, 5, [0]))
    before, bounds = told(cells), (cells.used, cells.pos_min(0), cells.pos_max(0), cells.pos_max(1))
    with pytest.raises(InternalError):
        getattr(cells, name)(*arguments)
    assert told(cells) == before
    assert (cells.used, cells.pos_min(0), cells.pos_max(0), cells.pos_max(1)) == bounds
    assert not cells.has_shift


def test_restored_cells_are_as_saved_whatever_happened_to_them_and_others_stay_kc_14() -> None:
    cells = fresh((0, 3, [0]), (1, 4, [0, 1]), (2, 5, [2]))
    saved = cells.save([1, 2, 4])
    cells.empty([1, 2])
    cells.set_position([2, 4, 5], [9, 8, 7])
    cells.add([2, 4, 4, 5], [3, 0, 1, 1])
    cells.restore(saved)
    assert told(cells) == [(3, [0], 0), (4, [0, 1], 0), (5, [2], 0), None, None, (7, [1], 0), None]
    assert (cells.used, cells.used_stop) == (4, 6)
    assert [cells.pos_max(s) for s in range(4)] == [4, 7, 5, None]


def test_a_cell_that_awaits_a_shift_cannot_be_saved_kc_14() -> None:
    cells = fresh((0, 3, [0]), (1, 4, [1]))
    cells.shift_by(0, 2)
    with pytest.raises(InternalError, match="awaits a shift"):
        cells.save([0, 1])
    assert cells.save([1]).position.tolist() == [4]


def test_several_dimensions_are_kept_and_forgotten_with_the_cell_kc_1() -> None:
    cells = Cells(3, grid=True)
    assert cells.grid is not None
    cells.set_position([0, 1], [5, 5], np.array([[1, 2], [3, 4]]))
    cells.add([0, 1], [0, 0])
    saved = cells.save([0])
    cells.empty([0])
    assert cells.grid.tolist() == [[0, 0], [3, 4], [0, 0]]
    cells.restore(saved)
    assert cells.grid.tolist() == [[1, 2], [3, 4], [0, 0]]
    cells.reset()
    assert not cells.grid.any()


def test_a_reset_table_is_like_a_new_one_kc_13() -> None:
    cells = fresh((1, 4, [0, 1]), (2, 5, [255]))
    cells.shift_by([1, 2], 3)
    cells.reset()
    check(cells, [None] * SIZE)
    assert not cells.has_shift
    assert not cells.member.any()


def test_only_cells_of_one_sequence_out_of_its_window_can_be_taken_sw_3() -> None:
    cells = fresh((0, 0, [0]), (1, 1, [0, 1]), (2, 2, [0]), (3, 3, [0]), (4, 1, [2]))
    assert np.flatnonzero(cells.evictable(Window("standard", 2))).tolist() == [0, 2]
    assert not cells.evictable(Window()).any()
