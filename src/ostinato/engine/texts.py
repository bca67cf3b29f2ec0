"""Logits, log-probabilities and vectors of texts, as numpy arrays; each call submits one piece of work.

A chunk holds as many texts as it has rows for, and the engine delivers the rows of one text after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ostinato.backends.base import ChunkOutput
from ostinato.decoder.pooling import Pooled, Pooling
from ostinato.decoder.pooling import pooling as pooling_named
from ostinato.engine.engine import Engine
from ostinato.engine.work import WorkSpec, WorkText
from ostinato.files.unpack import Floats


@dataclass(frozen=True, slots=True, eq=False)
class TextLogprobs:
    """For each token of a text but the first: its log-probability, and the most likely ids at its place with theirs."""

    logprobs: Floats  # [n - 1]
    top_ids: NDArray[np.int32]  # [n - 1, top]
    top_logprobs: Floats


def logits_of(engine: Engine, ids: Sequence[int]) -> Floats:
    """Logits of a text's tokens (teacher forced), float32 [n, vocab]."""
    work = engine.work(WorkSpec([WorkText(ids, range(len(ids)), rope_set=engine.rope_set(len(ids)))], "logits"))
    return np.concatenate([rows.output.logits for rows in work if rows.output.logits is not None])


def logprobs_of(
    engine: Engine, texts: Sequence[Sequence[int]], top: int = 0, n_tokens: int | None = None
) -> list[TextLogprobs]:
    """Log-probabilities of the tokens of texts, and the `top` most likely among the first `n_tokens` ids."""
    return list(each_logprobs(engine, texts, top, n_tokens))


def each_logprobs(
    engine: Engine, texts: Sequence[Sequence[int]], top: int = 0, n_tokens: int | None = None
) -> Iterator[TextLogprobs]:
    """Those of each text when they are computed; a reader that stops before the end cancels the rest."""
    asked = [WorkText(ids[:-1], range(len(ids) - 1), ids[1:], engine.rope_set(len(ids))) for ids in texts]
    names = [field.name for field in fields(TextLogprobs)]
    parts: list[ChunkOutput] = []
    n_rows = 0
    for number, output in engine.work(WorkSpec(asked, "logprobs", top, n_tokens)):
        assert output.logprobs is not None
        parts.append(output)
        n_rows += len(output.logprobs)
        if n_rows == len(asked[number].outputs):
            yield TextLogprobs(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
            parts, n_rows = [], 0


def vectors_of(
    engine: Engine, texts: Sequence[Sequence[int]], pooling: str, segments: Sequence[Sequence[int]] | None = None
) -> Floats:
    """One vector per text, float32 [texts, hidden], from its hidden rows; or its scores [texts, classes] with pooling
    `rank`. `segments`: which of two texts each token belongs to, for encoders that tell two apart."""
    return np.stack(list(each_vector(engine, texts, pooling, segments)))


def each_vector(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    pooling: str,
    segments: Sequence[Sequence[int]] | None = None,
    firsts: Sequence[int] | None = None,
) -> Iterator[Floats]:
    """The vector of each text when it is computed; a reader that stops before the end cancels the rest. `firsts`: of
    each text, the first token whose row may be part of its vector."""
    if pooling == Pooling.RANK and engine.shape.rank_tokens:
        yield from _each_score_by_words(engine, texts)
        return
    causal, runner = engine.shape.causal, engine.runner
    kind = pooling_named(pooling, ranks=runner.model.ranking is not None)
    head = runner.ranked if kind is Pooling.RANK else None
    pooled = Pooled(kind, head=head, rank_by=Pooling(engine.shape.rank_by))
    asked = [pooled.rule.rows_of(len(ids), first) for ids, first in zip(texts, firsts or [0] * len(texts), strict=True)]
    wanted = [
        # With causal attention no row depends on tokens after it: those after the last row asked for are left out.
        WorkText(ids[: rows.stop] if causal else ids, rows, (), engine.rope_set(len(ids)), own)
        for ids, rows, own in zip(texts, asked, segments or [()] * len(texts), strict=True)
    ]
    n_rows = 0
    for number, output in engine.work(WorkSpec(wanted, "hidden")):
        assert output.hidden is not None
        positions = asked[number][n_rows : n_rows + len(output.hidden)]
        pooled.add_rows(0, np.fromiter(positions, np.int64), output.hidden)
        n_rows += len(output.hidden)
        if n_rows == len(asked[number]):
            vector = pooled.results()[0]
            yield runner.projected(vector) if runner.model.projections and head is None else vector
            pooled.clear()
            n_rows = 0


def _each_score_by_words(engine: Engine, texts: Sequence[Sequence[int]]) -> Iterator[Floats]:
    """The score [1] of each text by a language model: the logit of one token after it, less that of another."""
    tokens = engine.shape.rank_tokens
    asked = [WorkText(ids, range(len(ids) - 1, len(ids)), rope_set=engine.rope_set(len(ids))) for ids in texts]
    for _, output in engine.work(WorkSpec(asked, "logits")):
        assert output.logits is not None
        logits = output.logits[0, list(tokens)]
        yield logits[:1] - logits[1:].sum(keepdims=True)


def scores_of(engine: Engine, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Floats:
    """The scores [pairs, classes] of pairs of texts, by a model that ranks."""
    types = engine.runner.model.type_embedding
    second_kind = 1 if types is not None and len(types) > 1 else 0
    segments = [[0] * len(first) + [second_kind] * len(second) for first, second in pairs]
    return vectors_of(engine, [[*first, *second] for first, second in pairs], "rank", segments)
