"""The layout of what host and device share: nothing overlaps, and C sees the places that Python sees."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ostinato import build
from ostinato.backends.torch.tables import as_tensors
from ostinato.errors import HardwareCannot, InternalError
from ostinato.loop.layout import (
    GRANT_PAGES,
    INBOX_WORDS,
    OUTBOX_WORDS,
    End,
    Fault,
    Field,
    Finish,
    InboxKind,
    InboxWord,
    Layout,
    OutboxWord,
    SlotState,
    Tables,
    Word,
    arena_bytes,
    words_header,
)
from ostinato.loop.memory import ALIGNMENT
from ostinato.loop.sources import source

LAYOUTS = [Layout(1, 1, 1), Layout(3, 7, 40, 16, 64), Layout(64, 2048, 151_936)]
PAGE_TOKENS = 16


def arenas(layout: Layout) -> dict[str, Sequence[Field]]:
    return {"TABLE": layout.table_fields, "ADMISSION": layout.admission_fields, "RING": layout.ring_fields}


@pytest.fixture
def compiler() -> tuple[str, ...]:
    try:
        return build.cxx().command
    except HardwareCannot as error:
        pytest.skip(f"the header was not compiled: {error}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fields_are_aligned_and_do_not_overlap(layout: Layout) -> None:
    for fields in arenas(layout).values():
        assert len({field.name for field in fields}) == len(fields)
        end = 0
        for field in fields:
            assert field.offset % ALIGNMENT == 0
            assert field.offset >= end
            end = field.offset + field.n_bytes
        assert arena_bytes(fields) >= end


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_admission_lies_in_the_table_where_it_lies_in_the_admissions(layout: Layout) -> None:
    # The step boundary copies admissions by these places alone.
    assert layout.table_fields[: len(layout.admission_fields)] == layout.admission_fields


def test_writing_one_field_changes_no_other() -> None:
    tables = Tables.of(LAYOUTS[1])
    for arena in (tables.table, tables.admissions, tables.rings):
        for name in arena.names:
            arena.memory.fill(0)
            arena[name].view(np.uint8).fill(255)
            assert int((arena.memory == 255).sum()) == arena[name].nbytes
            assert all(not arena[other].any() for other in arena.names if other != name)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_host_views_are_the_same_bytes(kind: str) -> None:
    tables = Tables.of(LAYOUTS[1])
    seen = as_tensors(tables) if kind == "torch" else tables
    assert seen.addresses == tables.addresses
    tables.table.host("position")[2] = 7
    assert seen.table["position"].tolist() == [0, 0, 7]
    assert seen.table.host("position").tolist() == [0, 0, 7]
    assert seen.rings.host("words").dtype == np.int64


def test_arenas_begin_where_a_cache_line_does() -> None:
    assert all(address % ALIGNMENT == 0 for address in Tables.of(LAYOUTS[1]).addresses)


def test_every_control_word_has_its_own_cache_line() -> None:
    (words,) = [field for field in LAYOUTS[1].ring_fields if field.name == "words"]
    assert words.shape == (len(Word), 8)
    assert words.n_bytes == len(Word) * 64


def test_an_outbox_entry_keeps_its_time_where_one_read_of_64_bits_finds_it() -> None:
    assert OutboxWord.TIME % 2 == 0
    assert OutboxWord.TIME + 2 == OUTBOX_WORDS


def test_a_grant_fills_its_entry() -> None:
    assert InboxWord.PAGES + GRANT_PAGES == INBOX_WORDS


@pytest.mark.parametrize("at_run_time", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_emitted_header_says_in_c_what_python_says(
    layout: Layout, at_run_time: bool, compiler: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    expected = {
        "N_SLOTS(view)": layout.n_slots,
        "MAX_PAGES(view)": layout.max_pages,
        "VOCAB(view)": layout.vocab,
        "MASK_WORDS(view)": layout.mask_words,
        "INBOX_ENTRIES(view)": layout.inbox_entries,
        "OUTBOX_ENTRIES(view)": layout.outbox_entries,
        "PAGE_TOKENS(view)": PAGE_TOKENS,
        "SLOT_STATE_PAUSED": SlotState.PAUSED,
        "FINISH_CANCELLED": Finish.CANCELLED,
        "INBOX_KIND_STOP": InboxKind.STOP,
        "INBOX_WORD_FIRST": InboxWord.FIRST,
        "OUTBOX_WORD_LOGPROB": OutboxWord.LOGPROB,
        "WORD_ENDS": Word.ENDS,
        "FAULT_EPOCH": Fault.EPOCH,
        "END_OUTBOX_FULL": End.OUTBOX_FULL,
    }
    for arena in ("TABLE", "RING"):  # an admission's fields lie where the table's do
        for field in arenas(layout)[arena]:
            expected[f"(long long){arena}_{field.name}(view)"] = field.offset
            expected[f"(long long)sizeof(*{arena}_{field.name}(view))"] = 8 if field.kind == "int64" else 4
    header = words_header() if at_run_time else layout.header(PAGE_TOKENS)
    words = layout.words(PAGE_TOKENS)
    view = "View{0, 0, 0, words}" if at_run_time else "View{0, 0, 0}"
    source = f"""
#include "layout.h"
extern "C" long long said([[maybe_unused]] const long long* words, int i) {{
    const View view = {view};
    const long long all[] = {{{", ".join(expected)}}};
    return all[i];
}}
"""
    library = ctypes.CDLL(str(build.shared_object(source, "said.cpp", headers={"layout.h": header})))
    library.said.restype = ctypes.c_longlong
    at = ctypes.c_void_p(words.ctypes.data)
    assert {name: library.said(at, i) for i, name in enumerate(expected)} == expected


def test_the_header_beside_the_sources_is_what_python_emits() -> None:
    # Else: python -c "from ostinato.loop.layout import *; print(words_header(), end='')" > loop/layout.h
    assert source("layout.h") == words_header()


def test_words_are_marked_and_bounded() -> None:
    assert f"#define LAYOUT_MARK {LAYOUTS[0].words(PAGE_TOKENS)[0]} " in words_header()
    with pytest.raises(InternalError, match="65 slots"):
        Layout(65, 1, 1).words(PAGE_TOKENS)
