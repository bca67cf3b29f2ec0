"""Every kernel that the plans of a model launch, by the name of its entry in the table of kernels.

Plans bind their kernels as they do before weights are read (`backends/cuda/ahead.py`), to tensors without memory, so
that a large model costs nothing. What is bound is noted, and never launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final

import torch

from ostinato.backends.base import Settled
from ostinato.backends.cuda.ahead import launches_of_chunks, launches_of_step, without_memory
from ostinato.backends.cuda.kernels import triton_kernels
from ostinato.backends.cuda.launch import Launches, TritonLaunch
from ostinato.backends.cuda.load import PackedLoader
from ostinato.backends.machine import Chip
from ostinato.backends.torch.kernels import Kernels
from ostinato.lab.random_weights import DTYPES, RandomFile
from ostinato.models.shape import Shape
from ostinato.models.tensors import TensorTable
from ostinato.options import KVType

N_SLOTS: Final = 32
_WORKSPACE: Final = "_workspace"  # the end of the names of entries that launch nothing


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
    file, dtype = RandomFile(shape, type), DTYPES.get(type, "bfloat16")
    table = TensorTable(file, {name: name for name in file.tensors})
    model = without_memory(file.blocks, table, getattr(torch, dtype), PackedLoader)
    settled = Settled("cuda:0", "cuda", "loop", dtype, kv_type, shape.context, N_SLOTS, n_pages=256)
    for bind in (launches_of_step, launches_of_chunks):
        bind(model, settled, kernels)
    return noted


def noting(kernels: Kernels, noted: list[BoundKernel]) -> Kernels:
    """The same table; what it binds is noted."""

    def bind(name: str, entry: Callable[..., Any], *args: Any, **words: Any) -> Any:
        made = entry(*args, **words)
        for part, launch in made if isinstance(made, Sequence) else [("", made)]:
            _note(f"{name} {part}".strip(), launch, noted)
        return made

    entries = {field.name: getattr(kernels, field.name) for field in fields(kernels)}
    return Kernels(
        **{name: entry if name.endswith(_WORKSPACE) else partial(bind, name, entry) for name, entry in entries.items()}
    )


def _note(name: str, made: TritonLaunch | Launches, noted: list[BoundKernel]) -> None:
    parts = made.parts if isinstance(made, Launches) else (made,)
    noted += [BoundKernel(name, part) for part in parts]
