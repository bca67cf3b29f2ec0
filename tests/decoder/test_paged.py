"""Where prompts of recurrent models begin: snapshots of states, with and without pages of keys beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest

from ostinato.cache.groups import one_group
from ostinato.cache.reserve import RECENT_PROMPTS, Reserve
from ostinato.cache.snapshots import StateSnapshots
from ostinato.decoder.paged import REPLACED_TOKENS, PagedSequences

ROWS: Final = 256  # of a chunk
PAGES: Final = (16, 64)  # positions of a page, on a CPU and on a GPU
STATES: Final = (np.zeros((1, 1), np.uint8),)


class Prompts:
    """Prompts that are computed one after the other, over a device that remembers the tokens up to every key."""

    def __init__(self, page: int, *, attends: bool = True, recent: int = RECENT_PROMPTS) -> None:
        self.reserve = Reserve(one_group((0,), 200), page, chunk_rows=ROWS, share_prefixes=attends, recent=recent)
        self.snapshots = StateSnapshots(1000)
        self.memory = PagedSequences(self.reserve, recurs=True, snapshots=self.snapshots, attends=attends)
        self._page, self._attends = page, attends
        self._keys: dict[tuple[int, int], Sequence[int]] = {}

    def compute(self, tokens: Sequence[int]) -> int:
        """Where the prompt began."""
        sequence = self.memory.open(tokens, len(tokens), slot=0)
        assert sequence is not None
        cached = self.memory.find(sequence)
        while sequence.n_left:
            part = self.memory.part_of(sequence, ROWS)
            planned = self.memory.plan(part)
            self._run(tokens, planned.start, planned.start + part.n, planned.page_tables[0])
            takes = self.memory.takes_snapshot(part)
            self.memory.apply(part)
            if takes:
                self.memory.keep_states(part, STATES)
            if not sequence.n_left:
                assert self.reserve.tables(sequence.lease) == planned.page_tables, "the loop goes on with other pages"
        self.memory.close(sequence)
        return cached

    def _run(self, tokens: Sequence[int], start: int, stop: int, table: Sequence[int]) -> None:
        for position in range(stop if self._attends else 0):
            cell, seen = (table[position // self._page], position % self._page), tokens[: position + 1]
            if position >= start:
                self._keys[cell] = seen
            assert self._keys[cell] == seen, f"position {position}"


def ids(first: int, n: int) -> list[int]:
    return [*range(first, first + n)]


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("page", PAGES)
def test_a_next_turn_without_the_last_tokens_of_the_prompt_begins_at_its_snapshot(page: int, attends: bool) -> None:
    """As with Qwen 3.5's template, whose prompts end in <think>, which no later turn has."""
    every = page if attends else 1
    for n in range(1, 2 * page + REPLACED_TOKENS + 1):
        for n_replaced in range(1, min(n, REPLACED_TOKENS) + 1):
            prompts, prompt = Prompts(page, attends=attends), ids(0, n)
            assert prompts.compute(prompt) == 0
            for turn in range(1, 3):
                expected = max(0, len(prompt) - REPLACED_TOKENS) // every * every
                prompt = [*prompt[:-n_replaced], *ids(1000 * turn, 30)]
                assert prompts.compute(prompt) == expected, f"{n} tokens, {n_replaced} of them replaced, turn {turn}"


@pytest.mark.parametrize("page", PAGES)
def test_chats_with_the_same_system_prompt_each_begin_their_turns_where_their_own_last_prompt_ended(page: int) -> None:
    """Their prompts share whole pages and no snapshot, because no chunk ends within the system prompt."""
    prompts, system = Prompts(page), ids(0, 2 * page + 5)
    chats = [[*system, *ids(1000 * chat, 3 * page)] for chat in range(1, 4)]
    assert [prompts.compute(prompt) for prompt in chats] == [0, 0, 0]
    last = (len(chats[0]) - REPLACED_TOKENS) // page * page
    assert [prompts.compute(prompt) for prompt in chats] == [last] * 3
    assert [prompts.compute([*prompt, *ids(9000, 30)]) for prompt in chats] == [last] * 3
    assert prompts.reserve.n_available == prompts.reserve.n_pages


def test_a_prompt_takes_one_snapshot_beside_those_after_whole_chunks_and_a_short_one_takes_none() -> None:
    for n, wanted in ((31, []), (32, [16]), (47, [16]), (48, [32]), (290, [256, 272]), (600, [256, 512, 576])):
        prompts, prompt = Prompts(16), ids(0, n)
        prompts.compute(prompt)
        assert [one.tokens for one in prompts.snapshots.beginnings(ids(0, 1000), 0)] == [
            tuple(prompt[:stop]) for stop in reversed(wanted)
        ]


def test_pages_of_a_prompt_that_came_once_go_after_newer_prompts_whatever_its_number_of_chunks() -> None:
    prompts = Prompts(16, recent=1)
    prompts.compute(ids(0, 600))
    prompts.compute(ids(1000, 600))
    assert prompts.reserve.n_cached == 600 // 16
