"""The node of a step that finds the masks of rows under grammars: one launch of `step_masks.cu`.

Every block takes some words of every mask, so the grid follows from the chip and not from the rows. In a step without
grammars each block reads one word and ends. The twin is `find_masks` of loop/grammars.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from ostinato.backends.cuda import start
from ostinato.backends.machine import Chip
from ostinato.backends.torch.kernels import Launch
from ostinato.loop.grammars import find_masks
from ostinato.loop.layout import Layout, Tables
from ostinato.loop.step_boundary import native_headers

THREADS: Final = 256
BLOCKS_PER_MULTIPROCESSOR: Final = 2
ANY_PAGE: Final = 1  # the headers are compiled with a size of pages, which masks do not depend on


@dataclass(frozen=True, slots=True)
class MaskLaunch:
    """The kernel over the tables of an engine, on the stream that is current."""

    kernel: Any
    n_blocks: int
    arguments: tuple[int, ...]
    device: torch.device

    def __call__(self) -> None:
        from cuda.core import LaunchConfig, Stream, launch

        stream = Stream.from_handle(torch.cuda.current_stream(self.device).cuda_stream)
        launch(stream, LaunchConfig(grid=self.n_blocks, block=THREADS), self.kernel, *self.arguments)


def bind_masks(tables: Tables, *, chip: Chip) -> Launch:
    """Masks into the table's `mask_bits`, for the rows of the step whose slots have a grammar. On the CPU, where Triton
    is interpreted, by the twin."""
    device = tables.table.memory.device
    if device.type == "cpu":
        return partial(find_masks, tables)
    arguments = (*tables.addresses, tables.grammar_address)
    kernel = mask_module(tables.layout, device).get_kernel("step_masks")
    return MaskLaunch(kernel, BLOCKS_PER_MULTIPROCESSOR * chip.n_multiprocessors, arguments, device)


def mask_module(layout: Layout, device: torch.device) -> Any:
    """The kernel's module, compiled for tables of this layout."""
    return start.loaded("step_masks.cu", device, native_headers(layout, ANY_PAGE))
