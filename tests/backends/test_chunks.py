"""Chunks of every backend: rows of several sequences side by side have the bits that they have alone, and outputs of
every kind are near those of dense weights.

The oracle is the decoder's own flow over dense weights.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.backends.base import ChunkOutput, ChunkPart, ChunkWant, OutputKind, output_rows
from ostinato.backends.cuda.chunks import FusedChunks
from ostinato.backends.cuda.kernels import triton_kernels
from ostinato.backends.machine import TUNED
from ostinato.backends.native.pages import NativePages
from ostinato.backends.torch.kernels import twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.plan import memory_tensors
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.decoder import Decoder
from ostinato.errors import InternalError
from ostinato.options import KVType
from tests.backends.families import FAMILIES, LATENT, family_model
from tests.engine.rig import DEADLINE_S, Driver, open_loop
from tests.random_model import random_model

pytestmark = pytest.mark.slow

TOP, ROWS = 5, 64
KINDS = get_args(OutputKind)


@dataclass(frozen=True, slots=True)
class Text:
    """A sequence, its pages, and the slot that it has."""

    ids: tuple[int, ...]
    pages: tuple[int, ...]
    slot: int | None

    def part(self, start: int, stop: int, outputs: Sequence[int] = ()) -> ChunkPart:
        return ChunkPart(self.ids[start:stop], start, [self.pages], self.slot, outputs)


def texts_of(vocab: int, lengths: Sequence[int], *, seed: int, slots: bool) -> list[Text]:
    """Texts of these lengths, on pages in no order."""
    chance = random.Random(seed)
    pages = chance.sample(range(60), 60)
    texts = []
    for number, n in enumerate(lengths):
        own = tuple(pages.pop() for _ in range(-(-n // 16)))
        ids = tuple(chance.randrange(vocab) for _ in range(n))
        texts.append(Text(ids, own, number if slots or number % 2 else None))
    return texts


def run(driver: Driver, parts: Sequence[ChunkPart], want: ChunkWant | None = None) -> ChunkOutput:
    """A chunk as work beside the loop."""
    found = []
    parts = [
        replace(part, page_tables=driver.tables(part.page_tables[0])) for part in parts
    ]  # the same pages in every layer
    driver.runner.beside(lambda: found.append(driver.runner.chunks.run(parts, ROWS, want))).result(DEADLINE_S)
    return found[0]


def want_of(kind: OutputKind, parts: Sequence[ChunkPart], vocab: int) -> ChunkWant:
    """Everything of a kind; each row's target is drawn from where it is."""
    targets = [(7 * part.start + 3 * row) % vocab for part in parts for row in part.outputs]
    return ChunkWant(kind, targets if kind == "logprobs" else (), TOP, vocab - 3)


def arrays(output: ChunkOutput) -> list[np.ndarray]:
    every = (output.hidden, output.logits, output.logprobs, output.top_ids, output.top_logprobs)
    return [array for array in every if array is not None]


def memory_arrays(driver: Driver) -> list[np.ndarray]:
    """What lies in pages and states, as arrays over the same memory."""
    memory = driver.runner.memory
    if isinstance(memory, NativePages):
        return [getattr(layer, field.name) for layer in memory.layers.values() for field in fields(layer)]
    return [tensor.view(torch.uint8).numpy() for _, tensor in memory_tensors(memory)]


def memory_of(driver: Driver) -> list[np.ndarray]:
    return [array.copy() for array in memory_arrays(driver)]


def chunks_of(texts: Sequence[Text]) -> list[list[ChunkPart]]:
    """Chunks of random parts of random texts, until every text is through; every row is asked for, or some are."""
    chance = random.Random(len(texts))
    done, chunks = [0] * len(texts), []
    while any(n < len(text.ids) for n, text in zip(done, texts, strict=True)):
        room, parts = ROWS, []
        for number in chance.sample(range(len(texts)), len(texts)):
            left = min(room, len(texts[number].ids) - done[number])
            if left and chance.random() < 0.8:
                n = chance.randint(1, left)
                asked = chance.choice([range(n), (n - 1,), (), sorted(chance.sample(range(n), n // 2))])
                parts.append(texts[number].part(done[number], done[number] + n, list(asked)))
                done[number] += n
                room -= n
        chunks += [parts] if parts else []
    return chunks


def check_bits(driver: Driver, chunks: Sequence[list[ChunkPart]], kinds: Sequence[OutputKind]) -> None:
    """The same chunks with all parts side by side, and each part in a chunk of its own."""
    vocab = driver.runner.model.shape.vocab
    for kind in kinds:
        together, alone = [], []
        for parts in chunks:
            found = arrays(run(driver, parts, want_of(kind, parts, vocab)))
            together.append(found)
        filled = memory_of(driver)
        for array in memory_arrays(driver):
            array.fill(0)
        for parts in chunks:
            each = [arrays(run(driver, [part], want_of(kind, [part], vocab))) for part in parts]
            alone.append([np.concatenate(rows) for rows in zip(*each, strict=True)])
        assert all(np.array_equal(one, two) for one, two in zip(filled, memory_of(driver), strict=True))
        for one, two in zip(together, alone, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


LENGTHS = (37, 1, 90, 16, 5, 33)


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3moe"])
def test_rows_beside_others_have_the_bits_they_have_alone_natively(family: str, kv_type: KVType) -> None:
    model = family_model(family)
    for threads in (1, 3):
        with closing(open_loop(model=model, n_slots=6, kv_type=kv_type, threads=threads)) as driver:
            check_bits(driver, chunks_of(texts_of(model.shape.vocab, LENGTHS, seed=threads, slots=False)), KINDS)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3moe"])
def test_rows_beside_others_have_the_bits_they_have_alone_by_torch(family: str) -> None:
    model = family_model(family)
    with closing(open_loop(model=model, mode="twin", n_slots=6)) as driver:
        check_bits(driver, chunks_of(texts_of(model.shape.vocab, LENGTHS, seed=3, slots=False)), KINDS)


def fused(driver: Driver, *, triton: bool, buckets: Sequence[int] = (16, ROWS)) -> None:
    """Chunks as a GPU has them, by Triton's interpreter or by the twins."""
    runner = driver.runner
    kernels = triton_kernels(TUNED) if triton else twin_kernels()
    given = (runner.model, runner.memory, runner.tables, runner.model.shape.vocab, kernels)
    runner.chunks = FusedChunks(*given, buckets=buckets)


def row_by_row(a: np.ndarray, b: np.ndarray, dtype: np.dtype[Any] | None = None) -> np.ndarray:
    """What Triton's interpreter multiplies by, where a row's bits do not depend on how many there are: a tensor core's
    do not, and those of a BLAS do on some CPUs."""
    return np.stack([np.einsum("k,kn->n", row, b, dtype=dtype) for row in a])


@pytest.mark.parametrize("kind", [pytest.param("hidden", marks=pytest.mark.slow), "logprobs"])
def test_rows_beside_others_have_the_bits_they_have_alone_by_kernels(
    kind: OutputKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone they go in another bucket; logits go in slices of two rows."""
    model = random_model("kv")
    monkeypatch.setattr("triton.runtime.interpreter.np.matmul", row_by_row)
    monkeypatch.setattr("ostinato.backends.base.LOGITS_BYTES", 2 * 4 * model.shape.vocab)
    with closing(open_loop(model=model, mode="twin", n_slots=6)) as driver:
        fused(driver, triton=True, buckets=(4, 8, 16))
        texts = texts_of(model.shape.vocab, (7, 1, 17), seed=6, slots=False)
        chunks = [
            [texts[0].part(0, 5, [1, 4]), texts[2].part(0, 10)],
            [texts[2].part(10, 17, [3]), texts[1].part(0, 1, [0]), texts[0].part(5, 7, [0])],
        ]
        check_bits(driver, chunks, [kind])


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_states_advance_beside_others_as_they_do_alone(kind: str) -> None:
    model = random_model(kind)  # type: ignore[arg-type]
    with closing(open_loop(model=model, mode="twin", n_slots=6)) as driver:
        check_bits(driver, chunks_of(texts_of(model.shape.vocab, LENGTHS, seed=4, slots=True)), KINDS)
        with pytest.raises(InternalError, match="without a slot"):
            run(driver, [ChunkPart([1, 2], 0, [[0]])])


# Near the oracle


def forward(model: Model, ids: Sequence[int]) -> Tensor:
    """Logits after each id, by one forward of the decoder's own flow."""
    decoder = Decoder(model, n_ctx=len(ids), n_batch=256, n_ubatch=256)
    decoder.decode(Batch(token=list(ids), output=[1] * len(ids)))
    return torch.stack([torch.as_tensor(decoder.logits(i)) for i in range(len(ids))])


def check_outputs(driver: Driver, model: Model, tolerance: float) -> None:
    vocab = model.shape.vocab
    texts = texts_of(vocab, (30, 9, 1, 24), seed=8, slots=True)
    parts = [text.part(0, len(text.ids), range(0, len(text.ids), 1 + i % 2)) for i, text in enumerate(texts)]
    parts = [replace(part, rope_set=model.shape.rope_set(len(part.tokens))) for part in parts]
    expected = torch.cat([forward(model, part.tokens)[list(part.outputs)] for part in parts])
    scale = float(expected.abs().max())
    hidden = run(driver, parts, want_of("hidden", parts, vocab)).hidden
    logits = run(driver, parts, want_of("logits", parts, vocab)).logits
    assert hidden is not None
    assert logits is not None
    assert (model.logits(torch.from_numpy(hidden)) - expected).abs().max() < tolerance * scale
    assert (torch.from_numpy(logits) - expected).abs().max() < tolerance * scale

    want = want_of("logprobs", parts, vocab)
    told = run(driver, parts, want)
    assert told.logprobs is not None
    assert told.top_ids is not None
    assert told.top_logprobs is not None
    # Of the same logits, so that ties are the same ones.
    own = torch.from_numpy(logits).double().log_softmax(-1)
    np.testing.assert_allclose(told.logprobs, own.gather(-1, torch.tensor(want.targets)[:, None])[:, 0], atol=2e-5)
    best, ids = own[:, : vocab - 3].sort(dim=-1, descending=True, stable=True)
    np.testing.assert_array_equal(told.top_ids, ids[:, :TOP])
    np.testing.assert_allclose(told.top_logprobs, best[:, :TOP], atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES + LATENT)
@pytest.mark.parametrize("mode", ["loop", "twin"])
def test_outputs_are_near_those_of_dense_weights(family: str, mode: str) -> None:
    model = family_model(family)
    with closing(open_loop(model=model, mode=mode)) as driver:
        check_outputs(driver, model, 1e-3)


@pytest.mark.parametrize("family", FAMILIES + LATENT)
def test_fused_chunks_of_twins_are_near_dense_weights(family: str) -> None:
    model = family_model(family)
    with closing(open_loop(model=model, mode="twin")) as driver:
        fused(driver, triton=False)
        check_outputs(driver, model, 1e-3)


def test_log_probabilities_are_of_slices_whose_logits_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows of logits at once, for 60 rows of log-probabilities; logits themselves are refused."""
    model = random_model("kv")
    monkeypatch.setattr("ostinato.backends.base.LOGITS_BYTES", 5 * 4 * model.shape.vocab)
    for mode in ("loop", "twin"):
        with closing(open_loop(model=model, mode=mode)) as driver:
            assert driver.runner.chunks.max_outputs == 5
            part = texts_of(model.shape.vocab, (60,), seed=9, slots=True)[0].part(0, 60, list(range(60)))
            found = run(driver, [part], want_of("logprobs", [part], model.shape.vocab)).logprobs
            logits = forward(model, part.tokens).log_softmax(-1)
            targets = torch.tensor(want_of("logprobs", [part], model.shape.vocab).targets)
            assert found is not None
            np.testing.assert_allclose(found, logits.gather(-1, targets[:, None])[:, 0], atol=5e-3)
            with pytest.raises(InternalError, match="logits of 60 rows"):
                run(driver, [part], ChunkWant("logits"))


def test_what_cannot_be_given_is_refused() -> None:
    part = ChunkPart([1, 2, 3], 0, [[0]], outputs=[0, 2])
    for parts, want in (
        ([part], None),
        ([ChunkPart([1], 0, [[0]], outputs=[1])], ChunkWant("hidden")),
        ([part], ChunkWant("logprobs", [5])),
        ([part], ChunkWant("logprobs", [5, 100])),
        ([part], ChunkWant("logprobs", [5, 6], top=8, n_tokens=7)),
        ([part], ChunkWant("logits")),
    ):
        with pytest.raises(InternalError):
            output_rows(parts, want, 1, 100)


# The last row of a part is where its first token is sampled from


@pytest.mark.parametrize("mode", ["loop", "twin"])
def test_prompts_in_one_chunk_go_on_as_they_do_alone(mode: str) -> None:
    model = random_model("kv")
    texts = texts_of(model.shape.vocab, (11, 20, 3), seed=5, slots=True)
    told = []
    for together in (False, True):
        with closing(open_loop(model=model, mode=mode)) as driver:
            generations = []
            for slot, text in enumerate(texts):
                driver.prefill = lambda *_, **__: None  # type: ignore[method-assign]  # by hand, below
                if not together:
                    run(driver, [text.part(0, len(text.ids))])
                elif slot == 0:
                    run(driver, [each.part(0, len(each.ids)) for each in texts])
                pages = (*text.pages, 60 + slot)
                generations.append(driver.admit(slot, text.ids, most=6, pages=pages))
            driver.run()
            told.append([driver.tokens(generation) for generation in generations])
    assert told[0] == told[1]
    assert all(len(tokens) == 6 for tokens in told[0])
