"""Work beside answers: rows of texts, batched, ordered among requests, and with one end whatever happens."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ostinato.backends.base import ChunkPart
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.decoder import Decoder
from ostinato.engine.choose import settle_model
from ostinato.engine.engine import Engine
from ostinato.engine.texts import logits_of, logprobs_of, vectors_of
from ostinato.engine.work import WorkSpec, WorkText
from ostinato.errors import BadInput, BadOption, EngineDead, PromptTooLong
from ostinato.files.unpack import Floats
from tests.backends.families import VOCAB, family_model
from tests.engine.opened import DEADLINE_S, LONG, Gate, alone, bits, decoding, open_engine, prompt, sampling, until
from tests.random_model import MemoryKind

KINDS: tuple[MemoryKind, ...] = ("kv", "swa", "all swa", "recurrent", "hybrid")
SHORT = sampling(max_tokens=5)
TEXTS = [prompt(seed, n) for seed, n in ((1, 30), (2, 3), (3, 100), (4, 17), (5, 64), (6, 2), (7, 200))]


def chunks_of(engine: Engine) -> list[list[ChunkPart]]:
    """The parts of every chunk from now on."""
    told: list[list[ChunkPart]] = []
    run = engine.runner.chunks.run

    def noted(parts: Sequence[ChunkPart], *rest: Any) -> Any:
        told.append(list(parts))
        return run(parts, *rest)

    engine.runner.chunks.run = noted  # type: ignore[method-assign, assignment]  # listens
    return told


def by_cells(engine: Engine, ids: list[int]) -> tuple[Floats, Floats]:
    """Logits and hidden rows of the same tokens through the cell kind."""
    decoder = Decoder(engine.runner.plain_model, n_ctx=256, embeddings=True)
    decoder.decode(Batch(token=ids))
    logits = decoder.outputs.all_logits().value
    rows = [decoder.embedding(i) for i in range(len(ids))]
    assert logits is not None
    return logits.numpy().copy(), np.stack([row.numpy() for row in rows if row is not None])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["eager", "loop"])
def test_rows_are_those_of_the_decoder(kind: MemoryKind, mode: str) -> None:
    with open_engine(kind, mode=mode) as engine:
        wanted = [by_cells(engine, ids) for ids in TEXTS]
        found = logprobs_of(engine, TEXTS, top=3)
        for ids, told, (logits, _) in zip(TEXTS, found, wanted, strict=True):
            np.testing.assert_allclose(logits_of(engine, ids), logits, atol=1e-3)
            rows = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
            np.testing.assert_allclose(told.logprobs, [rows[i, ids[i + 1]] for i in range(len(ids) - 1)], atol=1e-3)
            np.testing.assert_allclose(told.top_logprobs, -np.sort(-rows[:-1])[:, :3], atol=1e-3)
        for pooling in ("mean", "cls", "last"):
            for vector, (_, hidden) in zip(vectors_of(engine, TEXTS, pooling), wanted, strict=True):
                pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
                np.testing.assert_allclose(vector, pooled, atol=1e-3)
        assert engine.stats().pages_leased == 0


def test_texts_have_the_bits_that_they_have_alone_and_go_in_few_chunks() -> None:
    texts = [prompt(seed, 100) for seed in range(64)]
    with open_engine() as engine:
        chunks = chunks_of(engine)
        together = vectors_of(engine, texts, "mean")
        assert len(chunks) == 25  # of 256 rows
        assert all(sum(len(part.tokens) for part in parts) == 256 for parts in chunks)
        np.testing.assert_array_equal(together[:5], [vectors_of(engine, [text], "mean")[0] for text in texts[:5]])


def test_logits_of_many_rows_come_in_chunks_of_few_outputs() -> None:
    with open_engine() as engine:
        ids = prompt(1, 90)
        whole = logits_of(engine, ids)
        engine.runner.chunks.max_outputs = 7
        chunks = chunks_of(engine)
        np.testing.assert_array_equal(logits_of(engine, ids), whole)
        assert [len(part.outputs) for parts in chunks for part in parts] == [*[7] * 12, 6]


@pytest.mark.slow
@pytest.mark.parametrize("vocab_rows", [50, 100, 1000])
@pytest.mark.parametrize("family", ["qwen35", "mamba2", "lfm2"])
def test_eager_cuts_a_recurrent_text_at_the_same_positions_whatever_is_asked_and_beside_whom(
    family: str, vocab_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta nets take their rows in blocks from the cut on, and rows are not padded; `vocab_rows` of logits have room.
    The same prompt is computed again, because `eager` takes no snapshots of states."""
    monkeypatch.setattr("ostinato.backends.base.LOGITS_BYTES", vocab_rows * 4 * VOCAB)
    model, chance = family_model(family), random.Random(7)
    short, text, other = (chance.choices(range(VOCAB), k=n) for n in (90, 300, 450))
    settled = settle_model(model, "eager", context=512, n_pages=128, n_slots=3)
    with Engine(model, settled) as engine:
        cuts = chunks_of(engine)
        logits, wanted = logits_of(engine, text), sampling(max_tokens=4, logprobs=2)
        alone = bits(engine.submit(text, wanted))
        vectors = [vectors_of(engine, [ids], "last")[0] for ids in (short, text, other)]
        np.testing.assert_array_equal(vectors_of(engine, [short, text, other], "last"), vectors)
        asked = [rows.output.logits for rows in engine.work(WorkSpec([WorkText(text, range(120, 300))], "logits"))]
        np.testing.assert_array_equal(np.concatenate([rows for rows in asked if rows is not None]), logits[120:])
        together = [engine.submit(ids, wanted) for ids in (other, text, [*text, 5], short)]
        assert bits(together[1]) == alone
        assert all(request.cached_tokens == 0 for request in together)
        rows = engine.runner.chunks.rows_for(1)
        assert rows == {50: 50, 100: 64, 1000: 256}[vocab_rows]
        assert all(part.start % rows == 0 for parts in cuts for part in parts)


def test_work_and_prompts_take_turns() -> None:
    with open_engine(n_slots=2, n_pages=64) as engine:
        gate, chunks = Gate(engine), chunks_of(engine)
        work = engine.work(WorkSpec([WorkText(prompt(seed, 250), range(250)) for seed in range(8)]))
        assert gate.reached.wait(60)
        requests = [engine.submit(prompt(seed, 20), SHORT) for seed in (1, 2)]
        gate.open()
        assert sum(len(output.hidden) for _, output in work if output.hidden is not None) == 8 * 250
        assert [bits(request) for request in requests] == [alone(prompt(seed, 20), SHORT) for seed in (1, 2)]
        whose = ["work" if parts[0].slot is None else "prompt" for parts in chunks]
        assert whose == ["work", "prompt", "work", "prompt", *["work"] * 6]


def test_a_request_does_not_wait_for_the_end_of_work_where_pages_are_few() -> None:
    with open_engine(n_slots=2, n_pages=32) as engine:
        gate = Gate(engine)
        work = engine.work(WorkSpec([WorkText(prompt(seed, 250), range(250)) for seed in range(200)]))
        assert gate.reached.wait(60)
        request = engine.submit(prompt(1, 20), SHORT)
        gate.open()
        assert bits(request) == alone(prompt(1, 20), SHORT)
        assert not work.ended
        work.cancel()


@pytest.mark.parametrize("mode", ["eager", "loop"])
def test_work_needs_no_slot_and_does_not_wait_for_one(mode: str) -> None:
    with open_engine(mode=mode, n_slots=1, context=LONG, n_pages=2 * LONG // 16) as engine:
        talking = decoding(engine)
        waiting = engine.submit(prompt(1, 5), SHORT)
        assert len(vectors_of(engine, TEXTS, "mean")) == len(TEXTS)
        assert not talking.ended
        talking.cancel()
        assert bits(waiting) == alone(prompt(1, 5), SHORT, mode=mode)


def test_work_that_finds_no_pages_waits_and_keeps_its_place() -> None:
    with open_engine(n_slots=2, context=256, n_pages=16) as engine:
        gate = Gate(engine)
        large = engine.submit(prompt(1, 200), sampling(max_tokens=50))
        assert gate.reached.wait(60)
        work = engine.work(WorkSpec([WorkText(prompt(2, 250), range(249, 250))]))
        later = engine.submit(prompt(3, 5), SHORT)
        gate.open()
        assert len(bits(large)) == 50
        assert len(list(work)) == 1
        assert bits(later) == alone(prompt(3, 5), SHORT)
        assert later.prefill_began is not None
        assert engine.stats().pages_leased == 0


def test_a_text_that_fails_ends_its_own_work_and_no_other() -> None:
    with open_engine() as engine:
        run = engine.runner.chunks.run

        def fails(parts: Sequence[ChunkPart], *rest: Any) -> Any:
            if any(part.tokens[0] == 77 for part in parts):
                raise RuntimeError("no such luck")
            return run(parts, *rest)

        engine.runner.chunks.run = fails  # type: ignore[method-assign, assignment]  # fails on purpose
        with pytest.raises(Exception, match=r"text could not be computed.*no such luck"):
            vectors_of(engine, [[1, 2], [77, 2]], "mean")
        assert len(vectors_of(engine, [[1, 2]], "mean")) == 1
        assert bits(engine.submit([1, 2], SHORT)) == alone([1, 2], SHORT)
        assert engine.stats().ended == {"length": 1}
        assert engine.stats().pages_leased == 0


def test_a_caller_that_stops_reading_half_way_cancels_the_work() -> None:
    with open_engine() as engine:
        work = engine.work(WorkSpec([WorkText(prompt(seed, 250), range(250)) for seed in range(500)]))
        reading = iter(work)
        next(reading)
        reading.close()  # type: ignore[attr-defined]  # a generator's
        until(lambda: work.ended and not engine.stats().pages_leased, "it is over")


@pytest.mark.parametrize("kind", ["kv", "hybrid"])
def test_an_engine_that_closes_or_dies_leaves_no_thread_waiting(kind: MemoryKind) -> None:
    told: list[str] = []

    def ask(engine: Engine) -> None:
        try:
            vectors_of(engine, [prompt(seed, 250) for seed in range(200)], "mean")
        except (BadInput, EngineDead) as error:
            told.append(str(error))

    for end in (Engine.close, lambda engine: setattr(engine._scheduler, "_begin_chunk", None)):
        with open_engine(kind) as engine:
            gate = Gate(engine)
            threads = [threading.Thread(target=ask, args=[engine]) for _ in range(3)]
            for thread in threads:
                thread.start()
            assert gate.reached.wait(60)
            threading.Timer(0.05, gate.open).start()
            end(engine)
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
        assert engine.stats().pages_leased == 0
    assert len(told) == 6


def test_a_chunk_that_never_ends_leaves_no_caller_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine() as engine:
        gate = Gate(engine)
        work = engine.work(WorkSpec([WorkText(prompt(1, 20), range(20))]))
        assert gate.reached.wait(DEADLINE_S)
        request = engine.submit(prompt(2, 5), sampling())
        monkeypatch.setattr("ostinato.engine.scheduler.STALLED_S", 0.1)
        for reader in (work, request):
            with pytest.raises(EngineDead, match="a chunk of a prompt or text has run for"):
                list(reader)
        gate.open()


def test_what_cannot_be_computed_is_refused_before_anything_runs() -> None:
    with open_engine() as engine:
        with pytest.raises(PromptTooLong):
            logits_of(engine, [1] * 257)
        with pytest.raises(BadInput, match="empty"):
            vectors_of(engine, [[1], []], "mean")
        with pytest.raises(BadOption, match="ranking head"):
            vectors_of(engine, [[1]], "rank")
    with pytest.raises(BadInput, match="closed"):
        logits_of(engine, [1])
