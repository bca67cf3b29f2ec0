"""Requested outputs of a chunk's rows on a GPU: the final norm, logits, log-probabilities.

Rows are computed in slices, by the kernels of prompts: a row's bits depend on the row alone, and the logits buffer
holds one slice. It is allocated on first use. Results are copied into pinned memory, which the caller then owns: the
caller waits for the work's event, and no function here waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.backends.base import ChunkOutput, ChunkWant, rows_of_logits
from ostinato.backends.cuda.scratch import Scratch
from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.kernels import Launch, PromptKernels
from ostinato.backends.torch.model import Model
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


class ChunkOutputs:
    """Computes the requested outputs of a chunk's rows."""

    def __init__(self, model: Model, prompts: PromptKernels, rows: int, scratch: Scratch) -> None:
        self._model, self._prompts, self._scratch = model, prompts, scratch
        self.max_outputs = rows_of_logits(model.shape.vocab, rows)
        self.n_copies = 0
        self._room: _Room | None = None

    def warm(self, x: Tensor) -> None:
        """Compute every output of one row once, so that no request waits for a compilation (E-9)."""
        self._room = _Room.of(self._model, 1)
        for want in (ChunkWant("hidden"), ChunkWant("logprobs", [0]), ChunkWant("logprobs", [0], top=1)):
            self.give(x, [0], want)
        self._room = None  # which was one row long

    def give(self, x: Tensor, rows: Sequence[int], want: ChunkWant) -> ChunkOutput:
        """Of these rows of x float32 [M, hidden], behind the last layer. Enqueues on the current stream."""
        shape, n = self._model.shape, len(rows)
        if self._room is None:
            with torch.inference_mode(False):  # the next caller may be outside of it
                self._room = _Room.of(self._model, self.max_outputs)
        room, most = self._room, len(self._room.x)
        at = self._brought(rows)
        slices = [slice(begin, min(begin + most, n)) for begin in range(0, n, most)]
        if want.kind == "hidden":
            hidden = self._on_host(n, shape.hidden)
            for own in slices:
                normed = self._gathered(room, x, at[own])
                self._norm(normed, normed)
                self._take(hidden[own], normed)
            return ChunkOutput(hidden=hidden.numpy())
        if want.kind == "logits":
            logits = self._on_host(n, shape.vocab)
            for own in slices:
                self._take(logits[own], self._logits(room, x, at[own]))
            return ChunkOutput(logits=logits.numpy())
        return self._logprobs(room, x, at, slices, want)

    def _logprobs(self, room: _Room, x: Tensor, at: Tensor, slices: Sequence[slice], want: ChunkWant) -> ChunkOutput:
        n, device = len(at), x.device
        targets = self._brought(want.targets)
        logprobs, top_logprobs = torch.empty(n, device=device), torch.empty((n, want.top), device=device)
        top_ids = torch.empty((n, want.top), dtype=torch.int32, device=device)
        for own in slices:
            given = self._logits(room, x, at[own]), targets[own], logprobs[own], top_ids[own], top_logprobs[own]
            self._prompts.logprobs(*given, n_tokens=want.n_tokens or self._model.shape.vocab)()
        found = [(logprobs, self._on_host(n)), (top_logprobs, self._on_host(n, want.top))]
        ids = self._on_host(n, want.top, dtype=torch.int32)
        for made, out in (*found, (top_ids, ids)):
            self._take(out, made)
        return ChunkOutput(logprobs=found[0][1].numpy(), top_ids=ids.numpy(), top_logprobs=found[1][1].numpy())

    def _gathered(self, room: _Room, x: Tensor, at: Tensor) -> Tensor:
        return torch.index_select(x, 0, at, out=room.x[: len(at)])

    def _norm(self, x: Tensor, y: Tensor) -> None:
        norm = self._model.norm
        assert norm is not None
        self._prompts.norm(x, y, norm.weight, norm.bias, norm.eps)()

    def _logits(self, room: _Room, x: Tensor, at: Tensor) -> Tensor:
        head, cap = self._model.head, self._model.shape.logit_softcap
        assert head is not None
        h, logits = room.h[: len(at)], room.logits[: len(at)]
        self._norm(self._gathered(room, x, at), h)

        def product(weight: Weight, out: Tensor) -> Launch:
            return self._prompts.gemm(h, weight, out, bias=head.bias, scale=head.scale)

        self._scratch.product(head.weight, logits, product)()
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    # Between host and device

    def _brought(self, numbers: Sequence[int]) -> Tensor:
        """Whole numbers on the device, int32."""
        staged = self._on_host(len(numbers), dtype=torch.int32)
        staged.copy_(torch.tensor(numbers, dtype=torch.int32))
        self.n_copies += 1
        return staged.to(self._model.device, non_blocking=True)

    def _on_host(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=self._model.device.type == "cuda")

    def _take(self, out: Tensor, made: Tensor) -> None:
        self.n_copies += 1
        out.copy_(made, non_blocking=True)


def _product_type(dtype: torch.dtype) -> torch.dtype:
    """What rows are multiplied in."""
    return dtype if dtype == torch.float32 else torch.bfloat16
