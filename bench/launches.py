"""Every kernel that the plans of a model launch, bound without a GPU to memory that is never touched.

A plan binds its kernels to tensors; here those lie in the host's memory, laid out and not written, so that a large
model costs address space alone. What is bound is noted, and never launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, Final

import torch

from ostinato.backends.base import Settled
from ostinato.backends.cuda.chunks import FusedChunks
from ostinato.backends.cuda.kernels import triton_kernels
from ostinato.backends.cuda.launch import Launches, TritonLaunch
from ostinato.backends.cuda.load import PackedLoader
from ostinato.backends.cuda.plan import FusedPlan
from ostinato.backends.machine import Chip
from ostinato.backends.torch.allocate import empty
from ostinato.backends.torch.kernels import Kernels
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.tables import tensor_tables
from ostinato.lab.random_weights import DTYPES, RandomFile
from ostinato.loop.layout import Layout
from ostinato.models.blocks import with_leaves
from ostinato.models.shape import Shape
from ostinato.models.tensors import TensorTable
from ostinato.options import KVType

N_SLOTS: Final = 32
_WORKSPACES: Final = ("attend_workspace", "latent_workspace", "sample_workspace")
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """One launch of a plan."""

    name: str  # of the kernel's entry in the table of kernels
    launch: TritonLaunch


def bound_kernels(shape: Shape, type: str, kv_type: KVType, chip: Chip) -> list[BoundKernel]:
    """What a step, a prompt's chunks and their outputs launch for a model with weights of that type (`RandomFile`)."""
    noted: list[BoundKernel] = []
    kernels = noting(triton_kernels(chip), noted)
    shape = replace(shape, context=min(shape.context, 4096))
    model = laid_out_model(shape, type)
    settled = Settled("cuda:0", "cuda", "loop", "bfloat16", kv_type, shape.context, N_SLOTS, n_pages=256)
    groups = settled.groups(shape)
    memory = PagedMemory.of(model, groups, n_slots=N_SLOTS, kv_type=kv_type, page_tokens=settled.page_tokens)
    tables = tensor_tables(Layout(N_SLOTS, settled.max_pages, shape.vocab, n_groups=len(groups)), _CPU)
    FusedPlan(model, memory, tables, shape.vocab, kernels).plan()
    chunks = FusedChunks(model, memory, tables, shape.vocab, kernels)
    chunks._outputs.warm(chunks._x)
    return noted


def laid_out_model(shape: Shape, type: str) -> Model:
    """A model in the layout of a GPU's weights, without their values."""
    file = RandomFile(shape, type)
    table = TensorTable(file, {name: name for name in file.tensors})
    dtype = getattr(torch, DTYPES.get(type, "bfloat16"))
    with torch.inference_mode(False):
        blocks = with_leaves(file.blocks, cache(PackedLoader(table, dtype, _CPU, empty).leaf))
        return Model.of(blocks, dtype=dtype, device=_CPU)


def noting(kernels: Kernels, noted: list[BoundKernel]) -> Kernels:
    """The same table; what it binds is noted, and launches nothing when it is called."""

    def bind(name: str, entry: Callable[..., Any], *args: Any, **words: Any) -> Any:
        made = entry(*args, **words)
        if isinstance(made, Sequence):
            return [(part, _note(f"{name} {part}", launch, noted)) for part, launch in made]
        return _note(name, made, noted)

    entries = {field.name: getattr(kernels, field.name) for field in fields(kernels)}
    return Kernels(
        **{name: entry if name in _WORKSPACES else partial(bind, name, entry) for name, entry in entries.items()}
    )


def _note(name: str, made: TritonLaunch | Launches, noted: list[BoundKernel]) -> Callable[[], None]:
    parts = made.parts if isinstance(made, Launches) else (made,)
    noted += [BoundKernel(name, part) for part in parts]
    return lambda: None
