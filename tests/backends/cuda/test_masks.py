"""The masks that blocks of a GPU find together, `step_masks.h`, against its twin: the real source in the emulator."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from ostinato import build
from ostinato.backends.cuda.start import source
from ostinato.errors import HardwareCannot
from ostinato.loop.grammars import CompiledGrammar, find_masks
from ostinato.loop.layout import Layout, Tables
from ostinato.loop.step_boundary import native_headers
from ostinato.text.automaton import first_position, of_rule
from tests.backends.tape.emulator import Program, compiled, constants, words
from tests.engine.test_grammars import END, OTHER_END, RULES, TOKENS, trie, wanted

N_WARPS, PAGE_TOKENS = 2, 16
LAYOUT = Layout(n_slots=6, max_pages=2, vocab=len(TOKENS), inbox_entries=16, outbox_entries=64)
SHARED_BYTES = 4 * (LAYOUT.n_slots + 3)
KEPT_N = 1

# The step boundary's part of the work, by one block, and the masks, by all.
SOURCE = r"""
#include "machine.h"
#define N_COMPUTE_THREADS (N_COMPUTE_WARPS * 32)
#define THREAD thread()
#define N_THREADS N_COMPUTE_THREADS
#define SYNC() sync_compute_warps()
#define SHARED SHARED_BY_BLOCK
#define BOUNDARY_FN FUNCTION
#define BOUNDARY_TABLE CONSTANT_TABLE
#define UNROLLED UNROLL
#define NAP() nap()
#include "step_masks.h"

struct Given {
    View view;
    u64 clock, n_blocks;
};

KERNEL(look, Given, all, N_COMPUTE_THREADS) {
    SHARED BoundaryState boundary;
    boundary.n_live = *TABLE_n_rows(all.view);
    sync_compute_warps();
    find_kept_masks(boundary, all.view, (int)all.clock);
}

KERNEL(find, Given, all, N_COMPUTE_THREADS) {
    find_masks(all.view, block(), (int)all.n_blocks, *(MaskWork*)shared_memory(), [](int) {});
}
"""


@cache
def program(long_mask: int) -> Program:
    header = constants(N_COMPUTE_WARPS=N_WARPS, LONG_MASK=long_mask)
    return compiled(SOURCE, "masks.cpp", headers={"shape.h": header, **native_headers(LAYOUT, PAGE_TOKENS)})


@cache
def grammar_of(name: str) -> CompiledGrammar:
    rule = wanted(name).rule
    assert rule is not None
    return CompiledGrammar(rule, of_rule(rule), trie())


@dataclass
class Rows:
    """Slots under grammars, twice: for the kernel and for the twin."""

    names: list[str | None]  # None: a row without a grammar
    ours: Tables
    theirs: Tables
    clock: int = 0

    @staticmethod
    def of(names: list[str | None]) -> Rows:
        made = Rows(names, Tables.of(LAYOUT, 1 << 20), Tables.of(LAYOUT, 1 << 20))
        for tables in (made.ours, made.theirs):
            table, grammars = tables.table, tables.grammars
            assert grammars is not None
            table.host("n_rows")[0] = len(names)
            for slot, name in enumerate(names):
                table.host("row_slot")[len(names) - 1 - slot] = slot
                if name is None:
                    continue
                one, asked = grammar_of(name), wanted(name)
                stops = [END, OTHER_END, *asked.stop_token_ids]
                numbers = {"grammar": grammars.lease(one), "n_ends": 2, "n_stop": len(stops), "mask_ready": 1}
                numbers |= {"ends_from": asked.min_tokens, "ends_ignored": asked.ignore_eos}
                for field, value in numbers.items():
                    table.host(field)[slot] = value
                table.host("stop_ids")[slot, : len(stops)] = stops
                table.host("grammar_position")[slot] = first_position(one.automaton.words)
        return made

    def find(self, seed: int, long_mask: int = 1 << 20, n_blocks: int = 3) -> None:
        """The masks of this step, by both; they must agree."""
        self.clock += 1
        given = words(*self.ours.addresses, self.ours.grammar_address, self.clock, n_blocks)
        run = program(long_mask).run
        run("look", given, seed=seed)
        run("find", given, n_blocks=n_blocks, shared_bytes=SHARED_BYTES, seed=seed)
        find_masks(self.theirs)
        for field in ("mask_bits", "mask_ready"):
            np.testing.assert_array_equal(self.ours.table.host(field), self.theirs.table.host(field), field)
        assert not self.ours.table.host("mask_parts").any()

    def advance(self, dice: random.Random) -> None:
        """A random allowed token in every row; one that ends begins anew."""
        table = self.theirs.table
        for slot, name in enumerate(self.names):
            if name is None:
                continue
            bits = np.unpackbits(table.host("mask_bits")[slot].view(np.uint8), bitorder="little")
            token = dice.choice(np.flatnonzero(bits).tolist())
            one = grammar_of(name)
            for tables in (self.ours, self.theirs):
                position, made = tables.table.host("grammar_position")[slot], tables.table.host("made")
                assert tables.grammars is not None
                if token in (END, OTHER_END):
                    position[:], made[slot] = first_position(one.automaton.words), 0
                else:
                    assert tables.grammars.follow(int(tables.table.host("grammar")[slot]), position, token)
                    made[slot] += 1

    def n_kept(self, slot: int) -> int:
        assert self.ours.grammars is not None
        region = self.ours.grammars.words[self.ours.table.host("grammar")[slot] :]
        return int(region[region[1] + KEPT_N])


@pytest.mark.parametrize("name", RULES)
def test_blocks_find_the_masks_of_the_twin_at_every_step(name: str) -> None:
    rows, dice = Rows.of([name]), random.Random(name)
    for step in range(12):
        rows.find(step)
        rows.advance(dice)


def test_rows_under_several_grammars_and_none_are_found_together() -> None:
    rows, dice = Rows.of(["regex", None, "choice", "object", "object", "recursion"]), random.Random(1)
    for step in range(8):
        rows.find(step, n_blocks=1 + step % 4)
        assert not rows.ours.table.host("mask_bits")[1].any()
        rows.advance(dice)


def test_a_kept_mask_is_taken_where_its_position_comes_again() -> None:
    rows, dice = Rows.of(["open object", "open object", "recursion"]), random.Random(2)
    taken = 0
    for step in range(40):
        rows.find(step, long_mask=1)
        taken += int((rows.ours.table.host("kept_mask")[:3] >= 0).sum())
        rows.advance(dice)
    assert taken > 30
    assert 0 < rows.n_kept(0) <= 64


def test_rows_at_the_same_position_keep_one_mask() -> None:
    rows = Rows.of(["open object", "open object", "open object"])
    rows.find(1, long_mask=1)
    assert rows.n_kept(0) == 1


def test_a_grammar_that_allows_no_token_says_so() -> None:
    rows = Rows.of(["choice"])
    for tables in (rows.ours, rows.theirs):
        assert tables.grammars is not None
        first = int(tables.table.host("grammar")[0])
        for token in b"aab":
            assert tables.grammars.follow(first, tables.table.host("grammar_position")[0], token)
        tables.table.host("n_ends")[0] = 0  # so that nothing can follow
    rows.find(1)
    assert not rows.ours.table.host("mask_ready")[0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernel_compiles_for_a_gpu(arch: str) -> None:
    layout = Layout(n_slots=32, max_pages=512, vocab=128_256)
    try:
        binary = build.cubin(source("step_masks.cu"), "step_masks.cu", arch=arch, headers=native_headers(layout, 64))
    except HardwareCannot as error:
        pytest.skip(f"this machine cannot compile for a GPU: {error}")
    assert binary.startswith(b"\x7fELF")
