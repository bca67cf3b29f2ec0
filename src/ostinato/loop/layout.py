"""The one layout of the memory that host and device share: slot table, admissions, rings and control words.

Three arenas, each one piece of memory. The *table* is the device's own: a row per slot, and the results of a step. The
*admissions* are host memory that the device reads when it admits: the same rows, staged. The *rings* are mapped host
memory: inbox, outbox and the control words by which each side publishes its progress. `header()` emits the same offsets
for CUDA and C++, and `words()` passes them to C++ that was compiled without them; docs/ring.md says which side may
write which word, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from math import prod
from textwrap import wrap
from typing import Any, Final, Literal, NamedTuple
from zlib import crc32

import numpy as np

from ostinato.errors import InternalError
from ostinato.loop.grammars import GrammarMemory
from ostinato.loop.memory import ALIGNMENT, address_of, host_zeros, read_only
from ostinato.options import MAX_SLOTS, SAMPLING_NUMBERS
from ostinato.text.walk import MOST_KEPT, POSITION_WORDS

MAX_STOP_IDS: Final = 16
MAX_LOGIT_BIAS: Final = 512
MAX_TOP: Final = 20
INBOX_ENTRIES: Final = 1024
OUTBOX_ENTRIES: Final = 65_536
MASK_DEADLINE_NS: Final = 250_000_000

Kind = Literal["int32", "int64", "float32"]
_C: Final = {"int32": "int", "int64": "long long", "float32": "float"}
_HEADER: Final = ("// Emitted by loop/layout.py; edit there.", "#pragma once")
_GRAMMARS: Final = "    int* grammars;  // the grammar memory"
# The page table of a slot for one group of layers.
_PAGE_TABLE: Final = (
    "#define PAGE_TABLE(view, slot, group) "
    "(TABLE_pages(view) + ((long long)(slot) * N_GROUPS(view) + (group)) * MAX_PAGES(view))"
)


class SlotState(IntEnum):
    """The state of a slot."""

    FREE = 0
    LIVE = 1
    PAUSED = 2
    FINISHED = 3


class Finish(IntEnum):
    """Why a sequence ended, in an outbox entry; NONE while it continues."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    GRAMMAR = 4  # its grammar allows no token


class InboxKind(IntEnum):
    """What the host asks of the loop."""

    ADMIT = 1
    CANCEL = 2
    GRANT = 3
    MASK = 4
    STOP = 5


class InboxWord(IntEnum):
    """Where each int32 sits in one inbox entry."""

    KIND = 0
    SLOT = 1
    GENERATION = 2
    COUNT = 3  # GRANT: pages in this entry
    FIRST = 4  # GRANT: the place of the first of them in the page table
    PAGES = 5  # GRANT: up to GRANT_PAGES page numbers


INBOX_WORDS: Final = 16
GRANT_PAGES: Final = INBOX_WORDS - InboxWord.PAGES


class OutboxWord(IntEnum):
    """Where each int32 sits in one outbox entry; TIME is two of them, nanoseconds; LOGPROB holds a float32's bits."""

    SLOT = 0
    GENERATION = 1
    TOKEN = 2
    POSITION = 3
    FINISH = 4
    LOGPROB = 5
    TIME = 6


OUTBOX_WORDS: Final = 8


class Word(IntEnum):
    """The control words, each an int64 alone in its 64 bytes: `rings.words[word, 0]`.

    The host writes the first three, the loop the rest.
    """

    INBOX_HEAD = 0  # entries published since the start
    OUTBOX_TAIL = 1  # entries read since the start
    YIELD = 2  # not 0: end the loop at the next step boundary
    INBOX_TAIL = 3  # entries taken
    OUTBOX_HEAD = 4  # entries published
    STEPS = 5  # steps run
    LIVE = 6  # rows of the next step
    FAULT = 7  # a Fault
    GO = 8  # 1: another step follows; 0: the loop has ended at this step boundary
    ENDS = 9  # how often the loop has ended
    WHY = 10  # why it last ended, an End


class Fault(IntEnum):
    """A fault that the loop found; every one but NONE is fatal."""

    NONE = 0
    PLAN = 1  # the plan hash in the table is not the one it was built with (I-10)
    EPOCH = 2  # the epoch in the table is not the one it was built with (I-10)
    INBOX = 3  # an inbox entry that `HostSide` never writes
    STUCK = 4  # a wait on the device outlasted its deadline; the step's results must not be used


class End(IntEnum):
    """Why a loop ended."""

    IDLE = 0  # no live slots
    YIELD = 1
    OUTBOX_FULL = 2
    STOP = 3
    FAULT = 4


@dataclass(frozen=True, slots=True)
class Field:
    """An array in an arena: shape [slots, ...] in the table and the admissions."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    offset: int

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.kind).itemsize


class Arena:
    """One piece of memory and the fields in it."""

    def __init__(self, fields: Sequence[Field], memory: Any, dtype_of: Callable[[Kind], Any] = np.dtype) -> None:
        """`memory` is uint8, long enough for the fields, at a fixed address: a numpy array, or another type that slices
        and views as numpy does and whose dtypes `dtype_of` gives."""
        self.memory = memory
        self._views: dict[str, Any] = {}
        for field in fields:
            piece = memory[field.offset : field.offset + field.n_bytes]
            self._views[field.name] = piece.view(dtype_of(field.kind)).reshape(field.shape)

    def __getitem__(self, name: str) -> Any:
        """The field of that name: a view of the arena's own array type."""
        return self._views[name]

    def host(self, name: str) -> np.ndarray:
        """The field of that name as numpy, of an arena in host memory; the same bytes."""
        return np.asarray(self._views[name])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._views)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The memory and every view of it that is handed out."""
        return self.memory, *self._views.values()

    def read_only(self) -> Arena:
        """The same memory through views that cannot be written through."""
        made = copy(self)
        made.memory = read_only(self.memory)
        made._views = {name: read_only(view) for name, view in self._views.items()}
        return made


@dataclass(frozen=True)
class Layout:
    """The sizes that everything else follows from."""

    n_slots: int
    max_pages: int  # of one slot
    vocab: int
    inbox_entries: int = INBOX_ENTRIES
    outbox_entries: int = OUTBOX_ENTRIES
    n_groups: int = 1  # of layers that share a page table

    @property
    def mask_words(self) -> int:
        """int32 words of one bit per token id."""
        return -(-self.vocab // 32)

    @cached_property
    def admission_fields(self) -> tuple[Field, ...]:
        """The fields of a slot that an admission sets; the same in the table and in the admissions."""
        n = self.n_slots
        return _laid_out(
            ("generation", "int32", (n,)),
            ("position", "int32", (n,)),  # of the next step's input token
            ("left", "int32", (n,)),  # tokens that may still be generated
            ("granted", "int32", (n,)),  # positions that have pages
            ("min_tokens", "int32", (n,)),
            ("rope_set", "int32", (n,)),  # of the frequencies that rotate it
            *((one.field, one.kind, (n,)) for one in SAMPLING_NUMBERS if one.kind == "int32"),
            ("n_logprobs", "int32", (n,)),
            ("n_stop", "int32", (n,)),
            ("n_bias", "int32", (n,)),
            ("constrained", "int32", (n,)),  # 1: tokens are chosen under a mask; without a grammar each waits for one
            ("grammar", "int32", (n,)),  # where it lies in the grammar memory, in words; 0: none
            ("n_ends", "int32", (n,)),  # the first of `stop_ids`: tokens that end an answer where its grammar may end
            ("ends_from", "int32", (n,)),  # tokens that must be made before a grammar's stop ids are allowed
            ("ends_ignored", "int32", (n,)),  # 1: a grammar's end tokens are allowed only where no other token is
            ("penalised", "int32", (n,)),  # 1: some penalty is on, and prompt_bits matter
            *((one.field, one.kind, (n,)) for one in SAMPLING_NUMBERS if one.kind == "float32"),
            ("seed", "int64", (n,)),
            ("stop_ids", "int32", (n, MAX_STOP_IDS)),
            ("bias_ids", "int32", (n, MAX_LOGIT_BIAS)),
            ("bias_values", "float32", (n, MAX_LOGIT_BIAS)),
            ("grammar_position", "int32", (n, POSITION_WORDS)),
            ("pages", "int32", (n, self.n_groups, self.max_pages)),
            ("prompt_bits", "int32", (n, self.mask_words)),
            ("mask_bits", "int32", (n, self.mask_words)),  # 1: may be chosen
        )

    @cached_property
    def table_fields(self) -> tuple[Field, ...]:
        """The admissions' fields, the loop's own state of each slot, and a step's results for its step boundary."""
        n = self.n_slots
        return _laid_out(
            *((f.name, f.kind, f.shape) for f in self.admission_fields),
            ("state", "int32", (n,)),
            ("token", "int32", (n,)),  # the next step's input
            ("made", "int32", (n,)),  # tokens generated since admission
            ("mask_ready", "int32", (n,)),  # 0: waits for the host's mask; under a grammar: no token is allowed
            # Of masks that blocks of a GPU find together: the place of a kept one, or -1; to which depth the walk
            # looked at the stack; blocks that are done.
            ("kept_mask", "int32", (n,)),
            ("mask_lowest", "int32", (n,)),
            ("mask_parts", "int32", (n,)),
            ("finds_masks", "int32", (1,)),  # 1: a row of the step follows a grammar
            ("counts", "int32", (n, self.vocab)),  # how often each token was generated
            # By row, not by slot: the slots in the step, and the sampler's results for them.
            ("n_rows", "int32", (1,)),
            ("row_slot", "int32", (n,)),
            ("chosen", "int32", (n,)),
            ("chosen_logprob", "float32", (n,)),
            ("top_ids", "int32", (n, MAX_TOP)),
            ("top_logprobs", "float32", (n, MAX_TOP)),
            # By slot: the token that prefill sampled; the admission commits it.
            ("first_token", "int32", (n,)),
            ("first_logprob", "float32", (n,)),
            ("first_top_ids", "int32", (n, MAX_TOP)),
            ("first_top_logprobs", "float32", (n, MAX_TOP)),
            ("plan_hash", "int64", (1,)),
            ("epoch", "int64", (1,)),
            ("step_ns", "int64", (1,)),  # when the last step boundary ran, by the device's clock
        )

    @cached_property
    def ring_fields(self) -> tuple[Field, ...]:
        """Both rings and the control words."""
        return _laid_out(
            ("words", "int64", (len(Word), 8)),
            ("inbox", "int32", (self.inbox_entries, INBOX_WORDS)),
            ("outbox", "int32", (self.outbox_entries, OUTBOX_WORDS)),
            ("outbox_top_ids", "int32", (self.outbox_entries, MAX_TOP)),
            ("outbox_top_logprobs", "float32", (self.outbox_entries, MAX_TOP)),
        )

    @property
    def n_bytes(self) -> tuple[int, ...]:
        """The length of each arena, in bytes."""
        return tuple(arena_bytes(fields) for fields in self.fields.values())

    def header(self, page_tokens: int) -> str:
        """Offsets, sizes and numbers as C constants: what `loop/step_boundary.h` is compiled with for one engine."""
        lines = [*_HEADER, *_numbers(), f"#define MAX_SLOTS {self.n_slots}", "#define MASKS_BY_BLOCKS 1"]
        lines += ["struct View {", "    char *table, *admissions, *rings;", _GRAMMARS, "};"]
        lines += [f"#define {name}(view) {value}" for name, value in self._sizes(page_tokens).items()]
        lines += [_place(arena, field, str(field.offset)) for arena, field in self._named]
        lines.append(_PAGE_TABLE)
        rows = ", ".join(f"{{{field.offset}, {_row_words(field)}}}" for field in self.admission_fields)
        lines.append(f"#define ADMISSION_ROWS {rows}")
        return "\n".join(lines) + "\n"

    def words(self, page_tokens: int) -> np.ndarray:
        """The same for an object that was compiled before any size was known: int64, where `words_header` reads them.

        The caller keeps them alive as long as a view points at them.
        """
        if self.n_slots > MAX_SLOTS:
            raise InternalError(f"a layout of {self.n_slots} slots; compiled objects have room for {MAX_SLOTS}")
        places = [field.offset for _, field in self._named]
        rows = [_row_words(field) for field in self.admission_fields]
        return np.array([_mark(), *self._sizes(page_tokens).values(), *places, *rows], dtype=np.int64)

    @property
    def fields(self) -> dict[str, tuple[Field, ...]]:
        """The fields of each arena."""
        return {"table": self.table_fields, "admissions": self.admission_fields, "rings": self.ring_fields}

    @property
    def _named(self) -> list[tuple[str, Field]]:
        """The fields that C has names for, each with its arena: an admission's lie where the table's do."""
        return [(arena, field) for arena, fields in self.fields.items() if arena != "admissions" for field in fields]

    def _sizes(self, page_tokens: int) -> dict[str, int]:
        """The sizes that C reads from a view."""
        return {
            "N_SLOTS": self.n_slots,
            "MAX_PAGES": self.max_pages,
            "N_GROUPS": self.n_groups,
            "VOCAB": self.vocab,
            "MASK_WORDS": self.mask_words,
            "INBOX_ENTRIES": self.inbox_entries,
            "OUTBOX_ENTRIES": self.outbox_entries,
            "PAGE_TOKENS": page_tokens,
        }


def words_header() -> str:
    """`loop/layout.h`: the names of `Layout.header`, read from the words that a view carries.

    It depends on no size, so it is stored beside the sources, and an object can be built without the Python package.
    """
    any_layout = Layout(1, 1, 1)
    lines = [*_HEADER, *_numbers(), f"#define MAX_SLOTS {MAX_SLOTS}"]
    lines += ["struct View {", "    char *table, *admissions, *rings;", "    const long long* layout;"]
    lines += [_GRAMMARS, "};"]
    lines.append(f"#define LAYOUT_MARK {_mark()}  // layout[0]: the words are those of this header")
    at = 1
    for name in any_layout._sizes(1):
        lines.append(f"#define {name}(view) ((int)(view).layout[{at}])")
        at += 1
    lines.append(f"#define ADMISSION_PLACES(view) ((view).layout + {at})  // of each field in turn")
    for arena, field in any_layout._named:
        lines.append(_place(arena, field, f"(view).layout[{at}]"))
        at += 1
    lines.append(_PAGE_TABLE)
    lines.append(f"#define ADMISSION_WORDS(view) ((view).layout + {at})  // int32 of one slot, of each field in turn")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Tables:
    """The three arenas of one engine."""

    layout: Layout
    table: Arena
    admissions: Arena
    rings: Arena
    grammars: GrammarMemory | None = None  # where the loop follows grammars

    @staticmethod
    def of(layout: Layout, grammar_bytes: int = 0) -> Tables:
        """Zeroed arenas of the host's memory, and memory for so many bytes of grammars."""
        made = Tables.over(layout, [host_zeros((n_bytes,), np.uint8) for n_bytes in layout.n_bytes])
        return replace(made, grammars=GrammarMemory(grammar_bytes, layout.mask_words)) if grammar_bytes else made

    @staticmethod
    def over(layout: Layout, memories: Iterable[Any], dtype_of: Callable[[Kind], Any] = np.dtype) -> Tables:
        """Arenas over zeroed memory that a backend supplies, of `Layout.n_bytes`: the table is in device memory, the
        others are where host and device both reach them."""
        placed = zip(layout.fields.values(), memories, strict=True)
        table, admissions, rings = (Arena(fields, memory, dtype_of) for fields, memory in placed)
        return Tables(layout, table, admissions, rings)

    @property
    def arenas(self) -> tuple[Arena, Arena, Arena]:
        """In the order in which native code takes them."""
        return self.table, self.admissions, self.rings

    def read_only(self) -> Tables:
        """The same tables, for code that only looks at them (I-4, I-5), without the grammar memory."""
        table, admissions, rings = (arena.read_only() for arena in self.arenas)
        return Tables(self.layout, table, admissions, rings)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of the arenas, in the order in which native code takes them."""
        return tuple(address_of(arena.memory) for arena in self.arenas)

    @property
    def grammar_address(self) -> int:
        """Of the grammar memory; 0 where there is none."""
        return 0 if self.grammars is None else address_of(self.grammars.plain_words)


class SampledRows(NamedTuple):
    """What the sampler takes beside logits and settings: whose token is chosen, and where the results go. The token's
    position is position[slot] + offset: 1 in the loop, whose `position` is that of the token just taken in."""

    n_rows: Any
    row_slot: Any
    position: Any
    chosen: Any
    chosen_logprob: Any
    top_ids: Any
    top_logprobs: Any
    offset: int = 1

    @staticmethod
    def of(table: Arena) -> SampledRows:
        """Those of a step."""
        return SampledRows(*(table[name] for name in SampledRows._fields[:-1]))


def bits_of(ids: Iterable[int], n_words: int) -> np.ndarray:
    """One bit for each id, int32 words.

    >>> bits_of([0, 33], 2).tolist()
    [1, 2]
    """
    flags = np.zeros(n_words * 32, np.uint8)
    flags[np.fromiter(ids, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def arena_bytes(fields: Sequence[Field]) -> int:
    """The length of an arena of these fields, in bytes."""
    return _aligned(fields[-1].offset + fields[-1].n_bytes)


def _laid_out(*fields: tuple[str, Kind, tuple[int, ...]]) -> tuple[Field, ...]:
    placed: list[Field] = []
    offset = 0
    for name, kind, shape in fields:
        placed.append(Field(name, kind, shape, offset))
        offset = _aligned(offset + placed[-1].n_bytes)
    return tuple(placed)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _numbers() -> list[str]:
    """The numbers that are the same in every layout, as C."""
    sizes = {
        "INBOX_WORDS": INBOX_WORDS,
        "OUTBOX_WORDS": OUTBOX_WORDS,
        "WORD_STRIDE": 8,
        "MAX_STOP_IDS": MAX_STOP_IDS,
        "MAX_LOGIT_BIAS": MAX_LOGIT_BIAS,
        "MAX_TOP": MAX_TOP,
        "GRAMMAR_POSITION_WORDS": POSITION_WORDS,
        "MOST_KEPT_MASKS": MOST_KEPT,
        "MASK_DEADLINE_NS": f"{MASK_DEADLINE_NS}LL",  # that a loop waits for a mask of the host
        "N_WORDS": len(Word),
        "N_ADMISSION_FIELDS": len(Layout(1, 1, 1).admission_fields),
    }
    lines = [f"#define {name} {value}" for name, value in sizes.items()]
    for words in (SlotState, Finish, InboxKind, InboxWord, OutboxWord, Word, Fault, End):
        named = ", ".join(f"{_shouted(words.__name__)}_{word.name} = {word.value}" for word in words)
        lines += wrap(f"enum {{ {named} }};", 120, subsequent_indent="    ")
    return lines


def _place(arena: str, field: Field, offset: str) -> str:
    """A macro for a field's address in a view: TABLE_token(view), RING_words(view)."""
    prefix = arena.removesuffix("s").upper()
    return f"#define {prefix}_{field.name}(view) (({_C[field.kind]}*)((view).{arena} + {offset}))"


def _mark() -> int:
    """A checksum of the names and their order, so that words of another version are refused."""
    any_layout = Layout(1, 1, 1)
    names = [f"{arena}.{f.name}.{f.kind}" for arena, fields in any_layout.fields.items() for f in fields]
    return crc32(" ".join([*any_layout._sizes(1), *names]).encode())


def _row_words(field: Field) -> int:
    """int32 words of one slot."""
    return field.n_bytes // field.shape[0] // 4


def _shouted(name: str) -> str:
    """InboxKind as INBOX_KIND."""
    return "".join(("_" if c.isupper() and i else "") + c.upper() for i, c in enumerate(name))
