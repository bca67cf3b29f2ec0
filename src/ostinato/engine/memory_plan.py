"""What an engine will take of memory, counted before anything is loaded: weights, pages, tables, buffers.

Sizes come from the same classes that allocate later, made on torch's `meta` device, where nothing is allocated; what
a prompt's chunk and the libraries take is an estimate, and named so. A plan that does not fit says what was asked,
what is free and what to lower.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from ostinato.backends.cuda.chunks import BUCKETS
from ostinato.backends.cuda.plan import StepBuffers
from ostinato.backends.cuda.static_plan import SPARE_STATES
from ostinato.backends.native.plan import CHUNK_ROWS
from ostinato.backends.torch.chunks import MANY_ROWS
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.paged import PAGE_TOKENS, PagedMemory, page_bytes
from ostinato.backends.torch.table import TWINS
from ostinato.errors import HardwareCannot
from ostinato.files.fetch import megabytes
from ostinato.loop.layout import Layout, arena_bytes
from ostinato.models.shape import Shape
from ostinato.options import KVType

_META: Final = torch.device("meta")
# Of one row: where attention over a long row is cut, each cut leaves sums of its own (backends/cuda/triton/attend.py).
ATTENTION_CUTS: Final = 64
# The sampler keeps a scaled copy of the logits and a little beside it.
SAMPLER_COPIES: Final = 1.1
# What cuBLAS, Triton's modules and the captured graphs take on a GPU, generously.
GPU_LIBRARIES: Final = 256 << 20
LEAST_CONTEXT: Final = 128
# Of the native loop: of one activation as a number and in two planes, with its share of what a block has (tiles.h), and
# of one logit in the lists that a thread ranks it in (sampler.h).
PREPARED_BYTES: Final = 7
SAMPLER_BYTES: Final = 28


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One thing that takes memory; `on_host` where that is not the model's device: pinned memory beside a GPU."""

    name: str
    n_bytes: int
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an engine would be opened with. `n_pages` None: a whole context for every slot."""

    shape: Shape
    weight_bytes: int
    device: torch.device
    dtype: torch.dtype
    kv_type: KVType
    n_slots: int
    context: int
    n_pages: int | None = None
    tape_bytes: int = 0  # of the weights once more, as the persistent kernel reads them
    native: bool = False  # whether the CPU's native loop runs, over packed weights
    threads: int = 1  # of the native loop

    @property
    def pages(self) -> int:
        if self.n_pages is not None:
            return self.n_pages
        return self.n_slots * -(-self.context // PAGE_TOKENS[self.device.type])


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The rows, and whether they fit what is free on the device."""

    wanted: Wanted
    rows: tuple[MemoryRow, ...]
    free_bytes: int

    @property
    def device_bytes(self) -> int:
        return sum(row.n_bytes for row in self.rows if not row.on_host)

    @property
    def host_bytes(self) -> int:
        """Pinned memory of the host beside a GPU; on the CPU there is no beside."""
        return sum(row.n_bytes for row in self.rows if row.on_host)

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.free_bytes

    @property
    def verdict(self) -> str:
        """One sentence: what is asked, what is free, and what to lower."""
        asked = (
            f"{megabytes(self.device_bytes)} are needed on {self.wanted.device} for {self.wanted.n_slots} slots and a "
            f"context of {self.wanted.context}, and {megabytes(self.free_bytes)} are free"
        )
        return f"{asked}: it fits" if self.fits else f"{asked}; {self.advice}"

    @property
    def advice(self) -> str:
        """What to lower, with figures that fit where there are any."""
        wanted = self.wanted
        fewer = [replace(wanted, n_slots=n, n_pages=None) for n in _halves(wanted.n_slots)]
        shorter = [replace(wanted, n_slots=1, n_pages=None, context=n) for n in _halves(wanted.context, LEAST_CONTEXT)]
        for smaller in (*fewer, *shorter):
            if sum(row.n_bytes for row in rows_of(smaller) if not row.on_host) <= self.free_bytes:
                context = "" if smaller.context == wanted.context else f" and --context {smaller.context}"
                return f"lower --slots to {smaller.n_slots}{context}, or --kv-type to q8_0"
        narrower = "--dtype bfloat16, " if wanted.dtype == torch.float32 and not wanted.native else ""
        weights = megabytes(wanted.weight_bytes)
        return f"the weights alone are {weights}: take {narrower}fewer bits a weight or a smaller model"

    def check(self) -> None:
        """HardwareCannot, with the verdict, where it does not fit."""
        if not self.fits:
            raise HardwareCannot(self.verdict)


def memory_plan(wanted: Wanted, free_bytes: int) -> MemoryPlan:
    """The plan of an engine that is not there yet."""
    return MemoryPlan(wanted, rows_of(wanted), free_bytes)


def rows_of(wanted: Wanted) -> tuple[MemoryRow, ...]:
    """Everything that such an engine takes."""
    shape = wanted.shape
    if not shape.causal:
        return (MemoryRow("weights", wanted.weight_bytes),)
    on_gpu = wanted.device.type == "cuda"
    max_pages = -(-wanted.context // PAGE_TOKENS[wanted.device.type])
    layout = Layout(wanted.n_slots, max_pages, shape.vocab)
    rows = [
        MemoryRow("weights", wanted.weight_bytes),
        MemoryRow("tape", wanted.tape_bytes),
        MemoryRow("KV pages", wanted.pages * page_bytes(shape, wanted.kv_type, PAGE_TOKENS[wanted.device.type])),
        MemoryRow("recurrent states", _state_bytes(wanted)),
        MemoryRow("slot table", arena_bytes(layout.table_fields)),
        MemoryRow("admissions", arena_bytes(layout.admission_fields), on_host=on_gpu),
        MemoryRow("rings", arena_bytes(layout.ring_fields), on_host=on_gpu),
        MemoryRow("step buffers", _step_bytes(wanted)),
        MemoryRow("prefill buffers (about)", 0 if wanted.native else _prefill_bytes(wanted)),
        MemoryRow("workspace (about)", _workspace_bytes(wanted) if on_gpu else 0),
        MemoryRow("native workspace (about)", _native_bytes(wanted) if wanted.native else 0),
    ]
    return tuple(row for row in rows if row.n_bytes)


def meta_model(shape: Shape, dtype: torch.dtype) -> Model:
    """A model of that shape without layers or memory, for whoever asks a model how large its buffers will be."""
    embedding = torch.empty((shape.vocab, shape.hidden), dtype=dtype, device=_META)
    return Model(
        shape=shape,
        embedding=embedding,
        position_embedding=None,
        layers=(),
        norm=None,
        head=None,
        ops=TWINS,
        dtype=dtype,
        device=_META,
    )


def _state_bytes(wanted: Wanted) -> int:
    if wanted.shape.recurrent is None:
        return 0
    memory = PagedMemory.of(
        replace(meta_model(wanted.shape, wanted.dtype), shape=replace(wanted.shape, attention=False)),
        n_slots=wanted.n_slots + (SPARE_STATES if wanted.device.type == "cuda" else 0),
        n_pages=1,
        kv_type=wanted.kv_type,
        page_tokens=1,
    )
    assert memory.states is not None
    return _bytes(state for states in memory.states.layers.values() for state in states)


def _step_bytes(wanted: Wanted) -> int:
    """Between the nodes of a step: fused kernels' on a GPU, the last rows and logits of a CPU's."""
    shape = wanted.shape
    if wanted.device.type == "cuda":
        step = StepBuffers.of(meta_model(shape, wanted.dtype), wanted.n_slots)
        return _bytes(getattr(step, name) for name in StepBuffers.__dataclass_fields__)
    width = torch.float32.itemsize if shape.wide_residual else wanted.dtype.itemsize
    return wanted.n_slots * (shape.hidden * width + shape.vocab * torch.float32.itemsize)


def _prefill_bytes(wanted: Wanted) -> int:
    """A chunk on its way through a layer: what goes in, heads, both halves of the feed-forward, what comes out."""
    shape = wanted.shape
    rows = BUCKETS[-1] if wanted.device.type == "cuda" else MANY_ROWS
    heads = (2 * shape.n_heads + 2 * shape.n_kv_heads) * shape.head_width if shape.attention else 0
    inner = 3 * shape.ff_width
    if shape.experts is not None:
        inner = max(inner, 3 * shape.experts.n_used * shape.experts.ff_width)
    row_bytes = (3 * shape.hidden + heads + inner) * max(wanted.dtype.itemsize, 4)
    return rows * row_bytes + wanted.n_slots * shape.hidden * 4


def _workspace_bytes(wanted: Wanted) -> int:
    """What kernels keep between their parts, and what the libraries take for themselves."""
    shape = wanted.shape
    attention = wanted.n_slots * shape.n_heads * ATTENTION_CUTS * (shape.head_width + 2) * 4 if shape.attention else 0
    sampler = int(SAMPLER_COPIES * wanted.n_slots * shape.vocab * 4)
    return attention + sampler + GPU_LIBRARIES


def _native_bytes(wanted: Wanted) -> int:
    """What the native loop keeps of a chunk's rows on their way through a layer, and its sampler's lists."""
    shape = wanted.shape
    rows = max(wanted.n_slots, min(CHUNK_ROWS, wanted.context))
    heads = shape.n_heads * shape.head_width
    qkv = heads + 2 * shape.n_kv_heads * shape.head_width
    experts = shape.experts
    n_used, ff = (1, shape.ff_width) if experts is None else (experts.n_used, max(shape.ff_width, experts.ff_width))
    widest = max(shape.hidden, heads, ff)
    row_bytes = 4 * (2 * shape.hidden + max(shape.hidden, heads) + qkv + heads + 2 * n_used * ff)
    row_bytes += PREPARED_BYTES * widest
    if experts is not None:
        row_bytes += n_used * (4 * shape.hidden + PREPARED_BYTES * widest)
    return rows * row_bytes + (SAMPLER_BYTES * wanted.threads + 4) * shape.vocab


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _halves(n: int, least: int = 1) -> list[int]:
    """n, its half, and so on down to the least.

    >>> _halves(8)
    [8, 4, 2, 1]
    """
    found = []
    while n >= least:
        found.append(n)
        n //= 2
    return found
