"""Chunks by torch: each part is padded to the chunk's rows, so that a row's bits do not depend on where a text was cut.

On the CPU that number follows from the length of a prompt, and only prompts with the same number share pages. Recurrent
models take their parts unpadded: padding would change their states, which are not shared between sequences. Logits are
computed in slices of a fixed number of rows, for the same reason as the padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.backends.base import CHUNK_ROWS, ChunkOutput, ChunkPart, ChunkWant, output_rows, rows_of_logits
from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.first_token import FirstToken
from ostinato.backends.torch.kernels import StepKernels, twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.logprobs import logprobs_torch
from ostinato.backends.torch.paged import ChunkMemory, PagedMemory
from ostinato.errors import InternalError
from ostinato.loop.layout import Tables

FEW_ROWS: Final = 64  # of a forward of a short prompt, whose answer begins sooner
SHORT_PROMPT: Final = 128


class TorchChunks:
    """Chunks by the model's own torch blocks; `kernels`, the twins unless told, choose the first token."""

    rows = CHUNK_ROWS["cpu"]
    n_copies = 0
    failures: Mapping[int, str] = MappingProxyType({})  # nothing is captured

    def __init__(
        self, model: Model, memory: PagedMemory, tables: Tables, n_tokens: int, kernels: StepKernels | None = None
    ) -> None:
        self._model, self._memory = model, memory
        self._last = zeros((tables.layout.n_slots, model.shape.hidden), model.dtype, model.device)
        self._recurs = model.shape.recurrent is not None
        row = zeros((1, model.shape.hidden), model.dtype, model.device)
        logits = zeros((1, model.shape.vocab), torch.float32, model.device)
        head = [lambda: logits.copy_(model.logits(row))]
        self._first = FirstToken(row, logits, head, tables, n_tokens, kernels or twin_kernels())
        self.max_outputs = rows_of_logits(model.shape.vocab, self.rows)
        self._slice = min(FEW_ROWS, self.max_outputs)

    def warm(self) -> None:
        """Sample one unused token, so that the first prompt does not wait for a compilation (E-9)."""
        self._first.play()

    def rows_for(self, n_prompt: int) -> int:
        return FEW_ROWS if n_prompt <= SHORT_PROMPT else self.rows

    def run(self, parts: Sequence[ChunkPart], rows: int, want: ChunkWant | None = None) -> ChunkOutput:
        output_rows(parts, want, self.max_outputs, self._model.shape.vocab)
        asked = [self._part(part, rows)[list(part.outputs)] for part in parts]
        return ChunkOutput() if want is None else self._output(torch.cat(asked), want)

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
        memory = ChunkMemory(self._memory, model, slot, start, n, [np.array(table, np.int64) for table in part.pages])
        hidden = model.hidden(ids, positions, memory)
        if part.slot is not None:
            self._last[slot] = hidden[n - 1]
        return hidden

    def _output(self, hidden: Tensor, want: ChunkWant) -> ChunkOutput:
        if want.kind == "hidden":
            return ChunkOutput(hidden=host_array(hidden.float()))
        n, vocab, device = len(hidden), self._model.shape.vocab, hidden.device
        if want.kind == "logits":
            logits = torch.empty((n, vocab), device=device)
            for own in self._slices(n):
                logits[own] = self._logits(hidden[own])
            return ChunkOutput(logits=host_array(logits))
        targets = torch.tensor(want.targets, dtype=torch.int32).to(device)
        logprobs, top_logprobs = torch.empty(n, device=device), torch.empty((n, want.top), device=device)
        top_ids = torch.empty((n, want.top), dtype=torch.int32, device=device)
        for own in self._slices(n):
            given = self._logits(hidden[own]), targets[own], logprobs[own], top_ids[own], top_logprobs[own]
            logprobs_torch(*given, n_tokens=want.n_tokens or vocab)
        return ChunkOutput(
            logprobs=host_array(logprobs), top_ids=host_array(top_ids), top_logprobs=host_array(top_logprobs)
        )

    def _slices(self, n: int) -> list[slice]:
        return [slice(begin, min(begin + self._slice, n)) for begin in range(0, n, self._slice)]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of up to a slice of rows, computed as of a whole one."""
        padded = torch.zeros((self._slice, hidden.shape[1]), dtype=hidden.dtype, device=hidden.device)
        padded[: len(hidden)] = hidden
        return self._model.logits(padded)[: len(hidden)]


def host_array(tensor: Tensor) -> NDArray[Any]:
    """A tensor as an array of the host's own; from a GPU it is filled when the current stream has come so far."""
    if tensor.device.type == "cpu":
        return tensor.contiguous().numpy()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    return pinned.numpy()
