"""Answers under a grammar that the loop follows by itself: one launch, no mask of the host, and the same tokens."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.constraint import Constraint
from ostinato.engine.engine import Engine
from ostinato.errors import BadInput, InternalError
from ostinato.loop.grammars import CompiledGrammar, GrammarMemory
from ostinato.options import Rule, Sampling
from ostinato.text.automaton import AutomatonMatcher, GrammarMasks, Trie, of_rule
from tests.engine.opened import alone, bits, ids, open_engine, prompt, sampling, until
from tests.random_model import MemoryKind

VOCAB = 128
END, OTHER_END = 127, 126
# Printable characters, and some tokens of several; ids below 32 have longer texts than one byte.
LONGER = ('{"', '":', '",', '"}', "[[", "]]", "],", "},", "true", "false", "null", "12", "aa", "ab", '"a', 'a"', "\xe9")
TOKENS = [(LONGER[id] if id < len(LONGER) else chr(id)).encode() for id in range(VOCAB)]
SPECIAL = [END, OTHER_END, *range(len(LONGER), 32)]
PERSON = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "ab": {"type": "array", "items": {"type": "boolean"}, "maxItems": 30}},
    "required": ["a", "ab"],
    "additionalProperties": False,
}
NESTED = {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
RULES: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[a-f]{3,9}(true|12)?"},
    "counted": {"regex": "(ab|a|b){20,40}"},
    "choice": {"choice": ("true", "false", "aab")},
    "object": {"schema": PERSON},
    "open object": {"schema": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20}}}},
    "recursion": {"schema": NESTED},
    "min_tokens": {"regex": "a*", "min_tokens": 7},
    "ignored ends": {"regex": "(a|b){2,}", "ignore_eos": True, "max_tokens": 12},
    "ends where it must": {"regex": "(a|b){3}", "ignore_eos": True, "min_tokens": 30},
    "a stop id": {"regex": "[a-z]*", "min_tokens": 2, "stop_token_ids": (ord("c"), ord("q"))},
    "penalties": {"regex": "[a-h]{1,30}", "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 3},
}


@cache
def trie() -> Trie:
    return Trie(TOKENS, SPECIAL)


@cache
def masks_of(rule: Rule) -> GrammarMasks:
    return GrammarMasks(of_rule(rule), trie(), VOCAB)


def constrain(wanted: Sampling) -> Constraint | None:
    if wanted.rule is None:
        return None
    return AutomatonMatcher(masks_of(wanted.rule), frozenset({END, OTHER_END}), wanted)


@contextmanager
def grammar_engine(*, by_host: bool = False, **words: Any) -> Iterator[Engine]:
    """An engine over those tokens. `by_host`: its loop has no memory for grammars."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            if by_host:
                patch.setattr("ostinato.engine.choose.GRAMMAR_BYTES", 0)
            opened = stack.enter_context(open_engine(constrain=constrain, eog_ids=(END, OTHER_END), **words))
        yield opened


def wanted(name: str, **words: Any) -> Sampling:
    return sampling(**{"ignore_eos": False, "max_tokens": 60, **RULES[name], **words})


@pytest.fixture(scope="module", params=["loop", pytest.param("eager", marks=pytest.mark.slow)])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """An engine whose loop follows grammars, and one that waits for the host's masks."""
    with grammar_engine(mode=request.param) as by_loop, grammar_engine(mode=request.param, by_host=True) as by_host:
        yield by_loop, by_host


@pytest.mark.parametrize("name", RULES)
def test_the_loop_chooses_what_the_hosts_masks_would_make_it_choose(name: str, both: tuple[Engine, Engine]) -> None:
    ways = [wanted(name), wanted(name, temperature=1.0, seed=5), wanted(name, temperature=0.8, top_p=0.9, seed=6)]
    for seed, one in enumerate(ways):
        by_loop, by_host = (engine.submit(prompt(seed, 9), one) for engine in both)
        assert bits(by_loop) == bits(by_host)
        assert by_loop.finish_reason == by_host.finish_reason
        assert (by_loop.mask_s, by_host.grammar) == (0, "host")
        assert by_loop.grammar in ("device", "device+stack")


def test_a_flat_grammar_needs_no_stack_and_a_nested_one_does() -> None:
    with grammar_engine() as engine:
        found = {name: engine.submit(prompt(1, 9), wanted(name)) for name in ("regex", "choice", "recursion")}
        for request in found.values():
            list(request)
        assert {name: request.grammar for name, request in found.items()} == {
            "regex": "device",
            "choice": "device",
            "recursion": "device+stack",
        }


@pytest.mark.parametrize("kind", ["kv", "recurrent", "hybrid", "swa"])
def test_models_of_every_kind_follow_grammars(kind: MemoryKind) -> None:
    with grammar_engine(kind=kind) as engine:
        found = ids(engine.submit(prompt(1, 9), wanted("object", temperature=1.0)))
        text = b"".join(TOKENS[id] for id in found if id not in SPECIAL)
        if found[-1] in (END, OTHER_END):
            assert set(json.loads(text)) == {"a", "ab"}
        else:
            assert len(found) == 60


def test_a_constrained_answer_takes_as_many_launches_as_a_free_one() -> None:
    def launches(one: Sampling) -> tuple[int, int, int]:
        with grammar_engine(n_slots=1) as engine:
            before = engine.runner.start.n_launches
            n = len(ids(engine.submit(prompt(1, 9), one)))
            until(lambda: not engine.runner.decode_mode.running, "the loop has ended")
            return n, engine.runner.start.n_launches - before, engine.runner.decode_mode.n_triggers

    constrained = launches(wanted("counted", max_tokens=15))
    assert constrained == launches(sampling(max_tokens=15)) == (15, 1, 1)


def test_the_answer_is_the_same_alone_and_among_others() -> None:
    free = sampling(max_tokens=40)
    with grammar_engine(n_slots=6) as engine:
        once = bits(engine.submit(prompt(1, 20), wanted("object", temperature=1.0)))
        others = [engine.submit(prompt(i, 12), free) for i in range(3, 5)]
        among = [engine.submit(prompt(1, 20), wanted("object", temperature=1.0)) for _ in range(5)]
        assert [bits(request) for request in among] == [once] * 5
        assert [bits(request) for request in others] == [alone(prompt(i, 12), free) for i in range(3, 5)]


@pytest.mark.slow
def test_a_host_that_sleeps_delays_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with grammar_engine(n_slots=1, context=2048) as engine:
        list(engine.submit(prompt(2, 9), wanted("counted")))  # its masks are kept now
        scheduler, slept = engine._scheduler, False
        drain = scheduler._drain

        def sleepy() -> None:
            nonlocal slept
            if engine.runner.decode_mode.running and not slept:
                slept = True
                time.sleep(1.0)
            drain()

        monkeypatch.setattr(scheduler, "_drain", sleepy)
        request = engine.submit(prompt(1, 9), sampling(regex="(a|b){1,1500}", max_tokens=1500))
        times = [token.time_ns for token in request]
        assert slept
        assert len(times) > 10
        longest = max(later - earlier for earlier, later in itertools.pairwise(times)) / 1e9
        assert longest < 0.5, f"a token took {longest:.2f} s while the host slept"


@pytest.mark.parametrize("mode", ["loop", "eager"])
def test_an_answer_that_cannot_go_on_ends_with_an_error_and_no_other_does(mode: str) -> None:
    with grammar_engine(mode=mode) as engine:
        other = engine.submit(prompt(5, 9), sampling(max_tokens=30))
        request = engine.submit(prompt(1, 20), sampling(regex="ab\x01c", ignore_eos=False))  # no token spells \x01
        with pytest.raises(BadInput, match="no token of this model may come next"):
            list(request)
        assert bits(other) == alone(prompt(5, 9), sampling(max_tokens=30), mode=mode)
        until(lambda: engine.stats().pages_leased == 0, "its pages are back")
        assert engine.stats().ended == {"error": 1, "length": 1}
        assert engine.runner.grammars is not None
        assert engine.runner.grammars.n_leased == 0


def test_a_prompt_that_fails_gives_its_grammar_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with grammar_engine() as engine:

        def fails(slot: int) -> None:
            raise RuntimeError("no first token")

        monkeypatch.setattr(engine.runner.chunks, "first", fails)
        with pytest.raises(InternalError, match="no first token"):
            list(engine.submit(prompt(1, 9), wanted("object")))
        assert engine.runner.grammars is not None
        assert engine.runner.grammars.n_leased == 0


@pytest.mark.parametrize("kind", ["kv", "recurrent"])
def test_an_answer_that_could_not_go_on_is_resumed_from_a_right_state(kind: MemoryKind) -> None:
    broken = sampling(regex="ab\x01c", ignore_eos=False)
    longer = [*prompt(1, 20), ord("a"), ord("b"), 40, 41]
    with grammar_engine(kind=kind) as engine:
        with pytest.raises(BadInput, match="no token"):
            list(engine.submit(prompt(1, 20), broken, keep=True))
        found = ids(engine.submit(longer, sampling(max_tokens=8), resume=True))
    assert found == [bit[0] for bit in alone(longer, sampling(max_tokens=8), kind)]


def test_many_come_and_go_and_every_lease_comes_back() -> None:
    with grammar_engine(n_slots=3, n_pages=12, context=64) as engine:
        requests = []
        for i in range(60):
            one = wanted(list(RULES)[i % len(RULES)], max_tokens=30) if i % 3 else sampling(max_tokens=7)
            requests.append(engine.submit(prompt(i, 10), one))
            if i % 5 == 0:
                requests[-1].cancel()
        for request in requests:
            list(request)
        stats = engine.stats()
        assert sum(stats.ended.values()) == 60
        assert (stats.live, stats.waiting, stats.prefilling, stats.pages_leased) == (0, 0, 0, 0)
        assert engine.runner.grammars is not None
        assert engine.runner.grammars.n_leased == 0


def test_a_grammar_without_room_is_followed_by_the_host_to_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    wishes = [wanted("counted", temperature=1.0), wanted("object", temperature=1.0)]
    with grammar_engine(n_slots=2) as engine:
        expected = [ids(engine.submit(prompt(i, 9), one)) for i, one in enumerate(wishes)]
        assert engine.runner.grammars is not None
        vocabulary_bytes = 4 * engine.runner.grammars._vocabulary_end
    monkeypatch.setattr("ostinato.engine.choose.GRAMMAR_BYTES", vocabulary_bytes + 4096)
    with grammar_engine(n_slots=2) as engine:
        requests = [engine.submit(prompt(i, 9), one) for i, one in enumerate(wishes)]
        assert [ids(request) for request in requests] == expected
        assert {request.grammar for request in requests} == {"host"}


# The memory


def compiled(text: str) -> CompiledGrammar:
    rule = Rule("regex", text)
    return CompiledGrammar(rule, of_rule(rule), trie())


def room_for(n: int) -> GrammarMemory:
    """Memory for the vocabulary and so many small grammars."""
    one = GrammarMemory(1 << 24, 4)
    one.lease(compiled("[ab]"))
    vocabulary = 4 * one._vocabulary_end
    return GrammarMemory(vocabulary + n * (one.used_bytes - vocabulary), 4)


def test_one_region_serves_all_requests_with_the_same_rule_and_stays_after_them() -> None:
    memory = room_for(2)
    first = memory.lease(compiled("[ab]"))
    assert first is not None
    assert memory.lease(compiled("[ab]")) == first
    memory.release(first)
    memory.release(first)
    assert memory.n_leased == 0
    assert memory.lease(compiled("[cd]")) != first
    assert memory.lease(compiled("[ab]")) == first


def test_the_grammar_used_least_recently_gives_way_and_a_leased_one_never_does() -> None:
    memory = room_for(2)
    held, idle = memory.lease(compiled("[ab]")), memory.lease(compiled("[cd]"))
    assert held is not None
    assert idle is not None
    assert memory.lease(compiled("[ef]")) is None
    memory.release(idle)
    assert memory.lease(compiled("[ef]")) == idle
    memory.release(held)
    assert memory.lease(compiled("[cd]")) == held


def test_a_grammar_that_never_fits_leaves_the_others_where_they_are() -> None:
    memory = room_for(2)
    first = memory.lease(compiled("[ab]"))
    assert first is not None
    memory.release(first)
    assert memory.lease(compiled("(a|b)*a(a|b){10}")) is None
    assert memory.lease(compiled("[ab]")) == first


def test_a_lease_is_given_back_once() -> None:
    memory = room_for(2)
    first = memory.lease(compiled("[ab]"))
    assert first is not None
    memory.release(first)
    with pytest.raises(InternalError, match="not leased"):
        memory.release(first)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), max_size=60), st.integers(1, 4))
def test_regions_never_overlap_and_hold_what_was_placed(script: Sequence[tuple[str, bool]], n: int) -> None:
    memory = room_for(n)
    held: list[tuple[str, int]] = []
    for letter, takes in script:
        one = compiled(f"{letter}[xy]{{1,{ord(letter) - 90}}}")
        if takes and (first := memory.lease(one)) is not None:
            held.append((letter, first))
            assert memory.words[first : first + len(one.automaton.words)].tolist() == one.automaton.words.tolist()
        elif held and not takes:
            memory.release(held.pop(0)[1])
        regions = sorted((region.first, region.first + region.n_words) for region in memory._regions.values())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(regions))
        assert not regions or (regions[0][0] >= memory._vocabulary_end and regions[-1][1] <= len(memory.words))
        assert memory.n_leased == len(held)
