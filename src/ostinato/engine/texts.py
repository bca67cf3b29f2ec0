"""Logits, log-probabilities and vectors of texts, as numpy arrays; each call submits one piece of work.

A chunk holds as many texts as it has rows for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ostinato.engine.engine import Engine
from ostinato.engine.work import WorkSpec, WorkText
from ostinato.errors import BadOption, listing
from ostinato.files.unpack import Floats

# The rows of a text of n tokens whose mean is its vector; the definition is `decoder/pooling.py`.
_POOLED: Final[Mapping[str, Callable[[int], range]]] = MappingProxyType(
    {"mean": range, "cls": lambda n: range(1), "last": lambda n: range(n - 1, n)}
)


@dataclass(frozen=True, slots=True, eq=False)
class TextLogprobs:
    """For each token of a text but the first: its log-probability, and the most likely ids at its place with theirs."""

    logprobs: Floats  # [n - 1]
    top_ids: NDArray[np.int32]  # [n - 1, top]
    top_logprobs: Floats


def logits_of(engine: Engine, ids: Sequence[int]) -> Floats:
    """Logits of a text's tokens (teacher forced), float32 [n, vocab]."""
    work = engine.work(WorkSpec([WorkText(ids, range(len(ids)))], "logits"))
    return np.concatenate([rows.output.logits for rows in work if rows.output.logits is not None])


def logprobs_of(
    engine: Engine, texts: Sequence[Sequence[int]], top: int = 0, n_tokens: int | None = None
) -> list[TextLogprobs]:
    """Log-probabilities of the tokens of texts, and the `top` most likely among the first `n_tokens` ids."""
    asked = [WorkText(ids[:-1], range(len(ids) - 1), ids[1:]) for ids in texts]
    found: list[list[TextLogprobs]] = [[] for _ in texts]
    for number, output in engine.work(WorkSpec(asked, "logprobs", top, n_tokens)):
        assert output.logprobs is not None
        assert output.top_ids is not None
        assert output.top_logprobs is not None
        found[number].append(TextLogprobs(output.logprobs, output.top_ids, output.top_logprobs))
    return [
        TextLogprobs(
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.top_ids for part in parts]),
            np.concatenate([part.top_logprobs for part in parts]),
        )
        for parts in found
    ]


def vectors_of(engine: Engine, texts: Sequence[Sequence[int]], pooling: str) -> Floats:
    """One vector per text, float32 [texts, hidden], from its hidden rows."""
    if pooling not in _POOLED:
        if pooling == "rank":
            raise BadOption("pooling 'rank' needs a model with a ranking head, and this one has none")
        raise BadOption(f"unknown pooling {pooling!r}; known: {listing(pooling, (*_POOLED, 'rank'))}")
    asked = [(ids, _POOLED[pooling](len(ids))) for ids in texts]
    # Tokens after the last row that is asked for are left out: attention is causal, so no row depends on them.
    work = engine.work(WorkSpec([WorkText(ids[: rows.stop], rows) for ids, rows in asked], "hidden"))
    sums = np.zeros((len(texts), engine.runner.model.shape.hidden))
    for number, output in work:
        assert output.hidden is not None
        sums[number] += output.hidden.sum(0, dtype=np.float64)
    means: Floats = (sums / np.array([[len(rows)] for _, rows in asked])).astype(np.float32)
    return means
