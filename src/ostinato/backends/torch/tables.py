"""The tables of the loop as tensors: what plans and prompts in torch, and a GPU's kernels, are given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.torch import read_only as read_only  # registers how tensors are shown to the host
from ostinato.backends.torch.allocate import pinned_zeros
from ostinato.loop.grammars import GrammarMemory
from ostinato.loop.layout import Kind, Layout, Tables


class DeviceGrammars(GrammarMemory):
    """Grammars in a GPU's memory. What is written waits for `flush`, which copies it on the stream that is current: a
    loop that runs meanwhile reads only regions that an admission has named, and that comes later."""

    def __init__(self, n_bytes: int, mask_words: int, device: torch.device) -> None:
        self._device, self._unsent = device, list[slice]()
        super().__init__(n_bytes, mask_words)

    def _memory(self, n_words: int) -> Tensor:
        # The source of every copy, at the places that the device has. Pinned, since from other memory the driver may
        # wait for the stream before it copies (E-6), and for good, since to pin memory it may wait for the loop (E-34).
        on_gpu = self._device.type == "cuda"
        made = pinned_zeros if on_gpu else lambda size, dtype, _: torch.zeros(size, dtype=dtype)
        self._staged = made((n_words,), torch.int32, "grammars")
        return torch.zeros(n_words, dtype=torch.int32, device=self._device)

    def _write(self, first: int, words: np.ndarray) -> None:
        # A copy of what was here before may not have run: what it brings now is overwritten by this one's, behind it.
        self._unsent.append(slice(first, first + len(words)))
        self._staged[self._unsent[-1]] = torch.from_numpy(words)

    def flush(self) -> None:
        for part in self._unsent:
            self.plain_words[part].copy_(self._staged[part], non_blocking=True)
        self._unsent.clear()


def tensor_tables(layout: Layout, device: torch.device, grammar_bytes: int = 0) -> Tables:
    """Zeroed tables, and memory for so many bytes of grammars: table and grammars on the device, admissions and rings
    where both sides reach them; on `meta` all of them, without grammars."""
    if device.type == "cpu":
        return as_tensors(Tables.of(layout, grammar_bytes))
    own, *mapped = layout.n_bytes
    if device.type == "meta":
        sized = [torch.empty(n_bytes, dtype=torch.uint8, device=device) for n_bytes in (own, *mapped)]
        return Tables.over(layout, sized, dtype_of)
    table = torch.zeros(own, dtype=torch.uint8, device=device)
    pinned = [pinned_zeros((n_bytes,), torch.uint8, "the rings between host and GPU") for n_bytes in mapped]
    made = Tables.over(layout, [table, *pinned], dtype_of)
    return replace(made, grammars=DeviceGrammars(grammar_bytes, layout.mask_words, device) if grammar_bytes else None)


def as_tensors(tables: Tables) -> Tables:
    """The same bytes of the host as tensors."""
    made = Tables.over(tables.layout, [torch.as_tensor(arena.memory) for arena in tables.arenas], dtype_of)
    return replace(made, grammars=tables.grammars)


def dtype_of(kind: Kind) -> torch.dtype:
    """torch's name for the type of a field."""
    dtype: torch.dtype = getattr(torch, kind)
    return dtype
