"""Random batches for the oracle: most of them nearly right, so that the later checks are reached too."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.decoder.batch.oracle import Case, generated

N_SEQ = 4


@st.composite
def shared_lists(draw: st.DrawFn) -> list[list[int]]:
    """Sequence lists that follow the subset rule more often than not: shared beginnings, then branches."""
    ids = st.permutations(range(N_SEQ))
    groups = [draw(ids)[: draw(st.integers(1, N_SEQ))] for _ in range(draw(st.integers(1, 3)))]
    lists = [list(draw(st.sampled_from(groups))) for _ in range(draw(st.integers(0, 4)))]
    tail = draw(st.lists(st.integers(0, N_SEQ - 1), min_size=0 if lists else 1, max_size=10))
    return lists + [[s] for s in tail]


def lists() -> st.SearchStrategy[list[list[int]]]:
    alone = st.lists(st.integers(0, N_SEQ - 1).map(lambda s: [s]), min_size=1, max_size=14)
    odd = st.lists(st.lists(st.integers(-1, N_SEQ + 1), max_size=3), min_size=1, max_size=6)
    return st.one_of(alone, shared_lists(), shared_lists(), odd)


@st.composite
def memories(draw: st.DrawFn) -> dict[int, tuple[int, int]] | None:
    if draw(st.booleans()):
        return None
    common = draw(st.sampled_from([None, (0, 3), (1, 3), (0, 0)]))
    memory = {s: draw(st.sampled_from([common, common, common, (0, 2), None])) for s in range(N_SEQ)}
    return {s: extremes for s, extremes in memory.items() if extremes is not None}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any batch: well-made, with one thing changed, or with fields of the wrong length."""
    seq_id = draw(lists())
    n = len(seq_id)
    case = Case(
        token=draw(st.lists(st.integers(0, 127), min_size=n, max_size=n)),
        seq_id=seq_id,
        memory=draw(memories()),
        n_seq_limit=draw(st.sampled_from([N_SEQ, N_SEQ, N_SEQ, 3, 256, 257])),
        output_all=draw(st.booleans()),
        n_pos_per_embd=draw(st.sampled_from([1, 1, 1, 3])),
    )
    if draw(st.booleans()):
        case = replace(case, token=None, n_rows=n)
    if draw(st.booleans()):
        case = replace(case, output=draw(st.lists(st.integers(-1, 2), min_size=n, max_size=n)))
    if all(seq_id) and draw(st.booleans()):
        case = replace(case, pos=draw(positions(case)))
    return draw(damaged(case))


@st.composite
def positions(draw: st.DrawFn, case: Case) -> list[int]:
    """What would be generated, moved here and there; the further dimensions hold anything."""
    assert case.seq_id is not None
    pos = generated(case.seq_id, case.memory or {})
    for _ in range(draw(st.integers(0, 2))):
        pos[draw(st.integers(0, len(pos) - 1))] += draw(st.integers(-2, 2))
    shift = draw(st.sampled_from([0, 0, 0, -1, 1, 100]))
    pos = [p + shift for p in pos]
    more = 0 if case.token is not None else (case.n_pos_per_embd - 1) * len(pos)
    return pos + draw(st.lists(st.integers(-5, 5), min_size=more, max_size=more))


@st.composite
def damaged(draw: st.DrawFn, case: Case) -> Case:
    kind = draw(st.sampled_from(["none"] * 12 + ["token", "long", "short", "both", "neither", "empty"]))
    if kind == "token" and case.token:
        token = list(case.token)
        token[draw(st.integers(0, len(token) - 1))] = draw(st.sampled_from([-1, 128, 10**12]))
        return replace(case, token=token)
    if kind in ("long", "short"):
        names = [name for name in ("pos", "seq_id", "output") if getattr(case, name)]
        name = draw(st.sampled_from([*names, "token"]))
        values: list[Any] = list(getattr(case, name) or [0])
        changed: dict[str, Any] = {name: values + values[-1:] if kind == "long" else values[:-1]}
        return replace(case, **changed)
    if kind == "both" and case.token is not None:
        return replace(case, n_rows=len(case.token) + draw(st.integers(0, 1)))
    if kind == "neither":
        return replace(case, token=None, n_rows=None)
    return replace(case, token=[], n_rows=None) if kind == "empty" else case
