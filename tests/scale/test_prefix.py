"""Routing by prefix: who is chosen, and what it gains over taking turns, in a simulation of four replicas."""

from __future__ import annotations

import json
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.scale import prefix
from ostinato.scale.prefix import BLOCK, PrefixKeys, PrefixTable, keys_of_body, keys_of_text

TEXTS = st.text(alphabet="ab", max_size=5 * BLOCK)
Choose = Callable[[str, Sequence[str], dict[str, int]], str]


def chats(
    choose: Choose, *, n_replicas: int, n_chats: int, turns: int, memory: int = 8, seed: int = 0
) -> tuple[float, int]:
    """The share of prompts' characters that a replica remembered, and the most requests that one replica had.

    Conversations take turns at random. Each replica remembers the last prompts it saw, `memory` of them. `choose` is
    given a prompt, the replicas and how busy each is, and names one.
    """
    chance = random.Random(seed)
    names = [f"replica-{number}" for number in range(n_replicas)]
    remembered: dict[str, OrderedDict[str, None]] = {name: OrderedDict() for name in names}
    asked = dict.fromkeys(names, 0)
    texts = [f"You are helper {number}. " * 4 for number in range(n_chats)]
    order = [number for number in range(n_chats) for _ in range(turns)]
    chance.shuffle(order)
    cached = total = 0
    busy: deque[str] = deque(maxlen=2 * n_replicas)  # those asked last are still at work
    for number in order:
        texts[number] += f"turn {chance.random()}: " + "some words " * 5
        text = texts[number]
        chosen = choose(text, names, {name: busy.count(name) for name in names})
        kept = remembered[chosen]
        best = max((shared(text, other) for other in kept), default=0)
        cached, total = cached + best, total + len(text)
        kept[text] = None
        while len(kept) > memory:
            kept.popitem(last=False)
        busy.append(chosen)
        asked[chosen] += 1
    return cached / total, max(asked.values())


def shared(one: str, other: str) -> int:
    n = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n += 1
    return n


@given(TEXTS, TEXTS)
def test_two_texts_share_keys_as_far_as_they_share_whole_blocks(one: str, other: str) -> None:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    same = [a == b for a, b in zip(keys_of_text(one), keys_of_text(other), strict=False)]
    assert sum(same) == shared // BLOCK
    assert same == sorted(same, reverse=True)


@given(st.binary(max_size=200))
def test_any_body_has_keys_or_none(body: bytes) -> None:
    assert isinstance(keys_of_body(body), tuple)


def test_a_longer_conversation_has_the_keys_of_the_shorter_one() -> None:
    messages = [{"role": "user", "content": "word " * 40}]
    more = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and " * 40}]
    for name in ("messages", "input"):
        short, long = (keys_of_body(json.dumps({name: each}).encode()) for each in (messages, more))
        assert len(short) > 1
        assert long[: len(short) - 1] == short[:-1]
    assert keys_of_body(json.dumps({"prompt": list(range(200))}).encode())


def test_a_text_as_input_has_the_keys_of_the_item_that_it_is_sent_back_as() -> None:
    text = "word " * 40
    items = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "x"},
    ]
    short, long = (
        keys_of_body(json.dumps({"instructions": "be brief", "input": each}).encode()) for each in (text, items)
    )
    assert len(short) > 2
    assert long[: len(short) - 1] == short[:-1]


def test_what_changes_from_turn_to_turn_and_is_not_in_the_prompt_changes_no_key() -> None:
    def keys(turn: int, *marked: dict[str, Any]) -> PrefixKeys:
        header = {"type": "text", "text": f"x-anthropic-billing-header: cch={turn};"}
        block = {"type": "text", "text": "word " * 40, **(marked[0] if marked else {})}
        body = {"system": [header, {"type": "text", "text": "be brief " * 20}], "messages": [{"content": [block]}]}
        return keys_of_body(json.dumps(body).encode())

    assert keys(1) == keys(2) == keys(3, {"cache_control": {"type": "ephemeral"}})
    assert len(keys(1)) > 5


def test_who_has_the_longest_prefix_is_first_unless_it_is_much_busier() -> None:
    table = PrefixTable(imbalance=2)
    keys = keys_of_text("a" * 4 * BLOCK)
    table.learn(keys[:2], "x")
    table.learn(keys, "y")
    assert table.order(keys, {"x": 0, "y": 0, "z": 0}) == ["y", "x", "z"]
    assert table.order(keys, {"x": 0, "y": 2, "z": 0}) == ["y", "x", "z"]
    assert table.order(keys, {"x": 0, "y": 3, "z": 0}) == ["x", "z", "y"]
    assert table.order((), {"x": 1, "y": 1, "z": 0}) == ["z", "x", "y"]
    assert table.order(keys, {}) == []
    table.forget(["y"])
    assert table.order(keys, {"x": 1, "y": 1, "z": 0}) == ["x", "z", "y"]


def test_the_table_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "MOST_KEYS", 10)
    table = PrefixTable(imbalance=2)
    texts = [f"{number:04}" * 16 * 4 for number in range(5)]
    for text in texts:
        table.learn(keys_of_text(text), "x")
    busy = {"x": 1, "y": 0}
    assert table.order(keys_of_text(texts[0]), busy)[0] == "y"
    assert table.order(keys_of_text(texts[-1]), busy)[0] == "x"
    assert len(table._replicas) == 10


def test_prefixes_find_more_in_memory_than_turns_do_over_four_replicas() -> None:
    table, turn = PrefixTable(imbalance=2), count()

    def by_prefix(text: str, names: Sequence[str], busy: dict[str, int]) -> str:
        chosen = table.order(keys_of_text(text), busy)[0]
        table.learn(keys_of_text(text), chosen)
        return chosen

    def in_turn(text: str, names: Sequence[str], busy: dict[str, int]) -> str:
        return names[next(turn) % len(names)]

    size = {"n_replicas": 4, "n_chats": 16, "turns": 8}
    found, most = chats(by_prefix, **size)
    found_in_turn, _ = chats(in_turn, **size)
    assert found > 2 * found_in_turn
    assert most <= 2 * 16 * 8 / 4  # and no replica is left with all of it
