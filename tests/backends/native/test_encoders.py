"""Encoders in the native loop: the rows of torch's blocks, and bits that depend on a text alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from ostinato.backends.base import CHUNK_ROWS, ChunkPart, ChunkWant
from ostinato.backends.native.cpu_levels import architecture, levels_of
from ostinato.backends.native.library import chosen_level
from ostinato.backends.native.tiles import TileMatrix
from ostinato.backends.torch.model import Model
from ostinato.engine.choose import settle_model
from ostinato.engine.engine import Engine
from ostinato.engine.texts import logits_of, vectors_of
from ostinato.engine.work import WorkSpec, WorkText
from ostinato.errors import InternalError, PromptTooLong, Unsupported
from ostinato.files.unpack import Floats
from ostinato.models.bert import BERT, NOMIC_BERT
from ostinato.models.rope import Rope
from ostinato.options import Activations, KVType
from tests.backends.native.test_loop import at_level
from tests.backends.native.tiled import plain_tiles, tiled
from tests.engine.opened import sampling
from tests.engine.test_work import chunks_of
from tests.models import plain_memory
from tests.random_model import RandomWeights, shape_of

LENGTHS = (1, 2, 3, 16, 17, 100, 255, 256, 257, 600)  # few rows, whole pages, whole blocks, and one more
VOCAB = 128


def text_of(n: int, seed: int = 0) -> list[int]:
    return [(11 * i + n + 31 * seed) % VOCAB for i in range(n)]


def encoder(family: str = "bert", *, hidden: int = 128, context: int = 1024) -> Model:
    _, shape = shape_of("encoder", VOCAB, hidden, context)
    if family == "bert":
        return RandomWeights(0).model(BERT, shape)
    rope = Rope(1000.0, hidden // 4, "halves")
    shape = shape.with_attention(rope=rope)
    nomic = replace(shape, family=family, activation="silu", attention_bias=False, mlp_bias=False)
    return RandomWeights(1).model(NOMIC_BERT, nomic)


def opened(
    model: Model, *, threads: int = 2, context: int = 1024, n_pages: int = 80, kv_type: KVType = "f32"
) -> Engine:
    assert isinstance(model.embedding, TileMatrix)
    activations: Activations = "wide" if model.embedding.wide else "int8"
    settled = settle_model(
        model, context=context, n_pages=n_pages, kv_type=kv_type, threads=threads, activations=activations
    )
    assert (settled.mode, settled.backend, settled.fallback) == ("loop", "native", None)
    return Engine(model, settled)


def rows_of(engine: Engine, texts: Sequence[Sequence[int]]) -> list[Floats]:
    """All hidden rows of each text, which come at once."""
    found: dict[int, Floats] = {}
    for number, output in engine.work(WorkSpec([WorkText(ids, range(len(ids))) for ids in texts], "hidden")):
        assert number not in found
        assert output.hidden is not None
        found[number] = output.hidden
    return [found[number] for number in range(len(texts))]


# The same rows


@pytest.mark.parametrize("hidden", [64, 128, 256])
@pytest.mark.parametrize("family", ["bert", "nomic-bert"])
def test_rows_are_those_of_torch_at_every_head_width_and_length(family: str, hidden: int) -> None:
    model = encoder(family, hidden=hidden)
    texts = [text_of(n) for n in LENGTHS]
    with opened(tiled(model)) as engine:
        found = rows_of(engine, texts)
        assert engine.stats().pages_leased == 0
    for ids, rows in zip(texts, found, strict=True):
        wanted = plain_memory.hidden(model, ids)
        assert float((torch.from_numpy(rows) - wanted).norm() / wanted.norm()) < 1e-3


def test_rows_and_feed_forward_blocks_of_odd_widths() -> None:
    shape = replace(encoder(hidden=77).shape, activation="gelu_tanh").with_layers(ff_width=83)
    model = RandomWeights(0).model(BERT, shape.with_attention(head_width=48, value_width=48))
    with opened(tiled(model), threads=3) as engine:
        (rows,) = rows_of(engine, [text_of(40)])
    wanted = plain_memory.hidden(model, text_of(40))
    assert float((torch.from_numpy(rows) - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0"])
def test_every_type_of_keys_and_values_is_near(kv_type: KVType) -> None:
    model, ids = encoder(), text_of(90)
    with opened(tiled(model), kv_type=kv_type) as engine:
        (rows,) = rows_of(engine, [ids])
    wanted = plain_memory.hidden(model, ids)
    assert float((torch.from_numpy(rows) - wanted).norm() / wanted.norm()) < 0.03


def test_segments_are_added_and_are_of_the_first_text_unless_said() -> None:
    model, ids = encoder(), text_of(20)
    segments = [0] * 7 + [1] * 13
    with opened(tiled(model)) as engine:
        mixed = [WorkText(ids, range(20), segments=segments), WorkText(ids, range(20))]
        outputs = [rows.output.hidden for rows in engine.work(WorkSpec(mixed, "hidden"))]
        with pytest.raises(InternalError, match="segments up to 2"):
            list(engine.work(WorkSpec([WorkText(ids, range(20), segments=[2] * 20)], "hidden")))
    for rows, types in zip(outputs, (segments, [0] * 20), strict=True):
        assert rows is not None
        wanted = plain_memory.hidden(model, ids, types=types)
        assert float((torch.from_numpy(rows) - wanted).norm() / wanted.norm()) < 1e-3


# Bits


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "nomic-bert"])
@pytest.mark.parametrize("wide", [True, False])
def test_bits_do_not_depend_on_threads_or_on_the_texts_beside(family: str, wide: bool) -> None:
    model = tiled(encoder(family), plain_tiles(wide=wide))
    texts = [text_of(n, seed) for seed, n in enumerate((*LENGTHS, 5, 5, 40, 1, 80, 300, 2))]
    with opened(model, threads=1) as engine:
        alone = [rows_of(engine, [text])[0] for text in texts]
    for threads in (1, 2, 3):
        with opened(model, threads=threads) as engine:
            for number, rows in enumerate(rows_of(engine, texts)):
                np.testing.assert_array_equal(rows, alone[number], f"text {number}, {threads} threads")
            for number, rows in enumerate(reversed(rows_of(engine, texts[::-1]))):
                np.testing.assert_array_equal(rows, alone[number], f"text {number} backwards, {threads} threads")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "nomic-bert"])
@pytest.mark.parametrize("level", [level.name for level in levels_of(architecture())[1:3]])
def test_bits_do_not_depend_on_the_level_of_the_cpu(family: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = tiled(encoder(family)), [text_of(n) for n in LENGTHS]
    with opened(model) as engine:
        expected = rows_of(engine, texts)
    with at_level(level, monkeypatch):
        assert chosen_level().name == level
        with opened(model) as engine:
            found = rows_of(engine, texts)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


# Whole texts


def test_short_texts_share_chunks_and_none_is_cut() -> None:
    texts = [text_of(n, seed) for seed, n in enumerate((100, 100, 100, 700, 8, 8, 8) * 3)]
    with opened(tiled(encoder())) as engine:
        chunks = chunks_of(engine)
        short = [text for text in texts if len(text) < 200]
        vectors_of(engine, short, "mean")
        assert [sum(len(part.tokens) for part in parts) for parts in chunks] == [200, 224, 224, 200, 124]
        chunks.clear()
        vectors_of(engine, texts, "cls")
        assert all(part.start == 0 for parts in chunks for part in parts)
        assert sorted(len(part.tokens) for parts in chunks for part in parts) == sorted(map(len, texts))


def test_where_pages_are_few_a_chunk_holds_fewer_texts() -> None:
    texts = [text_of(n, n) for n in (20, 60, 64, 3, 33, 64, 1, 17)]
    model = tiled(encoder())
    with opened(model, context=64, n_pages=4) as engine, opened(model, context=64, n_pages=64) as roomy:
        np.testing.assert_array_equal(vectors_of(engine, texts, "mean"), vectors_of(roomy, texts, "mean"))
        assert engine.runner.chunks.rows == CHUNK_ROWS["cpu"]
        with pytest.raises(PromptTooLong, match="65 tokens and the context holds 64"):
            vectors_of(engine, [text_of(65)], "mean")


def test_a_text_that_was_cut_would_be_refused() -> None:
    with opened(tiled(encoder())) as engine:
        part = ChunkPart(text_of(8), 8, [[0, 1]], outputs=range(8))
        with pytest.raises(InternalError, match="cut at 8"):
            engine.runner.chunks.run([part], 8, ChunkWant("hidden"))


def test_rows_behind_the_last_learned_position_are_refused() -> None:
    with opened(tiled(encoder(context=40)), context=40) as engine:
        part = ChunkPart(text_of(41), 0, [[0, 1, 2]], outputs=range(41))
        with pytest.raises(InternalError, match="there are 40 positions"):
            engine.runner.chunks.run([part], 41, ChunkWant("hidden"))


def test_an_engine_of_an_encoder_generates_nothing() -> None:
    with opened(tiled(encoder())) as engine:
        with pytest.raises(Unsupported, match="bert is an encoder: it embeds text and generates none"):
            engine.submit(text_of(4), sampling(max_tokens=2))
        with pytest.raises(Unsupported, match="encoder"):
            logits_of(engine, text_of(4))
