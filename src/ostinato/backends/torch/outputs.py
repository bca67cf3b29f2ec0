"""Requested outputs of a chunk's rows, for the host: hidden rows, logits, or log-probabilities, slice by slice.

Results lie in memory that the caller then owns; beside a GPU it is pinned, and filled when the current stream has come
so far: no function here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ostinato.backends.base import ChunkOutput, ChunkWant
from ostinato.backends.torch.kernels import Bind
from ostinato.models.shape import Shape

RowsOf = Callable[[slice], Tensor]  # float32 [rows of the slice, ...] on the device


class RowOutputs:
    """Takes what is asked for to the host; `n_copies` counts copies between host and device."""

    def __init__(self, shape: Shape, device: torch.device, logprobs: Bind) -> None:
        self._shape, self._device, self._bind_logprobs = shape, device, logprobs
        self.n_copies = 0

    def give(self, want: ChunkWant, n: int, at_once: int, hidden: RowsOf, logits: RowsOf) -> ChunkOutput:
        """Of n rows, in slices of so many at most; the rows of a slice are taken before the next is computed."""
        slices = [slice(begin, min(begin + at_once, n)) for begin in range(0, n, at_once)]
        if want.kind != "logprobs":
            rows, width = (hidden, self._shape.hidden) if want.kind == "hidden" else (logits, self._shape.vocab)
            out = self._on_host(n, width)
            for own in slices:
                self._take(out[own], rows(own))
            return ChunkOutput(**{want.kind: out.numpy()})
        targets = self.brought(want.targets)
        logprobs, top_logprobs = (torch.empty(size, device=self._device) for size in ((n,), (n, want.top)))
        top_ids = torch.empty((n, want.top), dtype=torch.int32, device=self._device)
        for own in slices:
            given = logits(own), targets[own], logprobs[own], top_ids[own], top_logprobs[own]
            self._bind_logprobs(*given, n_tokens=want.n_tokens or self._shape.vocab)()
        made = {"logprobs": logprobs, "top_ids": top_ids, "top_logprobs": top_logprobs}
        found = {name: self._on_host(*tensor.shape, dtype=tensor.dtype) for name, tensor in made.items()}
        for name, tensor in made.items():
            self._take(found[name], tensor)
        return ChunkOutput(**{name: tensor.numpy() for name, tensor in found.items()})

    def brought(self, numbers: Sequence[int]) -> Tensor:
        """Whole numbers on the device, int32."""
        staged = self._on_host(len(numbers), dtype=torch.int32)
        staged.copy_(torch.tensor(numbers, dtype=torch.int32))
        self.n_copies += 1
        return staged.to(self._device, non_blocking=True)

    def _on_host(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=self._device.type == "cuda")

    def _take(self, out: Tensor, made: Tensor) -> None:
        self.n_copies += 1
        out.copy_(made, non_blocking=True)
