"""The tables of the loop as tensors: what plans and prompts in torch, and a GPU's kernels, are given."""

from dataclasses import replace

import torch

from ostinato.backends.torch import read_only as read_only  # registers how tensors are shown to the host
from ostinato.backends.torch.allocate import pinned_zeros
from ostinato.loop.layout import Kind, Layout, Tables


def tensor_tables(layout: Layout, device: torch.device, grammar_bytes: int = 0) -> Tables:
    """Zeroed tables: the table on the device, admissions and rings where both sides reach them; all of them on `meta`.
    On the CPU with memory for so many bytes of grammars."""
    if device.type == "cpu":
        return as_tensors(Tables.of(layout, grammar_bytes))
    own, *mapped = layout.n_bytes
    if device.type == "meta":
        made = [torch.empty(n_bytes, dtype=torch.uint8, device=device) for n_bytes in (own, *mapped)]
        return Tables.over(layout, made, dtype_of)
    table = torch.zeros(own, dtype=torch.uint8, device=device)
    pinned = [pinned_zeros((n_bytes,), torch.uint8, "the rings between host and GPU") for n_bytes in mapped]
    return Tables.over(layout, [table, *pinned], dtype_of)


def as_tensors(tables: Tables) -> Tables:
    """The same bytes of the host as tensors."""
    made = Tables.over(tables.layout, [torch.as_tensor(arena.memory) for arena in tables.arenas], dtype_of)
    return replace(made, grammars=tables.grammars)


def dtype_of(kind: Kind) -> torch.dtype:
    """torch's name for the type of a field."""
    dtype: torch.dtype = getattr(torch, kind)
    return dtype
