"""Requested outputs of a chunk's rows on a GPU: the final norm, logits, log-probabilities.

Rows are computed in slices, by the kernels of prompts: a row's bits depend on the row alone, and the logits buffer
holds one slice. It is allocated on first use. The caller waits for the work's event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ostinato.backends.base import ChunkOutput, ChunkWant, rows_of_logits
from ostinato.backends.cuda.scratch import Scratch
from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.kernels import Kernels, Launch
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.outputs import RowOutputs
from ostinato.backends.torch.weight import Weight
from ostinato.models.blocks import Linear

WHOLE_ROWS: Final = 4  # numbers of 4 bytes, one for each row: 16 bytes


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

    def bound(self) -> list[Launch]:
        """What `of_rows` launches, bound to memory for one row: to be compiled, before weights are read too (E-9)."""
        room, head, device = _Room.of(self._model, 1), self._model.head, self._device
        assert head is not None
        targets, logprobs = zeros((1,), torch.int32, device), zeros((1,), torch.float32, device)
        tops = [(zeros((1, n), torch.int32, device), zeros((1, n), torch.float32, device)) for n in (0, 1)]
        more: dict[str, Any] = {"n_tokens": self._shape.vocab}
        return [
            self._norm(room.x, room.x),
            self._norm(room.x, room.h),
            self._product(room.h, head, room.logits),
            *(self._bind_logprobs(room.logits, targets, logprobs, *top, **more) for top in tops),
        ]

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
            self._norm(normed, normed)()
            return normed

        # A slice begins at a multiple of 16 bytes of every result: elsewhere its kernel would be compiled anew (E-9).
        at_once = max(1, len(room.x) // WHOLE_ROWS * WHOLE_ROWS)
        return self.give(want, len(rows), at_once, hidden, lambda own: self._logits(room, x, at[own]))

    def _gathered(self, room: _Room, x: Tensor, at: Tensor) -> Tensor:
        return torch.index_select(x, 0, at, out=room.x[: len(at)])

    def _norm(self, x: Tensor, y: Tensor) -> Launch:
        norm = self._model.norm
        assert norm is not None
        return self._kernels.norm(x, y, norm.weight, norm.bias, norm.eps)

    def _logits(self, room: _Room, x: Tensor, at: Tensor) -> Tensor:
        head, cap = self._model.head, self._model.shape.logit_softcap
        assert head is not None
        h, logits = room.h[: len(at)], room.logits[: len(at)]
        self._norm(self._gathered(room, x, at), h)()
        self._product(h, head, logits)()
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _product(self, h: Tensor, head: Linear, logits: Tensor) -> Launch:
        def product(weight: Weight, out: Tensor) -> Launch:
            return self._kernels.gemm(h, weight, out, bias=head.bias, scale=head.scale)

        return self._scratch.product(head.weight, logits, product)


def _product_type(dtype: torch.dtype) -> torch.dtype:
    """What rows are multiplied in."""
    return dtype if dtype == torch.float32 else torch.bfloat16
