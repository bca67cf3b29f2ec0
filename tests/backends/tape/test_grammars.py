"""Answers under grammars on the tape, in the emulator, beside the same answers under the host's masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import pytest

from ostinato.backends.torch.backend import TWIN
from ostinato.engine.choose import settle_model
from ostinato.engine.constraint import Constraint
from ostinato.engine.engine import Engine
from ostinato.errors import BadInput
from ostinato.options import Rule, Sampling
from ostinato.text.automaton import AutomatonMatcher, GrammarMasks, of_rule
from tests.backends.tape.loop import CONTEXT, N_PAGES, OUTBOX, EmulatedLoop
from tests.backends.tape.models import shape_of, small
from tests.engine.opened import bits, ids, prompt, sampling, until
from tests.engine.test_grammars import END, OTHER_END, RULES, trie, wanted

pytestmark = pytest.mark.slow  # the kernel is compiled, and emulated

LLAMA = shape_of("llama")


@cache
def masks_of(rule: Rule) -> GrammarMasks:
    return GrammarMasks(of_rule(rule), trie(), LLAMA.vocab)


def constrain(asked: Sampling) -> Constraint | None:
    if asked.rule is None:
        return None
    return AutomatonMatcher(masks_of(asked.rule), frozenset({END, OTHER_END}), asked)


@contextmanager
def tape_engine(*, by_host: bool = False, watched: bool = False) -> Iterator[Engine]:
    """`by_host`: its loop has no memory for grammars."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ostinato.engine.engine.open_runner", partial(EmulatedLoop, watched=watched))
        if by_host:
            patch.setattr("ostinato.engine.choose.GRAMMAR_BYTES", 0)
        model = small(LLAMA)
        settled = settle_model(model, TWIN, context=CONTEXT, n_pages=N_PAGES, n_slots=4, kv_type="f32")
        with Engine(model, settled, outbox_entries=OUTBOX, constrain=constrain, eog_ids=(END, OTHER_END)) as engine:
            yield engine


def asked_of(name: str, seed: int) -> Sampling:
    most = max(14, RULES[name].get("min_tokens", 0))
    return wanted(name, max_tokens=most, temperature=0.9 if seed % 2 else 0.0, seed=seed)


def answers(by_host: bool, paths: set[str]) -> list[object]:
    with tape_engine(by_host=by_host) as engine:
        found = list[object]()
        for seed, name in enumerate(RULES):
            request = engine.submit(prompt(seed, 9), asked_of(name, seed))
            found.append((name, bits(request), request.finish_reason))
            assert request.grammar in paths
        return found


def test_the_kernel_chooses_what_the_hosts_masks_would_make_it_choose() -> None:
    assert answers(by_host=False, paths={"device", "device+stack"}) == answers(by_host=True, paths={"host"})


def test_rows_with_grammars_and_without_decode_together_as_alone() -> None:
    samplings = [asked_of("object", 1), sampling(max_tokens=20), asked_of("recursion", 3), asked_of("counted", 5)]
    with tape_engine(watched=True) as engine:
        alone = [bits(engine.submit(prompt(seed, 9), one)) for seed, one in enumerate(samplings)]
        together = [engine.submit(prompt(seed, 9), one) for seed, one in enumerate(samplings)]
        assert [bits(request) for request in together] == alone
        assert engine.runner.grammars is not None
        until(lambda: engine.runner.grammars.n_leased == 0, "every lease is back")  # type: ignore[union-attr]


@pytest.mark.parametrize("by_host", [False, True])
def test_a_constrained_answer_is_one_launch_and_one_trigger(by_host: bool) -> None:
    with tape_engine(by_host=by_host) as engine:
        before = engine.runner.start.n_launches, engine.runner.decode_mode.n_triggers
        assert len(ids(engine.submit(prompt(1, 9), wanted("counted", max_tokens=10)))) == 10
        until(lambda: not engine.runner.decode_mode.running, "the loop has ended")
        after = engine.runner.start.n_launches, engine.runner.decode_mode.n_triggers
        assert (after[0] - before[0], after[1] - before[1]) == (1, 1)


def test_an_answer_that_cannot_go_on_ends_with_an_error_and_no_other_does() -> None:
    with tape_engine() as engine:
        free = bits(engine.submit(prompt(5, 9), sampling(max_tokens=12)))
        other = engine.submit(prompt(5, 9), sampling(max_tokens=12))
        request = engine.submit(prompt(1, 20), sampling(regex="ab\x01c", ignore_eos=False))  # no token spells \x01
        with pytest.raises(BadInput, match="no token of this model may come next"):
            list(request)
        assert bits(other) == free
