"""What a decode step is, as properties that every way of decoding must pass.

At most one token per sequence per step; none before the step before it is committed in every layer; one key and value
per layer, sequence and step; a query reads every entry of its sequence, its window aside, and of no other; sequences
are independent; the batch never grows inside a step. A new way of decoding is one more entry of `WAYS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.backends.runner import Runner
from tests.counts import soak
from tests.decoder import loop_stepping as loops
from tests.decoder.cells.rig import KINDS, N_VOCAB
from tests.decoder.loop_stepping import LoopStepper
from tests.decoder.stepping import BatchStepper, Committed, Event, Place, Read, StepDecoder, Wrote

pytestmark = pytest.mark.slow

Way = Callable[[], StepDecoder]

WAYS: dict[str, Way] = {
    f"decoder, {kind}, {n_ubatch} rows at once": partial(BatchStepper, kind, n_ubatch=n_ubatch)
    for kind in KINDS
    for n_ubatch in (1, 3, 64)
}
LOOPS: dict[str, Callable[[], Runner]] = {
    "native loop, kv, 1 thread": partial(loops.native, "kv", 1),
    "native loop, kv, 2 threads": partial(loops.native, "kv", 2),
    "native loop, swa, 2 threads": partial(loops.native, "swa", 2),
    **{f"eager, {kind}": partial(loops.eager, kind) for kind in ("kv", "swa", "recurrent", "hybrid")},
    **{f"CUDA plan, {kind}": partial(loops.fused, kind) for kind in ("kv", "swa", "recurrent", "hybrid")},
    "tape": partial(loops.tape, None),
    "tape, swa": partial(loops.tape, 6),
}
WAYS |= {name: partial(LoopStepper, opened) for name, opened in LOOPS.items()}
PROMPTS: Mapping[int, Sequence[int]] = {
    0: (3, 1, 4, 1, 5),
    1: (9,),
    2: (2, 6, 5, 3, 5, 8, 9, 7, 9, 3),
    3: (2, 7, 1, 8),
}
N_STEPS = 8

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


@cache
def alone(way: Way, sequence: int) -> tuple[int, ...]:
    """The tokens of a sequence when it is the only one."""
    decoder = way()
    said = [decoder.admit({sequence: PROMPTS[sequence]})[sequence]]
    while len(said) <= N_STEPS:
        said.append(decoder.step({sequence: said[-1]})[sequence])
    return tuple(said)


@dataclass(frozen=True, slots=True)
class Watched:
    """A run: what each step was given, with its events; all events; the layers with attention; what a token leaves."""

    steps: Sequence[tuple[dict[int, int], list[Event]]]
    events: Sequence[Event]
    windows: Mapping[int, int | None]
    entries: set[tuple[int, str]]


@cache
def watched(way: Way) -> Watched:
    """A run of three sequences, one of which rests in every other step. Three steps tell what they read: in the last
    two, the longest sequence has passed the end of a page, and of a window."""
    decoder = way()
    following = decoder.admit({s: PROMPTS[s] for s in (0, 1, 2)})
    run = []
    for number in range(N_STEPS):
        given_tokens = {s: token for s, token in following.items() if s != 1 or number % 2}
        n_before = len(decoder.events)
        decoder.tells_reads = number in (0, 6, 7)
        following |= decoder.step(given_tokens)
        run.append((given_tokens, list(decoder.events[n_before:])))
    return Watched(run, decoder.events, decoder.windows, entries_of(decoder))


def entries_of(decoder: StepDecoder) -> set[tuple[int, str]]:
    """What a token must leave behind: a key and a value in each layer that attends, a state in each that recurs."""
    kv = {(layer, what) for layer in decoder.windows for what in ("key", "value")}
    return kv | {(layer, "state") for layer in decoder.state_layers}


@every_way
def test_a_step_adds_one_token_to_each_sequence_it_is_given_and_to_no_other(way: Way) -> None:
    decoder = way()
    following = decoder.admit({s: PROMPTS[s] for s in (0, 1, 2)})
    for asked in ([0, 1, 2], [1], [2, 0], [0]):
        before = [decoder.length(s) for s in range(4)]
        said = decoder.step({s: following[s] for s in asked})
        assert list(said) == asked
        assert all(0 <= token < N_VOCAB for token in said.values())
        assert [decoder.length(s) for s in range(4)] == [n + (s in asked) for s, n in enumerate(before)]
        following |= said


@every_way
def test_a_token_begins_only_when_those_before_it_are_committed_in_every_layer(way: Way) -> None:  # D-23
    run = watched(way)
    committed: set[Place] = set()
    begun: set[Place] = set()  # not yet committed
    wrote: Counter[tuple[Place, int, str]] = Counter()
    for event in run.events:
        if isinstance(event, Committed):
            committed |= event.places
            begun -= event.places
            for place in event.places:
                assert {(layer, what) for p, layer, what in wrote if p == place} == run.entries
            continue
        begun.add(event.place)
        earlier = {Place(event.place.sequence, position) for position in range(event.place.position)}
        assert earlier - committed <= begun, "only tokens of the same run may be without a commit"
        if len(committed) >= sum(len(PROMPTS[s]) for s in (0, 1, 2)):  # the prompts are in: from here on, steps
            assert earlier <= committed
        if isinstance(event, Wrote):
            wrote[event.place, event.layer, event.what] += 1
    assert not begun


@every_way
def test_a_step_writes_one_key_and_one_value_per_layer_and_sequence(way: Way) -> None:
    run = watched(way)
    lengths = {s: len(PROMPTS[s]) for s in (0, 1, 2)}
    for tokens, events in run.steps:
        written = Counter((e.layer, e.what, e.place) for e in events if isinstance(e, Wrote))
        wanted = {(*entry, Place(s, lengths[s])) for entry in run.entries for s in tokens}
        assert written == Counter(wanted)
        lengths |= {s: lengths[s] + 1 for s in tokens}


@every_way
def test_a_query_reads_every_entry_of_its_sequence_in_its_window_and_of_no_other(way: Way) -> None:
    run = watched(way)
    reads = [event for event in run.events if isinstance(event, Read)]
    assert bool(reads) == bool(run.windows)
    for read in reads:
        s, position = read.place
        window = run.windows[read.layer]
        first = 0 if window is None else max(0, position - window + 1)
        assert read.seen == tuple(Place(s, p) for p in range(first, position + 1))


@every_way
def test_the_batch_never_grows_inside_a_step(way: Way) -> None:
    run = watched(way)
    for tokens, events in run.steps:
        by_layer: dict[int, set[Place]] = {}
        for event in events:
            if not isinstance(event, Committed):
                by_layer.setdefault(event.layer, set()).add(event.place)
        assert set(by_layer) == {layer for layer, _ in run.entries}
        for places in by_layer.values():
            assert sorted(place.sequence for place in places) == sorted(tokens)
        committed = [place for event in events if isinstance(event, Committed) for place in event.places]
        assert sorted(place.sequence for place in committed) == sorted(tokens)


@st.composite
def schedules(draw: st.DrawFn) -> list[list[int]]:
    """Who comes when, and who takes part in each step after that, in which order."""
    arrivals = draw(st.permutations(list(PROMPTS)))
    first = draw(st.integers(1, len(arrivals)))
    groups = [arrivals[:first], *([s] for s in arrivals[first:])]
    orders = st.lists(st.sampled_from(arrivals), unique=True, min_size=1)
    return [*groups, *draw(st.lists(orders, min_size=2, max_size=N_STEPS))]


@pytest.mark.soak
@every_way
@settings(
    max_examples=soak(50),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.differing_executors],
)
@given(schedule=schedules())
def test_a_sequence_says_the_same_beside_any_other_sequences(way: Way, schedule: list[list[int]]) -> None:  # D-24
    decoder, said = way(), dict[int, list[int]]()
    for group in schedule:
        new = {s: PROMPTS[s] for s in group if s not in said}
        going_on = {s: said[s][-1] for s in group if s in said}
        following = decoder.admit(new) if new else {}
        following |= decoder.step(going_on) if going_on else {}
        for s, token in following.items():
            said.setdefault(s, []).append(token)
    for s, tokens in said.items():
        assert tuple(tokens) == alone(way, s)[: len(tokens)]
