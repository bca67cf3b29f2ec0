"""The step boundary with its layout in words, as one object serves any engine: it does what the twin does."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.backends.native.library import source
from ostinato.build import shared_object
from ostinato.errors import HardwareCannot
from ostinato.files.objects import sources
from ostinato.loop.layout import Layout, Tables, Word
from ostinato.text.walk import FOLDER as WALK
from tests.loop.test_step_boundary import (
    EPOCH,
    LAYOUTS,
    PAGE_TOKENS,
    PLAN_HASH,
    ROOMY,
    Act,
    Native,
    Table,
    acts,
    compare,
)


class View(ctypes.Structure):
    """`struct View` of loop/layout.h."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("admissions", ctypes.c_void_p),
        ("rings", ctypes.c_void_p),
        ("layout", ctypes.c_void_p),
        ("grammars", ctypes.c_void_p),
    )


@cache
def boundary_library() -> ctypes.CDLL:
    code = Path(__file__).with_name("boundary_words.cpp").read_text()
    headers = {name: source(name) for name in ("step_boundary.h", "layout.h", "grammar_step.h")} | sources(WALK)
    flags = ("-std=c++17", "-O2", *os.environ.get("OSTINATO_CPU_FLAGS", "").split())
    return ctypes.CDLL(str(shared_object(code, "boundary_words.cpp", headers=headers, flags=flags)))


def in_object(layout: Layout) -> Native:
    """The step boundary as the CPU's loop has it."""
    try:
        library = boundary_library()
    except HardwareCannot as error:
        pytest.skip(f"the step boundary with its sizes in words was not tested: {error}")
    words = layout.words(PAGE_TOKENS)

    def run(tables: Tables, now_ns: int, order: int) -> int:
        view = View(*tables.addresses, words.ctypes.data)
        rest = (ctypes.c_uint64(PLAN_HASH), ctypes.c_uint64(EPOCH), ctypes.c_int64(now_ns))
        return int(library.boundary_of(ctypes.byref(view), *rest))

    return run


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    script=acts(wild=True),
    drifts=st.sampled_from([None, None, None, None, "plan_hash", "epoch"]),
)
def test_the_object_does_to_every_byte_what_the_twin_does(
    layout: Layout, script: list[Act], drifts: str | None
) -> None:
    compare(in_object(layout), layout, script, drifts)


@pytest.mark.slow
def test_one_object_serves_layouts_of_any_size_in_turn() -> None:
    full = Layout(n_slots=64, max_pages=3, vocab=1000, inbox_entries=128, outbox_entries=256)
    tables = [Table(layout, in_object(layout)) for layout in (full, ROOMY, full)]
    for table in tables:
        for slot in range(table.layout.n_slots):
            table.admit(slot, generation=slot + 1, first_token=slot)
    for table in tables:
        table.run()
        n_slots = table.layout.n_slots
        assert table.word(Word.LIVE) == n_slots
        assert table.of("row_slot").tolist() == list(range(n_slots))
        assert [entry.token for entry in table.drain()] == list(range(n_slots))
