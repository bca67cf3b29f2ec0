"""Samplers of the simplest kinds, for tests that route rows to one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ostinato.decoder.cells.output_rows import Sampled


@dataclass(frozen=True, slots=True)
class GreedySampler:
    """Always the largest logit. Keeps no state."""

    @property
    def supported(self) -> bool:
        return True

    def begin(self) -> None:
        return

    def apply(self, logits: Tensor) -> Sampled:
        return Sampled(token=int(logits.argmax()))

    def snapshot(self) -> None:
        return None

    def restore(self, snapshot: Any) -> None:
        return


@dataclass(frozen=True, slots=True)
class TopKSampler:
    """The k largest logits and their ids, for the caller to choose from. Keeps no state."""

    k: int

    @property
    def supported(self) -> bool:
        return self.k > 0

    def begin(self) -> None:
        return

    def apply(self, logits: Tensor) -> Sampled:
        kept = logits.topk(min(self.k, len(logits)))
        return Sampled(logits=kept.values, candidates=kept.indices)

    def snapshot(self) -> None:
        return None

    def restore(self, snapshot: Any) -> None:
        return
