"""Requested outputs of a chunk's rows on a GPU: the final norm, logits, log-probabilities.

Rows are computed in slices, by the kernels of prompts: a row's bits depend on the row alone, and the logits buffer
holds one slice. It is allocated on first use. The caller waits for the work's event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.backends.base import ChunkOutput, ChunkWant, rows_of_logits
from ostinato.backends.cuda.scratch import Scratch
from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.kernels import Kernels, Launch
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.outputs import RowOutputs
from ostinato.backends.torch.weight import Weight


@dataclass(frozen=True, slots=True)
class _Room:
    """Of one slice of rows: as a chunk left them, behind the last norm, and their logits."""

    x: Tensor  # float32 [rows, hidden]
    h: Tensor  # the same, as the head's product takes them
    logits: Tensor  # float32 [rows, vocab]

    @staticmethod
    def of(model: Model, rows: int) -> _Room:
        shape, device = model.shape, model.device
        return _Room(
            zeros((rows, shape.hidden), torch.float32, device),
            zeros((rows, shape.hidden), _product_type(model.dtype), device),
            zeros((rows, shape.vocab), torch.float32, device),
        )


class ChunkOutputs(RowOutputs):
    """Computes the requested outputs of a chunk's rows."""

    def __init__(self, model: Model, kernels: Kernels, rows: int, scratch: Scratch) -> None:
        super().__init__(model.shape, model.device, kernels.logprobs)
        self._model, self._kernels, self._scratch = model, kernels, scratch
        self.max_outputs = rows_of_logits(model.shape.vocab, rows)
        self._room: _Room | None = None

    def warm(self, x: Tensor) -> None:
        """Compute every output of one row once, so that no request waits for a compilation (E-9)."""
        self._room = _Room.of(self._model, 1)
        for want in (ChunkWant("hidden"), ChunkWant("logprobs", [0]), ChunkWant("logprobs", [0], top=1)):
            self.of_rows(x, [0], want)
        self._room = None  # which was one row long

    def of_rows(self, x: Tensor, rows: Sequence[int], want: ChunkWant) -> ChunkOutput:
        """Of these rows of x float32 [M, hidden], behind the last layer. Enqueues on the current stream."""
        if self._room is None:
            with torch.inference_mode(False):  # the next caller may be outside of it
                self._room = _Room.of(self._model, self.max_outputs)
        room, at = self._room, self.brought(rows)

        def hidden(own: slice) -> Tensor:
            normed = self._gathered(room, x, at[own])
            self._norm(normed, normed)
            return normed

        return self.give(want, len(rows), len(room.x), hidden, lambda own: self._logits(room, x, at[own]))

    def _gathered(self, room: _Room, x: Tensor, at: Tensor) -> Tensor:
        return torch.index_select(x, 0, at, out=room.x[: len(at)])

    def _norm(self, x: Tensor, y: Tensor) -> None:
        norm = self._model.norm
        assert norm is not None
        self._kernels.norm(x, y, norm.weight, norm.bias, norm.eps)()

    def _logits(self, room: _Room, x: Tensor, at: Tensor) -> Tensor:
        head, cap = self._model.head, self._model.shape.logit_softcap
        assert head is not None
        h, logits = room.h[: len(at)], room.logits[: len(at)]
        self._norm(self._gathered(room, x, at), h)

        def product(weight: Weight, out: Tensor) -> Launch:
            return self._kernels.gemm(h, weight, out, bias=head.bias, scale=head.scale)

        self._scratch.product(head.weight, logits, product)()
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _product_type(dtype: torch.dtype) -> torch.dtype:
    """What rows are multiplied in."""
    return dtype if dtype == torch.float32 else torch.bfloat16
