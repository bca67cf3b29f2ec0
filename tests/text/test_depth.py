"""Open calls: a mask leads into no text that the stack has no room to complete, and refuses nothing else because of it.

The oracle is slow and obvious: it walks the words of an automaton that was compiled for a larger stack, refuses what
opens too many calls, and searches all positions for those from which the text can end.
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.errors import BadOption
from ostinato.options import Rule
from ostinato.text import automaton
from ostinato.text.automaton import Automaton, GrammarMasks, of_rule
from ostinato.text.program import Program
from ostinato.text.walk import MAX_DEPTH
from tests.counts import soak
from tests.text.oracle import ids, schema_rule, vocabulary
from tests.text.test_automaton import accepts, of_schema, tiny
from tests.text.test_grammar import tokenizer

ALPHABET = b"abcxy()[],"
MOST_POSITIONS = 3000

Place: TypeAlias = tuple[int, int, tuple[tuple[int, int], ...]]  # state, counter, open calls


class SlowWalk:
    """Reads the words of an automaton as docs/automata.md tells them, with a stack of its own size."""

    def __init__(self, made: Automaton, most_calls: int) -> None:
        self._a, self._most = [int(word) for word in made.words], most_calls

    def first(self) -> Place:
        return self._settled((self._a[3], 0, ()))

    def take(self, place: Place, byte: int) -> Place | None:
        for state, counter, calls in self._returns(place):
            first, n, *_ = self._state(state)
            for edge in range(first, first + n):
                bits, target, back = self._words(self._a[5], edge, 3)
                if not bits & 255 <= byte <= bits >> 8 & 255:
                    continue
                if not bits >> 16 & 4:
                    return self._settled(self._entered(target, counter, calls, bits >> 16))
                if len(calls) == self._most:
                    return None
                return self._settled(self._entered(target, 0, (*calls, (back, counter)), bits >> 16))
        return None

    def ends(self, place: Place) -> bool:
        *_, (state, _, calls) = self._returns(place)
        return not calls and self._state(state)[4] != 0

    def _returns(self, place: Place) -> list[Place]:
        """A place, and those where its calls return one after the other, as far as they may."""
        found = [place]
        while self._state(found[-1][0])[4] and found[-1][2]:
            found.append(self._returned(found[-1]))
        return found

    def _returned(self, place: Place) -> Place:
        *calls, (back, counter) = place[2]
        return self._entered(back >> 2, counter, tuple(calls), back & 3)

    def _settled(self, place: Place) -> Place:
        while place[2] and self._state(place[0])[4] == 2:
            place = self._returned(place)
        return place

    def _entered(self, target: int, counter: int, calls: tuple[tuple[int, int], ...], bits: int) -> Place:
        *_, limit, reached = self._state(target)
        counter = 1 if bits & 2 else counter + (bits & 1)
        if limit and counter >= limit:
            return reached, 0, calls
        return target, counter if limit else 0, calls

    def _state(self, state: int) -> list[int]:
        return self._words(self._a[4], state, 7)

    def _words(self, at: int, number: int, size: int) -> list[int]:
        return self._a[at + number * size : at + (number + 1) * size]


def can_end(walk: SlowWalk) -> dict[Place, dict[int, Place]] | None:
    """The places from which the text can end, and which bytes lead from one to another; None if they are too many."""
    nexts: dict[Place, dict[int, Place]] = {}
    todo = [walk.first()]
    while todo:
        place = todo.pop()
        if place in nexts:
            continue
        if len(nexts) == MOST_POSITIONS:
            return None
        nexts[place] = {byte: to for byte in ALPHABET if (to := walk.take(place, byte)) is not None}
        todo += nexts[place].values()
    good = {place for place in nexts if walk.ends(place)}
    n_before = -1
    while len(good) > n_before:
        n_before = len(good)
        good |= {place for place, to in nexts.items() if not good.isdisjoint(to.values())}
    return {place: {byte: to for byte, to in nexts[place].items() if to in good} for place in good}


def check_against_oracle(rule: Rule, max_depth: int) -> int:
    """Compare what an automaton for a small stack allows with the oracle, everywhere; how many places there are."""
    program = Program()
    program.root(automaton._rule_node(program, rule))
    try:
        slow = SlowWalk(automaton.compiled(program), max_depth)
    except BadOption:  # without any text, or too large
        return 0
    nexts = can_end(slow)
    if nexts is None:
        return 0
    if slow.first() not in nexts:
        with pytest.raises(BadOption, match=f"deeper than {max_depth} open calls"):
            automaton.compiled(program, max_depth=max_depth)
        return 0
    masks = GrammarMasks(automaton.compiled(program, max_depth=max_depth), tiny().trie, 512)
    seen, todo = set(), [(masks.begin(), slow.first())]
    while todo:
        position, place = todo.pop()
        if place in seen:
            continue
        seen.add(place)
        assert masks.ends(position) == slow.ends(place)
        for byte in ALPHABET:
            taken = position.copy()
            allowed = masks.take_bytes(taken, bytes([byte]))
            assert allowed == (byte in nexts[place]), (rule.text, place, bytes([byte]))
            if allowed:
                todo.append((taken, nexts[place][byte]))
    return len(seen)


def grammars() -> st.SearchStrategy[str]:
    """Rules that call one another, with few or many rounds; most need some depth, and some cannot end at all."""
    names = ["start", "p", "q", "r"]
    calls = st.sampled_from(names)
    texts = st.sampled_from(['"a"', '"b"', "/[ab]+/", f'"(" {names[1]} | "(b"'])
    repeats = st.sampled_from(["", "", "", "", "?", "*", "{2}", "{1,3}", "{13,15}"])
    items = st.tuples(calls | calls | texts, repeats).map(lambda item: f'(({item[0]}) ","){item[1]}')
    bodies = st.lists(st.lists(items, min_size=1, max_size=2).map(" ".join), min_size=1, max_size=2)
    rules = st.tuples(bodies, st.sampled_from(["", "", ' | "c"']))

    def written(found: list[tuple[list[str], str]]) -> str:
        return "\n".join(
            f"{name}: " + " | ".join(f'"{sign}" {one} ")"' for sign, one in zip("[x", body, strict=False)) + end
            for name, (body, end) in zip(names, found, strict=True)
        )

    return st.lists(rules, min_size=4, max_size=4).map(written)


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=soak(1500, part=12), deadline=None, suppress_health_check=list(HealthCheck))
@given(grammar=grammars(), max_depth=st.integers(0, 4))
def test_every_allowed_prefix_can_be_completed_and_no_other_is_refused(grammar: str, max_depth: int) -> None:
    check_against_oracle(Rule("grammar", grammar), max_depth)


NEXT = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
LEAVES = {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "minItems": 1}, "minItems": 1}
# A rule, and a text that opens a call and may follow itself
DEEP = {
    "calls at the end": (Rule("grammar", 'start: "(" start ")" | "[" p "]"\np: "x" q\nq: "a" "b"'), b"("),
    "a special token": (Rule("grammar", 'start: "(" start ")" | "a" <[3]> p\np: "x" q\nq: "y" "b"'), b"("),
    "rounds": (Rule("grammar", 'start: "(" (start ","){13,40} ")" | "[" p{14,20} "]"\np: "x" "y"'), b"("),
    "members": (
        schema_rule(
            {
                "$ref": "#/$defs/node",
                "$defs": {"node": {"anyOf": [{**NEXT, "additionalProperties": False}, LEAVES]}},
            }
        ),
        b'{"next":',
    ),
    "values": (schema_rule({"type": "array", "items": {"minItems": 2}, "minItems": 2}), b"["),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", DEEP)
def test_an_answer_that_goes_as_deep_as_it_may_can_end(name: str) -> None:
    rule, opening = DEEP[name]
    words = vocabulary(tokenizer(), special=8)
    masks, rng = words.masks(of_rule(rule)), random.Random(2)
    deepest = masks.begin()
    while masks.take_bytes(taken := deepest.copy(), opening):
        deepest = taken
    assert MAX_DEPTH - 4 <= deepest[2] <= MAX_DEPTH
    for _ in range(soak(100)):
        position = deepest.copy()
        for _ in range(200):
            bits = masks.mask(position)
            found = [id for id in map(int, ids(bits)) if masks.take(position.copy(), id)]
            assert len(found) == len(ids(bits))  # special tokens too
            if not found:
                assert masks.ends(position)
                break
            assert masks.take(position, rng.choice(found))


def test_the_shortest_text_of_a_grammar_must_fit_the_stack() -> None:
    def nested(levels: int) -> Any:
        return {"type": "array", "minItems": 1, "items": nested(levels - 1)} if levels else {"type": "null"}

    program = Program()
    program.root(automaton._schema_node(program, nested(5)))
    assert accepts(automaton.compiled(program, max_depth=5), "[[[[[null]]]]]")
    with pytest.raises(BadOption, match="nest deeper than 4 open calls"):
        automaton.compiled(program, max_depth=4)


def test_a_kept_mask_is_not_taken_for_that_of_another_depth() -> None:
    """Within the last levels a mask depends on the depth; every mask is compared with one that was not kept."""
    made = of_schema({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}})
    kept, fresh = (GrammarMasks(made, tiny().trie, 512, most_kept=most) for most in (64, 0))
    for n in range(MAX_DEPTH + 1):
        position = kept.begin()
        assert kept.take_bytes(position, b"[" * n)
        assert np.array_equal(kept.mask(position), fresh.mask(position))
