"""The order of one decode, and what each way of ending it leaves behind (D-8..D-22, GS, UP-8), with small models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.cells.decoder import Decoder
from ostinato.decoder.cells.memory.coordinator import Coordinator
from ostinato.decoder.cells.memory.cursor import PreparedBatch, failed
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.status import Status
from ostinato.decoder.cells.output import Sampled
from ostinato.errors import Aborted, InternalError, InvalidBatch, NoSlot
from tests.decoder.cells.rig import (
    HIDDEN,
    KINDS,
    N_VOCAB,
    Kind,
    assert_close,
    contents,
    lasting,
    model_of,
    small_decoder,
)
from tests.models import plain_memory

every_kind = pytest.mark.parametrize("kind", KINDS)


def text(n: int, seed: int = 0) -> list[int]:
    return [(7 * k + 3 * seed) % N_VOCAB for k in range(n)]


def batch_of(tokens: dict[int, list[int]], *, in_turns: bool = False, output: bool | None = True) -> Batch:
    """Tokens of some sequences, one after the other or in turns; all, none or only the last are outputs."""
    rows = [(k, s, token) for s, listed in tokens.items() for k, token in enumerate(listed)]
    if in_turns:
        rows.sort()
    flags = None if output is None else [output] * len(rows)
    return Batch(token=[token for _, _, token in rows], seq_id=[[s] for _, s, _ in rows], output=flags)


def rows_of(decoder: Decoder, n: int) -> list[Tensor]:
    rows = [decoder.logits(index) for index in range(n)]
    assert all(row is not None for row in rows)
    return [row.clone() for row in rows if row is not None]


# What was published


def test_a_batch_without_room_leaves_the_rows_of_the_last_one_in_batch_order() -> None:  # D-8, OUT-16
    decoder = small_decoder("kv-streams", cells=8)
    tokens = {0: text(3), 1: text(3, 1)}
    decoder.decode(batch_of(tokens, in_turns=True))
    assert decoder.outputs.swaps, "the rows are not in batch order yet, and no call has read them"
    with pytest.raises(NoSlot):
        decoder.decode(batch_of({0: text(6)}))
    for index in range(6):
        k, s = divmod(index, 2)
        plain = plain_memory.logits(model_of("kv-streams")[0], tokens[s])
        assert_close(decoder.logits(index), plain[k], f"token {index}")


def test_pooled_vectors_outlive_a_batch_without_room() -> None:  # D-8
    decoder = small_decoder("kv", cells=8, embeddings=True, pooling="mean")
    decoder.decode(batch_of({0: text(3)}))
    before = decoder.pooled(0)
    assert before is not None
    before = before.clone()
    with pytest.raises(NoSlot):
        decoder.decode(batch_of({0: text(6)}))
    after = decoder.pooled(0)
    assert after is not None
    assert torch.equal(after, before)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Batch(embd=np.zeros((8, HIDDEN + 1), np.float32), output=[1] * 8), "shape"),
        (Batch(token=[1] * 8, segment=[7] * 8, output=[1] * 8), "segment"),
    ],
    ids=["embd", "segment"],
)
@every_kind
def test_a_batch_that_the_model_cannot_take_has_changed_nothing(kind: Kind, bad: Batch, reason: str) -> None:  # G-3
    decoder = small_decoder(kind)
    decoder.decode(batch_of({0: text(10)}))
    before, rows = contents(decoder), rows_of(decoder, 10)
    with pytest.raises(InvalidBatch) as refused:
        decoder.decode(bad)
    assert refused.value.reason == reason
    assert contents(decoder) == before
    assert all(torch.equal(a, b) for a, b in zip(rows_of(decoder, 10), rows, strict=True))


@every_kind
def test_a_run_that_failed_publishes_nothing(kind: Kind) -> None:  # D-16
    decoder = small_decoder(kind, n_ubatch=2)
    decoder.decode(batch_of({0: text(4)}))
    with pytest.raises(Aborted):
        decoder.decode(batch_of({0: text(6)}), abort=lasting(4))
    assert decoder.outputs.n_outputs == 0
    assert set(decoder.outputs.ids) == {None}
    assert [decoder.logits(index) for index in (-1, 0, 3)] == [None] * 3


def test_a_failed_ubatch_is_rolled_back_before_its_outputs_are_dropped() -> None:  # D-16
    decoder, order = small_decoder("kv"), list[str]()
    cache = decoder.parts.full
    assert cache is not None
    forget, roll_back = decoder._forget, cache[0].roll_back

    def told(name: str, work: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            order.append(name)
            work(*args)

        return call

    with (
        patch.object(decoder, "_forget", told("forget", forget)),
        patch.object(cache[0], "roll_back", told("roll back", roll_back)),
        pytest.raises(Aborted),
    ):
        decoder.decode(batch_of({0: text(2)}), abort=lasting(1))
    assert order == ["roll back", "forget"]


@every_kind
def test_a_batch_without_outputs_runs_and_publishes_nothing(kind: Kind) -> None:  # D-18
    decoder = small_decoder(kind)
    decoded = decoder.decode(batch_of({0: text(6)}, output=False))
    assert (decoded.n_outputs, set(decoded.ids)) == (0, {None})
    assert decoder.logits(-1) is None
    decoder.decode(batch_of({0: [5]}))
    assert_close(decoder.logits(0), plain_memory.logits(model_of(kind)[0], [*text(6), 5])[6], "the next token")


def test_every_reader_waits_for_the_run_to_end() -> None:  # D-19
    decoder, waits = small_decoder("kv", embeddings=True), list[None]()
    with patch.object(decoder.outputs, "_synchronize", lambda: waits.append(None)):
        decoder.decode(batch_of({0: text(3)}))
        readers: list[Callable[[], object]] = [
            lambda: decoder.logits(0),
            lambda: decoder.embedding(0),
            decoder.reorder,
            decoder.outputs.all_logits,
            decoder.outputs.all_embeddings,
            decoder.outputs.sampled_tokens,
        ]
        for read in readers:
            before = len(waits)
            read()
            assert len(waits) > before


def test_rows_follow_those_of_the_ubatches_before() -> None:  # D-15
    decoder = small_decoder("kv", n_ubatch=2)
    starts = list[int]()
    write = decoder.outputs.write_logits

    def watched(first_row: int, rows: Tensor) -> None:
        starts.append(first_row)
        write(first_row, rows)

    flags = [1, 0, 1, 1, 0, 0, 1]
    with patch.object(decoder.outputs, "write_logits", watched):
        decoder.decode(Batch(token=text(7), output=flags))
    assert starts == [0, 1, 3]  # ubatches of 1, 2, 0 and 1 outputs; the third writes nothing (CX-7)
    plain = plain_memory.logits(model_of("kv")[0], text(7))
    for index in np.flatnonzero(flags):
        assert_close(decoder.logits(int(index)), plain[index], f"token {index}")


# One at a time, and all or nothing


@every_kind
def test_a_decode_inside_another_is_an_error_and_does_no_harm(kind: Kind) -> None:  # D-20
    decoder = small_decoder(kind)
    decoder.decode(batch_of({0: text(3)}))
    before = decoder.save_all()

    def greedy_for_more() -> bool:
        decoder.decode(batch_of({1: text(1)}))
        return False

    with pytest.raises(InternalError, match="inside another"):
        decoder.decode(batch_of({0: [1]}), abort=greedy_for_more)
    assert decoder.save_all() == before
    decoder.decode(batch_of({0: [5]}))
    assert_close(decoder.logits(0), plain_memory.logits(model_of(kind)[0], [*text(3), 5])[3], "the next token")


@every_kind
def test_after_an_abort_the_rest_of_the_batch_goes_on_where_it_stopped(kind: Kind) -> None:  # D-22, G-4
    decoder = small_decoder(kind, n_ubatch=2)
    tokens = text(8)
    questions = [0]

    def count() -> bool:
        questions[0] += 1
        return False

    small_decoder(kind, n_ubatch=2).decode(batch_of({0: tokens}), abort=count)
    with pytest.raises(Aborted) as stopped:
        decoder.decode(batch_of({0: tokens}), abort=lasting(questions[0] - 1))  # in the last of four ubatches
    assert (stopped.value.code, stopped.value.reason) == (2, "abort")
    assert decoder.memory.pos_max(0) == 5
    with pytest.raises(InvalidBatch) as refused:
        decoder.decode(Batch(token=tokens, pos=range(8)))
    assert (refused.value.reason, refused.value.index) == ("pos_memory_gap", 0)
    decoder.decode(Batch(token=tokens[6:], pos=[6, 7], output=[1, 1]))
    plain = plain_memory.logits(model_of(kind)[0], tokens)
    for k in range(2):
        assert_close(decoder.logits(k), plain[6 + k], f"token {6 + k}")


@every_kind
def test_an_abort_stops_the_run_within_a_layer(kind: Kind) -> None:
    """Every layer asks before it looks at memory; once the signal is given, not an op is run."""
    decoder, faults = small_decoder(kind), model_of(kind)[1]
    decoder.decode(batch_of({0: text(2)}))
    for n in range(1, 1 + model_of(kind)[0].shape.n_layers):
        asked, late = list[bool](), list[None]()

        def signal(n: int = n, asked: list[bool] = asked) -> bool:
            asked.append(len(asked) >= n)
            return asked[-1]

        def watch(asked: list[bool] = asked, late: list[None] = late) -> None:
            if any(asked):
                late.append(None)

        with patch.object(faults, "watch", watch), pytest.raises(Aborted):
            decoder.decode(batch_of({0: [1]}), abort=signal)
        assert asked == [False] * n + [True], "no layer asks again after the signal"
        assert not late
        assert decoder.memory.pos_max(0) == 1


# Room


class Cramped(Coordinator):
    """A cache that finds no room at first, and can perhaps make some."""

    def __init__(self, cache: KVCache, *, n_failures: int, can_compact: bool) -> None:
        super().__init__(cache)
        self.n_failures, self.can_compact = n_failures, can_compact
        self.asked: list[str] = []

    def prepare_batch(self, splitter: Splitter, n_ubatch: int, all_outputs: bool) -> PreparedBatch:
        self.asked.append("prepare")
        if self.asked.count("prepare") <= self.n_failures:
            return failed()
        return super().prepare_batch(splitter, n_ubatch, all_outputs)

    def prepare_update(self, optimise: bool) -> Status:
        self.asked += ["optimise"] if optimise else []
        return Status.SUCCESS if optimise and self.can_compact else super().prepare_update(optimise)

    def apply_update(self) -> None:
        self.asked.append("compact")


def cramped(n_failures: int, can_compact: bool) -> tuple[Decoder, Cramped]:
    decoder = small_decoder("kv")
    assert decoder.parts.full is not None
    memory = Cramped(decoder.parts.full[0], n_failures=n_failures, can_compact=can_compact)
    decoder._parts = replace(decoder.parts, memory=memory)
    return decoder, memory


def test_memory_that_can_make_room_is_asked_once_and_tried_again() -> None:  # D-12
    decoder, memory = cramped(1, can_compact=True)
    decoder.decode(batch_of({0: text(3)}))
    assert memory.asked == ["prepare", "optimise", "compact", "prepare"]
    assert_close(decoder.logits(2), plain_memory.logits(model_of("kv")[0], text(3))[2], "the last token")


@pytest.mark.parametrize(
    ("can_compact", "asked"),
    [(True, ["prepare", "optimise", "compact", "prepare"]), (False, ["prepare", "optimise"])],
)
def test_without_room_after_that_there_is_no_slot(can_compact: bool, asked: list[str]) -> None:  # D-12
    decoder, memory = cramped(9, can_compact)
    with pytest.raises(NoSlot):
        decoder.decode(batch_of({0: text(3)}))
    assert memory.asked == asked
    assert memory.pos_max(0) is None


def test_graphs_from_before_memory_was_compacted_are_not_used_again() -> None:  # UP-8
    decoder, memory = cramped(0, can_compact=True)
    for _ in range(2):
        decoder.decode(batch_of({0: [1]}))
    assert (decoder.counters["reserved"], decoder.counters["reused"]) == (1, 1)
    memory.n_failures = 3
    decoder.decode(batch_of({0: [1]}))
    assert memory.asked[-3:] == ["optimise", "compact", "prepare"]
    assert (decoder.counters["reserved"], decoder.counters["reused"]) == (2, 1)


# Samplers


class Diary:
    """Always the largest logit; writes down what happens to it, and counts what it has seen."""

    supported = True

    def __init__(self, wrote: list[str]) -> None:
        self.wrote, self.n_seen = wrote, 0

    def begin(self) -> None:
        self.wrote.append("begin")

    def apply(self, logits: Tensor) -> Sampled:
        self.wrote.append("apply")
        self.n_seen += 1
        return Sampled(token=int(logits.argmax()))

    def snapshot(self) -> int:
        return self.n_seen

    def restore(self, snapshot: int) -> None:
        self.n_seen = snapshot


def test_samplers_are_told_of_a_batch_once_after_rows_are_reserved_and_before_anything_runs() -> None:  # D-14
    decoder, wrote = small_decoder("kv", n_ubatch=2), list[str]()
    for s in (0, 1):
        assert decoder.register(s, Diary(wrote))
    outputs, execute = decoder.outputs, decoder._ubatches.execute
    reserve = outputs.reserve

    def reserving(*args: Any, **kwargs: Any) -> Any:
        wrote.append("reserve")
        return reserve(*args, **kwargs)

    def running(*args: Any, **kwargs: Any) -> Any:
        wrote.append("run")
        return execute(*args, **kwargs)

    with patch.object(outputs, "reserve", reserving), patch.object(decoder._ubatches, "execute", running):
        decoder.decode(batch_of({0: text(2), 1: text(2)}))
    assert wrote == ["reserve", "begin", "begin", "run", "apply", "apply", "run", "apply", "apply"]


def test_a_sampler_sees_a_whole_batch_or_nothing_of_it() -> None:  # SR-11, D-10
    decoder, sampler = small_decoder("kv", n_ubatch=2), Diary([])
    decoder.register(0, sampler)
    decoder.decode(batch_of({0: text(2)}))
    assert sampler.n_seen == 2
    with pytest.raises(Aborted):
        decoder.decode(batch_of({0: text(4)}), abort=lasting(4))
    assert sampler.wrote == ["begin", "apply", "apply", "begin", "apply", "apply"]
    assert sampler.n_seen == 2
    with pytest.raises(InvalidBatch):
        decoder.decode(Batch(token=[N_VOCAB]))
    assert sampler.wrote.count("begin") == 2


# Graphs


@every_kind
def test_a_second_batch_of_the_same_class_reserves_nothing_and_builds_no_graph(kind: Kind) -> None:  # GS-1, GS-2
    model, unified = model_of(kind)[0], not kind.endswith("-streams")
    decoder = Decoder(model, n_ctx=256, n_seq_max=2, n_ubatch=8, unified=unified)
    decoder.decode(batch_of({0: text(5), 1: text(5)}))
    decoder.decode(batch_of({0: [1], 1: [2]}))
    before = dict(decoder.counters)
    assert before["reserved"] == 1
    for n in range(1, 5):
        decoder.decode(batch_of({0: [n], 1: [n]}))
        assert decoder.counters == {**before, "reused": before["reused"] + n}


def test_a_shift_of_positions_voids_graphs_and_reservation() -> None:  # UP-8, GS-3
    decoder = small_decoder("kv")
    decoder.decode(batch_of({0: [1]}))
    decoder.memory.seq_add(0, None, None, 3)
    decoder.decode(batch_of({0: [1]}))
    assert decoder.counters == {"reserved": 2, "built": 2, "reused": 0, "rolled_back": 0}


def test_a_failed_run_voids_its_graph() -> None:  # GS-3
    decoder = small_decoder("kv")
    decoder.decode(batch_of({0: [1]}))
    with pytest.raises(Aborted):
        decoder.decode(batch_of({0: [1]}), abort=lambda: True)
    decoder.decode(batch_of({0: [1]}))
    assert decoder.counters == {"reserved": 1, "built": 2, "reused": 1, "rolled_back": 1}


def test_every_graph_uses_the_buffers_that_were_reserved_for_the_worst_case() -> None:  # GS-1
    decoder = small_decoder("kv", cells=64)

    def places() -> set[int]:
        assert decoder._graphs._stored is not None
        graph = decoder._graphs._stored[1]
        return {graph.tokens.data_ptr(), graph.positions.data_ptr(), graph.output_rows.data_ptr()}

    found = set()
    for n in (1, 5, 3):
        decoder.decode(batch_of({n: text(n)}))
        found |= places()
    assert decoder._graphs.n_built > 1
    assert len(found) == 3, "three buffers, at the same addresses for every shape"
