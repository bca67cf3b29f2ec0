"""Rows of mixed batches are those of each sequence alone: several sequences, ragged, in any order, any n_ubatch (D-24).

And the oracle of `test_differential.py` agrees with a plain forward of the whole sequence, where nothing was done to
its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.decoder.batch.batch import Batch
from tests.counts import soak
from tests.decoder.cells.oracle import Oracle, Row
from tests.decoder.cells.rig import KINDS, N_VOCAB, Kind, assert_close, model_of, small_decoder
from tests.models import plain_memory

pytestmark = pytest.mark.slow

CELLS = 64

Texts = dict[int, tuple[int, ...]]
Place = tuple[int, int]  # a sequence and a position

texts = st.dictionaries(
    st.integers(0, 3),
    st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=14).map(tuple),
    min_size=1,
    max_size=4,
)


def stretches(texts: Texts, seed: int, *, in_turns: bool) -> Iterator[list[Place]]:
    """The tokens of all texts in batches that each hold a random stretch of some, one after the other or in turns."""
    random = Random(seed)
    at = dict.fromkeys(texts, 0)
    while any(at[s] < len(text) for s, text in texts.items()):
        taken = {s: min(random.choice([0, 1, 1, 3, 8]), len(text) - at[s]) for s, text in texts.items()}
        batch = [(s, at[s] + k) for s, n in taken.items() for k in range(n)]
        if in_turns:
            batch.sort(key=lambda place: place[1] - at[place[0]])
        if batch:
            yield batch
        at = {s: at[s] + taken[s] for s in texts}


def batch_of(texts: Texts, places: list[Place], outputs: list[bool]) -> Batch:
    tokens = [texts[s][position] for s, position in places]
    return Batch(token=tokens, seq_id=[[s] for s, _ in places], output=outputs)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=soak(400), derandomize=True, database=None, deadline=None)
@given(texts=texts, seed=st.integers(0, 1 << 16), n_ubatch=st.integers(1, 8), in_turns=st.booleans())
def test_logits_of_mixed_batches_are_those_of_each_sequence_alone(
    kind: Kind, texts: Texts, seed: int, n_ubatch: int, in_turns: bool
) -> None:
    model, random = model_of(kind)[0], Random(seed)
    plain = {s: plain_memory.logits(model, list(text)) for s, text in texts.items()}
    decoder = small_decoder(kind, cells=CELLS, n_seq_max=4, n_ubatch=n_ubatch)
    for batch in stretches(texts, seed, in_turns=in_turns):
        outputs = [random.random() < 0.8 for _ in batch]
        decoder.decode(batch_of(texts, batch, outputs))
        for index, (s, position) in enumerate(batch):
            logits = decoder.logits(index)
            assert (logits is not None) == outputs[index]
            if logits is not None:
                assert_close(logits, plain[s][position], f"logits of {s} at {position}")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, derandomize=True, database=None, deadline=None)
@given(texts=texts, n_ubatch=st.integers(1, 8), in_turns=st.booleans())
def test_a_batch_gives_what_a_decoder_of_each_sequence_gives(
    kind: Kind, texts: Texts, n_ubatch: int, in_turns: bool
) -> None:
    together = small_decoder(kind, cells=CELLS, n_seq_max=4, n_ubatch=n_ubatch)
    batch = [(s, position) for s, text in texts.items() for position in range(len(text))]
    batch.sort(key=lambda place: place[1] if in_turns else 0)
    together.decode(batch_of(texts, batch, [True] * len(batch)))
    for s, text in texts.items():
        alone = small_decoder(kind, cells=CELLS, n_seq_max=4, n_ubatch=CELLS)
        alone.decode(Batch(token=list(text), output=[1] * len(text)))
        for position in range(len(text)):
            logits = alone.logits(position)
            assert logits is not None
            assert_close(together.logits(batch.index((s, position))), logits, f"logits of {s} at {position}")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, derandomize=True, database=None, deadline=None)
@given(texts=texts, seed=st.integers(0, 1 << 16), n_ubatch=st.integers(1, 8), in_turns=st.booleans())
def test_embeddings_of_mixed_batches_are_those_of_each_sequence_alone(
    kind: Kind, texts: Texts, seed: int, n_ubatch: int, in_turns: bool
) -> None:
    model = model_of(kind)[0]
    plain = {s: plain_memory.hidden(model, list(text)) for s, text in texts.items()}
    sizes: dict[str, Any] = {"cells": CELLS, "n_seq_max": 4, "n_ubatch": n_ubatch, "embeddings": True}
    rows, means = small_decoder(kind, **sizes), small_decoder(kind, **sizes, pooling="mean")
    for batch in stretches(texts, seed, in_turns=in_turns):
        for decoder in (rows, means):
            decoder.decode(batch_of(texts, batch, [True] * len(batch)))
        for index, (s, position) in enumerate(batch):
            assert_close(rows.embedding(index), plain[s][position], f"row of {s} at {position}")
        for s in {s for s, _ in batch}:
            mean = plain[s][[position for t, position in batch if t == s]].mean(0)
            assert_close(means.pooled(s), mean, f"mean of {s}")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_given_as_embeddings_are_decoded_like_their_tokens(kind: Kind) -> None:
    model, tokens = model_of(kind)[0], [3, 1, 4, 1, 5, 9, 2, 6]
    decoder = small_decoder(kind, cells=CELLS)
    decoder.decode(Batch(token=tokens[:3]))
    rows = model.embed(torch.tensor(tokens[3:])).numpy()
    decoder.decode(Batch(embd=rows, output=[1] * 5))
    plain = plain_memory.logits(model, tokens)
    for index in range(5):
        assert_close(decoder.logits(index), plain[3 + index], f"logits at {3 + index}")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, derandomize=True, database=None, deadline=None)
@given(text=st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=20))
def test_the_oracle_agrees_with_a_plain_forward_of_the_whole_sequence(kind: Kind, text: list[int]) -> None:
    model = model_of(kind)[0]
    oracle, plain = Oracle(model, [0], unified=True), plain_memory.logits(model, text)
    entries = oracle.decode(Row(token, position, (0,)) for position, token in enumerate(text))
    for entry in reversed(entries):
        assert_close(oracle.truth.logits(entry), plain[entry.position], f"logits at {entry.position}")
