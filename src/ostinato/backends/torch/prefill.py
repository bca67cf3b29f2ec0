"""A prompt's way into memory: chunks of a fixed number of rows, and the first token out of the last of them.

By torch, every chunk of a prompt is padded to the same number of rows, so that the bits of a position do not depend on
where the prompt was cut, or on how much of it was there already. On the CPU that number follows from the prompt's
length, and only prompts of one kind share what was computed. Models that recur take their chunks unpadded: padding
would run through their states, and nobody shares those. By the native loop nothing is padded: a row's bits are its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from ostinato.backends.allocate import zeros
from ostinato.backends.cuda.prefill import FirstToken
from ostinato.backends.cuda.step import StepKernels, twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.paged import ChunkMemory, PagedMemory
from ostinato.loop.layout import Tables

# Rows of one forward on the CPU: few for a short prompt, whose answer begins sooner; for others as many as products
# need to be at full speed. A running loop waits for no more than one of them.
FEW_ROWS: Final = 64
MANY_ROWS: Final = 256
SHORT_PROMPT: Final = 128


class TorchPrefill:
    """Prefill by the model's own torch blocks; `kernels`, the twins unless told, choose the first token."""

    rows = MANY_ROWS
    n_copies = 0
    failures: Mapping[int, str] = MappingProxyType({})  # nothing is captured

    def __init__(
        self, model: Model, memory: PagedMemory, tables: Tables, n_tokens: int, kernels: StepKernels | None = None
    ) -> None:
        self._model, self._memory = model, memory
        self._last = zeros((tables.layout.n_slots, model.shape.hidden), model.dtype, model.device)
        self._padded = model.shape.recurrent is None
        self._first = FirstToken(model, tables, n_tokens, kernels or twin_kernels())

    def warm(self) -> None:
        """Choose a token that nobody asked for, so that nothing is compiled when the first prompt comes (E-9)."""
        self._first.play()

    def rows_for(self, n_prompt: int) -> int:
        return FEW_ROWS if n_prompt <= SHORT_PROMPT else MANY_ROWS

    def run(self, slot: int, tokens: Sequence[int], start: int, pages: Sequence[int], rows: int) -> None:
        model, n = self._model, len(tokens)
        rows = rows if self._padded else n
        ids = torch.zeros(rows, dtype=torch.int64, device=model.device)
        ids[:n] = torch.tensor(tokens, dtype=torch.int64)
        # Padding stands at the last position: any position that exists will do, nobody looks at its rows.
        positions = torch.arange(start, start + rows, device=model.device).clamp(max=start + n - 1)
        memory = ChunkMemory(self._memory, model, slot, start, n, np.asarray(pages, np.int64))
        self._last[slot] = model.hidden(ids, positions, memory)[n - 1]

    def first(self, slot: int) -> None:
        self._first.choose(slot, self._last[slot : slot + 1])
