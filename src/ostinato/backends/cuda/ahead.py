"""What an engine will launch, known before its weights take memory (E-9).

A plan binds its launches to tensors. Over torch's `meta` tensors, which have sizes and no memory, the same plan binds
launches for which Triton compiles the same programs; nothing is launched. So what an engine will run is compiled and
loaded first (`ready.py`), and the memory that compilers and binaries take is not missing later.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from ostinato.backends.base import Settled
from ostinato.backends.cuda.chunks import FusedChunks
from ostinato.backends.cuda.launch import TritonLaunch, launches_in
from ostinato.backends.cuda.plan import FusedPlan
from ostinato.backends.torch.allocate import Measure
from ostinato.backends.torch.kernels import Kernels
from ostinato.backends.torch.load import DenseLoader
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.tables import tensor_tables
from ostinato.loop.layout import Tables
from ostinato.models.blocks import ModelBlocks, with_leaves
from ostinato.models.tensors import TensorTable

META: Final = torch.device("meta")


def without_memory(blocks: ModelBlocks, table: TensorTable, dtype: torch.dtype, loader: type[DenseLoader]) -> Model:
    """The model as a loader lays it out, of tensors that have sizes and no memory."""
    return Model.of(with_leaves(blocks, cache(loader(table, dtype, META, Measure()).leaf)), dtype=dtype, device=META)


def launches_of_chunks(model: Model, settled: Settled, kernels: Kernels) -> list[TritonLaunch]:
    """What prompts and their outputs launch, for a model without memory."""
    return [*launches_in(FusedChunks(*_given(model, settled), kernels).bound())]


def launches_of_step(model: Model, settled: Settled, kernels: Kernels) -> list[TritonLaunch]:
    """What a step launches, for a model without memory."""
    nodes = FusedPlan(*_given(model, settled), kernels).nodes()
    return [*launches_in([node.run for node in nodes])]


def _given(model: Model, settled: Settled) -> tuple[Model, PagedMemory, Tables, int]:
    """As a runner gives it to a plan."""
    memory = PagedMemory.of(
        model,
        settled.groups(model.shape),
        n_slots=settled.n_slots,
        kv_type=settled.kv_type,
        page_tokens=settled.page_tokens,
    )
    tables = tensor_tables(settled.tables_layout(model.shape), model.device)
    return model, memory, tables, settled.tokens_of(model.shape)
