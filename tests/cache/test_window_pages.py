"""Layers that see a window hold its pages and no others, and every position that a query sees is the one it wrote."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.cache.groups import PageGroup, cycle_pages, lease_pages, page_groups
from ostinato.cache.reserve import Reserve
from ostinato.decoder.paged import PagedSequence, PagedSequences, SequencePart
from tests.random_model import random_model

PAGE, ROWS, SLOTS = 4, 8, 3
Cell = tuple[int, int, int]  # group, page, offset


@dataclass(eq=False)
class Decoding:
    """A sequence that the simulated loop decodes: it has its page tables from the start and asks for nothing."""

    paged: PagedSequence
    tokens: list[int]
    tables: list[list[int]]
    most: int


@dataclass
class Device:
    """Keys and values as what was written where: a position's key is the tokens up to it, as in a causal model."""

    windows: Sequence[int | None]
    cells: dict[Cell, tuple[int, ...]] = field(default_factory=dict)

    def run(self, tokens: Sequence[int], start: int, stop: int, tables: Sequence[Sequence[int]]) -> None:
        """Write the positions, as a chunk or a step does, then read what each of them sees."""
        for group, table in enumerate(tables):
            for position in range(start, stop):
                self.cells[self._cell(group, table, position)] = tuple(tokens[: position + 1])
        for position in range(start, stop):
            self.read(tokens, position, tables)

    def read(self, tokens: Sequence[int], position: int, tables: Sequence[Sequence[int]]) -> None:
        for group, table in enumerate(tables):
            window = self.windows[group]
            for seen in range(0 if window is None else max(0, position - window + 1), position + 1):
                found = self.cells[self._cell(group, table, seen)]
                assert found == tuple(tokens[: seen + 1]), f"group {group}, position {position}, key {seen}"

    @staticmethod
    def _cell(group: int, table: Sequence[int], position: int) -> Cell:
        return group, table[position // PAGE], position % PAGE


class Simulation:
    """What the scheduler does with pages, at random, over a device that remembers every key."""

    def __init__(self, groups: Sequence[PageGroup], seed: int) -> None:
        self.chance = random.Random(seed)
        self.reserve = Reserve(groups, PAGE, chunk_rows=ROWS, share_prefixes=True)
        self.memory = PagedSequences(self.reserve, recurs=False)
        self.device = Device([group.window for group in groups])
        self.prompts: list[tuple[PagedSequence, int]] = []
        self.decoding: list[Decoding] = []
        self.n_cached = self.n_resumed = self.n_ended = 0

    def begin(self) -> None:
        prompt = [self.chance.randrange(2) for _ in range(self.chance.randint(1, 40))]
        if self.chance.random() < 0.5:  # begin like an earlier one
            prompt = [1] * self.chance.randint(1, 30) + prompt
        resumes, kept = self.chance.random() < 0.4, self.memory._kept
        if resumes and kept is not None:
            prompt = [*kept.tokens[: len(kept.tokens) - self.chance.choice((0, 0, 1, 5))], *prompt[:9]][:90]
        n_positions = len(prompt) + self.chance.randint(1, 30)
        paged = self.memory.open(prompt, n_positions, least_left=1 if resumes else None)
        if paged is None:
            assert self.prompts or self.decoding, "an empty reserve refuses no sequence"
            return
        self.n_resumed += paged.n_held > 0
        self.prompts.append((paged, n_positions))

    def prefill(self) -> None:
        paged, n_positions = self.prompts[0]
        if not paged.n_held:
            self.n_cached += self.memory.find(paged)
        n = min(ROWS, paged.n_left)
        staged = self.memory.stage(paged, n_positions) if n == paged.n_left else None
        part = SequencePart(paged, n)
        planned = self.memory.plan(part)
        self.device.run(paged.tokens, planned.start, planned.start + n, planned.page_tables)
        self.memory.apply(part)
        if staged is not None:
            self.prompts.pop(0)
            most = min(n_positions, self.reserve.granted(paged.lease))
            self.decoding.append(Decoding(paged, list(paged.tokens), staged, most))

    def step(self) -> None:
        """The loop decodes many tokens of every sequence, and the host does nothing meanwhile."""
        for sequence in list(self.decoding):
            for _ in range(self.chance.randint(0, 20)):
                if len(sequence.tokens) == sequence.most:
                    break
                sequence.tokens.append(self.chance.randrange(2))
                position = len(sequence.tokens) - 1
                self.device.run(sequence.tokens, position, position + 1, sequence.tables)

    def end(self) -> None:
        sequence = self.decoding.pop(self.chance.randrange(len(self.decoding)))
        self.n_ended += 1
        if self.chance.random() < 0.5:
            self.memory.close(sequence.paged)
            return
        n_kept = max(1, len(sequence.tokens) - self.chance.choice((0, 0, 1, 7)))
        self.memory.keep(sequence.paged, sequence.tokens[:n_kept], len(sequence.tokens))

    def run(self, n: int) -> None:
        for _ in range(n):
            ready = [self.begin, self.step]
            ready += [self.prefill] * (2 * bool(self.prompts)) + [self.end] * bool(self.decoding)
            self.chance.choice(ready)()
        while self.prompts:
            self.prefill()
        while self.decoding:
            self.step()
            self.end()
        self.memory.forget()


GROUPS = {
    "a window beside everything": (PageGroup((0,), 30), PageGroup((1,), 24, 6)),
    "every layer has a window": (PageGroup((0, 1), 24, 6),),
    "two windows": (PageGroup((0,), 30), PageGroup((1,), 20, 4), PageGroup((2,), 24, 9)),
    "a window of one page": (PageGroup((0,), 30), PageGroup((1,), 24, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_every_key_that_a_query_sees_is_its_own_and_no_page_is_lost(groups: tuple[PageGroup, ...], seed: int) -> None:
    simulation = Simulation(groups, seed)
    simulation.run(120)
    reserve = simulation.reserve
    assert reserve.n_available == reserve.n_pages == sum(group.n_pages for group in groups)
    for number in range(len(groups)):
        reserve._make_room(number, reserve.n_pages)
    assert [pool.n_free for pool in reserve._pools()] == [group.n_pages for group in groups]


@pytest.mark.slow
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_the_simulation_reuses_prefixes_and_continues_kept_sequences(groups: tuple[PageGroup, ...]) -> None:
    simulation = Simulation(groups, 1)
    simulation.run(3000)
    assert simulation.n_cached > 500
    assert simulation.n_resumed > 20
    assert simulation.n_ended > 200


def test_a_page_that_is_used_again_too_early_is_found_by_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.cache.window_pages.cycle_pages", lambda window, page: cycle_pages(window, page) - 2)
    with pytest.raises(AssertionError, match="group 1, position"):
        Simulation(GROUPS["a window beside everything"], 1).run(3000)


def test_a_sequence_of_any_length_holds_the_pages_of_its_window() -> None:
    groups = (PageGroup((0,), 1000), PageGroup((1,), 2 * lease_pages(6, PAGE, ROWS), 6))
    reserve = Reserve(groups, PAGE, chunk_rows=ROWS, share_prefixes=False)
    memory = PagedSequences(reserve, recurs=False)
    sequence = memory.open([1] * 2000, 4000)
    assert sequence is not None
    held = []
    while sequence.n_left:
        part = SequencePart(sequence, min(ROWS, sequence.n_left))
        memory.plan(part)
        held.append(len(sequence.lease.windows[0].pages))
        memory.apply(part)
    memory.stage(sequence, 4000)
    assert len(sequence.lease.pages) == 1000
    assert max(held) == -(-(6 + ROWS) // PAGE) + 1 - 1
    assert len(sequence.lease.windows[0].pages) <= lease_pages(6, PAGE, ROWS)
    assert [len(table) for table in reserve.tables(sequence.lease)] == [1000, 1000]
    memory.close(sequence)


def test_a_request_waits_while_the_windows_of_others_take_the_pool() -> None:
    groups = (PageGroup((0,), 1000), PageGroup((1,), 2 * lease_pages(6, PAGE, ROWS) - 1, 6))
    reserve = Reserve(groups, PAGE, chunk_rows=ROWS, share_prefixes=True)
    first = reserve.open([1] * 50, 100, all_now=True)
    assert first is not None
    assert reserve.open([2] * 50, 100, all_now=True) is None
    short = reserve.open([2] * 5, 8, all_now=True)  # shorter than a window, so it needs less
    assert short is not None
    reserve.close(first)
    assert reserve.open([2] * 50, 100, all_now=True) is not None


def test_layers_are_grouped_by_their_windows_and_one_as_long_as_the_context_is_none() -> None:
    shape = random_model("swa").shape
    shape = replace(shape, layers=shape.layers * 2).with_attention(window=(None, 16, 48, 16))
    sizes = {"n_pages": 2 * 400 // PAGE, "page_tokens": PAGE, "chunk_rows": ROWS}
    found = page_groups(shape, context=400, **sizes)
    assert [(group.layers, group.window) for group in found] == [((0,), None), ((1, 3), 16), ((2,), 48)]
    assert [group.n_pages for group in found] == [
        2 * 400 // PAGE,
        4 * lease_pages(16, PAGE, ROWS),
        4 * lease_pages(48, PAGE, ROWS),
    ]
    found = page_groups(shape, context=48, **sizes)
    assert [(group.layers, group.window) for group in found] == [((0, 2), None), ((1, 3), 16)]


@pytest.mark.parametrize("n_contexts", [1, 1.5, 8])
def test_a_smaller_pool_has_fewer_pages_of_windows_too_and_one_sequence_always_fits(n_contexts: float) -> None:
    shape, n_pages = random_model("swa").shape, int(n_contexts * 100)
    groups = page_groups(shape, context=400, n_pages=n_pages, page_tokens=PAGE, chunk_rows=ROWS)
    lease = lease_pages(groups[1].window or 0, PAGE, ROWS)
    assert [group.n_pages for group in groups] == [n_pages, int(2 * n_contexts * lease)]
    reserve = Reserve(groups, PAGE, chunk_rows=ROWS, share_prefixes=True)
    assert reserve.open([1] * 399, 400, all_now=True) is not None
