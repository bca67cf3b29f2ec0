"""The splitter against its oracle, what every split must hold to, and the rules that no vector shows."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.batch.clean import CleanBatch
from ostinato.decoder.batch.sanitizer import sanitize
from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.errors import InvalidBatch
from tests.counts import soak
from tests.decoder.batch import oracle
from tests.decoder.batch.cases import N_SEQ, shared_lists
from tests.decoder.batch.oracle import Clean, Slice

WIDTH = 2


def cleaned(lists: list[list[int]], output: list[int]) -> CleanBatch:
    return sanitize(Batch(token=range(len(lists)), seq_id=lists, output=output), n_vocab=1_000, n_seq_limit=256)


@st.composite
def batches(draw: st.DrawFn) -> tuple[CleanBatch, Clean]:
    """A batch that passes the checks, once for the splitter and once for the oracle."""
    few, many = (st.lists(st.integers(0, N_SEQ).map(lambda s: [s]), min_size=1, max_size=n) for n in (6, 24))
    lists = draw(st.one_of(few, many, shared_lists()))
    output = draw(st.lists(st.integers(0, 1), min_size=len(lists), max_size=len(lists)))
    plain = oracle.sanitize(oracle.Case(token=[0] * len(lists), seq_id=lists, output=output))
    if not isinstance(plain, Clean):  # the shared part broke the subset rule: let everybody go alone
        lists = [ids[:1] for ids in lists]
        plain = Clean(oracle.generated(lists, {}), lists, [flag != 0 for flag in output])
    return cleaned(lists, output), plain


class Call:
    """One kind of split with its settings, callable on the splitter and on the oracle."""

    def __init__(self, mode: str, n_ubatch: int, sequential: bool, n_keep_tail: int) -> None:
        self.mode, self.n_ubatch, self.sequential = mode, n_ubatch, sequential
        self.n_keep_tail = min(n_keep_tail, n_ubatch - 1)

    def __repr__(self) -> str:
        return f"{self.mode}({self.n_ubatch}, sequential={self.sequential}, n_keep_tail={self.n_keep_tail})"

    def fast(self, splitter: Splitter) -> Ubatch | None:
        if self.mode == "equal":
            return splitter.equal(self.n_ubatch, sequential=self.sequential, n_keep_tail=self.n_keep_tail)
        return splitter.simple(self.n_ubatch) if self.mode == "simple" else splitter.seq(self.n_ubatch)

    def slow(self, splitter: oracle.Splitter) -> Slice | None:
        if self.mode == "equal":
            return splitter.equal(self.n_ubatch, self.sequential, self.n_keep_tail)
        return splitter.simple(self.n_ubatch) if self.mode == "simple" else splitter.seq(self.n_ubatch)


MODES = st.sampled_from(["simple", "equal", "equal", "equal", "seq"])
CALLS = st.builds(Call, MODES, st.integers(1, 12), st.booleans(), st.integers(0, 4))


def ubatches(splitter: Splitter, call: Call) -> Iterator[Ubatch]:
    while (ubatch := call.fast(splitter)) is not None:
        yield ubatch


def check_fields(ubatch: Ubatch, batch: CleanBatch, expected: Slice, mode: str) -> None:
    """U-1."""
    lists = [batch.ids_of(i) for i in expected.index]
    unique = sorted({s for ids in lists for s in ids})
    assert ubatch.index.tolist() == expected.index
    assert (ubatch.n_tokens, ubatch.n_seqs) == (len(expected.index), expected.n_seqs)
    assert ubatch.n_seq_tokens * ubatch.n_seqs == ubatch.n_tokens
    assert ubatch.equal_seqs == (mode != "simple")
    assert (ubatch.seq_id_unq.tolist(), ubatch.n_seqs_unq) == (unique, len(unique))
    assert ubatch.token is not None
    assert ubatch.token.tolist() == expected.index
    assert ubatch.pos.tolist() == [batch.pos[i] for i in expected.index]
    assert [ubatch.ids_of(place) for place in range(ubatch.n_tokens)] == lists
    assert ubatch.n_seq_id.tolist() == [len(ids) for ids in lists]
    assert ubatch.primary.tolist() == [ids[0] for ids in lists]
    assert ubatch.output.tolist() == [bool(batch.output[i]) for i in expected.index]
    assert ubatch.n_outputs == sum(ubatch.output.tolist())


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=soak(6_000), derandomize=True, deadline=None)
@given(both=batches(), calls=st.lists(CALLS, min_size=1, max_size=3), repeat=st.booleans())
def test_every_split_is_what_the_rules_say(both: tuple[CleanBatch, Clean], calls: list[Call], repeat: bool) -> None:
    """One kind of split to the end, or several kinds in turn on what the others left."""
    batch, plain = both
    splitter, slow = Splitter(batch), oracle.Splitter(plain)
    for call in calls * batch.n_tokens if repeat else calls[:1] * (batch.n_tokens + 1):
        ubatch, expected = call.fast(splitter), call.slow(slow)
        assert (ubatch is None) == (expected is None), call
        if ubatch is not None and expected is not None:
            check_fields(ubatch, batch, expected, call.mode)
    assert splitter.out_ids.tolist() == slow.out_ids
    assert (splitter.n_used, splitter.complete) == (len(slow.used), len(slow.used) == batch.n_tokens)


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=soak(2_000), derandomize=True, deadline=None)
@given(both=batches(), call=CALLS)
def test_every_token_is_used_once_and_no_ubatch_is_too_long(both: tuple[CleanBatch, Clean], call: Call) -> None:
    """SP-2, SP-5, U-2, U-4 and the limit, without the oracle."""
    batch, _ = both
    splitter = Splitter(batch)
    made = list(ubatches(splitter, call))
    used = Counter(i for ubatch in made for i in ubatch.index.tolist())
    assert set(used.values()) <= {1}
    assert splitter.n_used == used.total()
    refused = call.mode == "equal" and call.sequential and batch.has_coupling
    assert splitter.complete != refused
    assert (made == []) == refused
    assert all(1 <= ubatch.n_tokens <= call.n_ubatch for ubatch in made)
    assert splitter.out_ids.tolist() == [i for ubatch in made for i in ubatch.index[ubatch.output].tolist()]
    if call.mode == "equal":
        for ubatch in made:
            sets = batch.set_of[ubatch.index].reshape(ubatch.n_seqs, ubatch.n_seq_tokens)
            assert (sets == sets[:, :1]).all()
            assert len(set(sets[:, 0].tolist())) == ubatch.n_seqs


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=soak(2_000), derandomize=True, deadline=None)
@given(
    ids=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    sequential=st.booleans(),
    n_keep_tail=st.integers(1, 5),
    more=st.integers(1, 12),
)
def test_the_tail_of_a_sequence_is_never_divided(ids: list[int], sequential: bool, n_keep_tail: int, more: int) -> None:
    """SP-12."""
    batch = cleaned([[s] for s in ids], [1] * len(ids))
    splitter = Splitter(batch)
    made_in = np.zeros(len(ids), np.int64)
    for number, ubatch in enumerate(ubatches(splitter, Call("equal", n_keep_tail + more, sequential, n_keep_tail))):
        made_in[ubatch.index] = number
    assert splitter.complete
    for s in set(ids):
        tail = [i for i, mine in enumerate(ids) if mine == s][-n_keep_tail:]
        assert len(set(made_in[tail].tolist())) == 1


def test_a_fresh_splitter_is_reset_and_a_reset_forgets_everything() -> None:
    """S-17 and SP-1."""
    splitter = Splitter(cleaned([[0], [1], [0]], [1, 1, 1]))
    assert (splitter.n_used, splitter.out_ids.tolist(), splitter.complete) == (0, [], False)
    first = splitter.equal(2, sequential=True)
    assert first is not None
    assert (splitter.n_used, splitter.out_ids.tolist()) == (2, [0, 1])
    splitter.reset()
    assert (splitter.n_used, splitter.out_ids.tolist(), splitter.complete) == (0, [], False)
    whole = splitter.simple(8)
    assert whole is not None
    assert whole.index.tolist() == [0, 1, 2]
    assert splitter.simple(8) is None


@pytest.mark.parametrize("n_ubatch", [0, -1])
@pytest.mark.parametrize("mode", ["simple", "equal", "seq"])
def test_a_ubatch_without_room_is_refused(mode: str, n_ubatch: int) -> None:
    """SP-3: in every kind of split, even where there would be nothing to give."""
    splitter = Splitter(cleaned([[0, 1]], [1]))
    call = Call(mode, 1, sequential=True, n_keep_tail=0)
    call.n_ubatch = n_ubatch
    with pytest.raises(InvalidBatch, match="at least one token") as raised:
        call.fast(splitter)
    assert raised.value.reason == "n_ubatch"
    assert splitter.n_used == 0


def test_a_sequence_passed_over_joins_only_where_a_later_token_names_it() -> None:
    """SP-7: sequence 2 does not follow 0 where it stands, and no token of it comes after sequence 1."""
    splitter = Splitter(cleaned([[0], [2], [1]], [1, 1, 1]))
    assert [u.index.tolist() for u in ubatches(splitter, Call("equal", 8, True, 0))] == [[0, 2], [1]]


def test_a_tail_must_fit_a_ubatch_with_room_to_spare() -> None:
    """SP-10."""
    splitter = Splitter(cleaned([[0]] * 4, [1] * 4))
    with pytest.raises(InvalidBatch, match="must be above"):
        splitter.equal(3, sequential=True, n_keep_tail=3)
    assert splitter.equal(4, sequential=True, n_keep_tail=3) is not None


def test_outputs_of_a_ubatch_are_its_flags_or_all_of_its_tokens() -> None:
    """SP-16."""
    some = Splitter(cleaned([[0]] * 4, [1, 0, 0, 1]))
    assert [ubatch.n_outputs for ubatch in ubatches(some, Call("simple", 3, False, 0))] == [1, 1]
    every = Splitter(cleaned([[0]] * 4, [1] * 4))
    assert [ubatch.n_outputs for ubatch in ubatches(every, Call("simple", 3, False, 0))] == [3, 1]


def test_embedding_rows_go_with_their_tokens_in_every_dimension() -> None:
    """U-1 and U-3."""
    embd = np.arange(8.0).reshape(4, WIDTH)
    pos = [0, 1, 0, 1, 10, 11, 12, 13]
    batch = Batch(embd=embd, pos=pos, seq_id=[[0], [0], [1], [1]])
    clean = sanitize(batch, n_vocab=8, n_seq_limit=2, n_pos_per_embd=2)
    ubatch = Splitter(clean).equal(2, sequential=True)
    assert ubatch is not None
    assert ubatch.token is None
    assert ubatch.embd is not None
    assert ubatch.index.tolist() == [0, 2]
    assert np.array_equal(ubatch.embd, embd[[0, 2]])
    assert ubatch.pos.tolist() == [[0, 0], [10, 12]]
    assert ubatch.first_pos.tolist() == [0, 0]


def test_a_ubatch_owns_its_data() -> None:
    """U-5: for the one split that takes the whole batch as it stands, too."""
    embd = np.ones((2, WIDTH))
    clean = sanitize(Batch(token=[1, 2], embd=embd, seq_id=[[0, 1], [0]]), n_vocab=8, n_seq_limit=2)
    ubatch = Splitter(clean).simple(2)
    assert ubatch is not None
    assert ubatch.embd is not None
    fields = [ubatch.token, ubatch.embd, ubatch.pos, ubatch.seq_id, ubatch.seq_start, ubatch.output]
    before = [np.array(field) for field in fields]
    for array in (embd, clean.token, clean.pos, clean.seq_id, clean.seq_start, clean.output):
        assert array is not None
        array[:] = 0
    for field, copy in zip(fields, before, strict=True):
        assert np.array_equal(np.array(field), copy)
