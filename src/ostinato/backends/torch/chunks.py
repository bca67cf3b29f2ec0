"""Chunks by torch: each part is padded to the chunk's rows, so that a row's bits do not depend on where a text was cut.

On the CPU that number follows from the length of a prompt, and only prompts with the same number share pages. Recurrent
models take their parts unpadded: padding would change their states, which are not shared between sequences. So all
their texts are cut at multiples of one number of rows, whatever is asked of them and beside whom. Logits are computed
in slices of a fixed number of rows, for the same reason as the padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.base import CHUNK_ROWS, ChunkOutput, ChunkPart, ChunkWant, output_rows, rows_of_logits
from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.first_token import FirstToken
from ostinato.backends.torch.kernels import twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.delta_blocks import BLOCK
from ostinato.backends.torch.ops.logprobs import logprobs_torch
from ostinato.backends.torch.outputs import RowOutputs
from ostinato.backends.torch.paged import ChunkMemory, PagedMemory
from ostinato.errors import InternalError
from ostinato.loop.layout import Tables
from ostinato.loop.plan import Buffer

FEW_ROWS: Final = 64  # of a forward of a short prompt, whose answer begins sooner
SHORT_PROMPT: Final = 128


class TorchChunks:
    """Chunks by the model's own torch blocks; `kernels`, the twins unless told, choose the first token."""

    rows = CHUNK_ROWS["cpu"]
    n_copies = 0
    any_cut = False  # of recurrent models, whose parts are not padded; pages of others are filled alike
    failures: Mapping[int, str] = MappingProxyType({})  # nothing is captured
    captured: Sequence[Buffer] = ()

    def __init__(self, model: Model, memory: PagedMemory, tables: Tables, n_tokens: int) -> None:
        self._model, self._memory = model, memory
        self._last = zeros((tables.layout.n_slots, model.shape.hidden), model.dtype, model.device)
        self._recurs = bool(model.shape.recurrent)
        row = zeros((1, model.shape.hidden), model.dtype, model.device)
        logits = zeros((1, model.shape.vocab), torch.float32, model.device)
        head = [lambda: logits.copy_(model.logits(row))]
        self._first = FirstToken(row, logits, head, tables, n_tokens, twin_kernels())
        self.max_outputs = rows_of_logits(model.shape.vocab, self.rows)
        self._slice = min(FEW_ROWS, self.max_outputs)
        self._outputs = RowOutputs(model.shape, model.device, partial(partial, logprobs_torch))

    def rows_for(self, n_prompt: int) -> int:
        if self._recurs:
            # At most the rows that the logits buffer holds, so that asking for logits adds no cut; whole blocks of
            # delta nets where one fits.
            most = self.max_outputs
            return most - most % BLOCK or most
        return FEW_ROWS if n_prompt <= SHORT_PROMPT else self.rows

    def run(self, parts: Sequence[ChunkPart], rows: int, want: ChunkWant | None = None) -> ChunkOutput:
        output_rows(parts, want, self.max_outputs, self._model.shape.vocab)
        asked = [self._part(part, rows)[list(part.outputs)] for part in parts]
        if want is None:
            return ChunkOutput()
        hidden = torch.cat(asked)
        plain, logits = (lambda own: hidden[own].float()), (lambda own: self._logits(hidden[own]))
        return self._outputs.give(want, len(hidden), self._slice, plain, logits)

    def first(self, slot: int) -> None:
        self._first.choose(slot, self._last[slot : slot + 1])

    def _part(self, part: ChunkPart, rows: int) -> Tensor:
        """The hidden rows of a part, behind the last norm."""
        model, start, n = self._model, part.start, len(part.tokens)
        if self._recurs and part.slot is None:
            raise InternalError("a model that recurs has no state for a sequence without a slot")
        rows = n if self._recurs else rows
        ids = torch.zeros(rows, dtype=torch.int64, device=model.device)
        ids[:n] = torch.tensor(part.tokens, dtype=torch.int64)
        # Padding rows have the last position: any valid one will do, since their results are not read.
        positions = torch.arange(start, start + rows, device=model.device).clamp(max=start + n - 1)
        slot = -1 if part.slot is None else part.slot
        memory = ChunkMemory(
            self._memory, model, slot, start, n, [np.array(table, np.int64) for table in part.page_tables]
        )
        hidden = model.hidden(ids, positions, memory, rope_set=part.rope_set)
        if part.slot is not None:
            self._last[slot] = hidden[n - 1]
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of up to a slice of rows, computed as of a whole one."""
        padded = torch.zeros((self._slice, hidden.shape[1]), dtype=hidden.dtype, device=hidden.device)
        padded[: len(hidden)] = hidden
        return self._model.logits(padded)[: len(hidden)]
