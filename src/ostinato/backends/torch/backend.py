"""The plainest backend: every operation in plain torch. Decodes on the CPU in `eager`, and runs encoders anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ostinato.backends.base import (
    CHUNK_ROWS,
    ITEM_BYTES,
    MemoryRow,
    Settled,
    WeightLayout,
    dtype_of,
    kv_type_of,
    why_not_kept,
)
from ostinato.backends.machine import Chip, DeviceKind, Machine
from ostinato.backends.memory_rows import FLOAT_BYTES, LIBRARIES_WITH_TORCH, output_row, shared_rows, without_empty
from ostinato.backends.runner import Runner
from ostinato.backends.torch.kv_types import KV_DTYPES
from ostinato.errors import Unsupported
from ostinato.extras import why_missing
from ostinato.files.unpack import Floats
from ostinato.models.header import HeaderTensors
from ostinato.options import Activations, LoadOptions

if TYPE_CHECKING:
    from ostinato.backends.base import Chunks, SequenceCopy
    from ostinato.backends.loading import Progress
    from ostinato.backends.torch.load import DenseLoader
    from ostinato.backends.torch.model import Model
    from ostinato.backends.torch.paged import PagedMemory
    from ostinato.loop.layout import Layout, Tables
    from ostinato.loop.plan import Plan
    from ostinato.loop.start import Start
    from ostinato.models.blocks import ModelBlocks
    from ostinato.models.shape import Shape
    from ostinato.models.tensors import TensorTable

TWIN: Final = "twin"  # the native loop's twin, paced by Python: for tests alone


class TorchBackend:
    """Runs whatever there is a model of."""

    name = "torch"
    device: DeviceKind = "cpu"
    modes: tuple[str, ...] = ("eager",)
    activations: tuple[Activations, ...] = ("wide",)
    kv_types = tuple(KV_DTYPES)
    alone = False
    opens_encoders = False

    def why_not_here(self, mode: str, machine: Machine) -> str | None:
        return why_missing("torch", "the reference backend")

    def why_not(
        self, mode: str, shape: Shape, tensors: HeaderTensors, options: LoadOptions, machine: Machine
    ) -> str | None:
        kv_type = kv_type_of(options, dtype_of(options, machine.kind))
        return self.why_not_here(mode, machine) or why_not_kept("torch", self.kv_types, kv_type)

    def layout(self, shape: Shape, options: LoadOptions, kind: DeviceKind) -> WeightLayout:
        return "dense"

    def other_sums(self, shape: Shape, settled: Settled, chip: Chip | None) -> str | None:
        return None

    def needs(self, shape: Shape, tensors: HeaderTensors, settled: Settled) -> tuple[MemoryRow, ...]:
        weights = MemoryRow("weights", dense_bytes(tensors, settled))
        if not shape.causal:
            return (weights, LIBRARIES_WITH_TORCH)
        return without_empty(
            weights,
            *shared_rows(shape, settled),
            MemoryRow("step buffers", settled.n_slots * _step_bytes(shape, settled)),
            MemoryRow("prefill buffers (about)", prefill_bytes(shape, settled, CHUNK_ROWS["cpu"])),
            output_row(shape, CHUNK_ROWS["cpu"]),
            LIBRARIES_WITH_TORCH,
        )

    def prepare(self, settled: Settled, talk: Callable[[str], None]) -> None:
        use_threads(settled)
        if settled.dtype == "bfloat16" and settled.kind == "cpu":
            from ostinato.backends.torch.amx import make_bfloat16_safe

            make_bfloat16_safe(talk)

    def compile(self, blocks: ModelBlocks, table: TensorTable, settled: Settled) -> None:
        """There is nothing to compile."""

    def load(
        self, blocks: ModelBlocks, table: TensorTable, settled: Settled, progress: Progress | None = None
    ) -> Model:
        from ostinato.backends.torch.load import DenseLoader

        return loaded_with(DenseLoader, blocks, table, settled, progress)

    def open(self, model: ModelBlocks, settled: Settled, *, outbox_entries: int | None = None) -> Runner:
        if not model.shape.causal:
            raise Unsupported(f"{model.shape.family} is an encoder: it embeds text and generates none")
        return TorchRunner(model_of(model, settled), settled, outbox_entries=outbox_entries)


class TensorRunner(Runner):
    """Tables and memory are torch's tensors, on the model's device."""

    def _memory(self) -> PagedMemory:
        from ostinato.backends.torch.paged import PagedMemory

        settled = self.settled
        return PagedMemory.of(
            self.plain_model,
            settled.groups(self.plain_model.shape),
            n_slots=settled.n_slots,
            kv_type=settled.kv_type,
            page_tokens=settled.page_tokens,
        )

    def _tables(self, layout: Layout) -> Tables:
        from ostinato.backends.torch.tables import tensor_tables

        return tensor_tables(layout, self.plain_model.device, self.settled.grammar_bytes)

    def ranked(self, pooled: Floats) -> Floats:
        from ostinato.backends.torch.model import through_head

        return through_head(self.plain_model.rank, pooled)

    def projected(self, pooled: Floats) -> Floats:
        from ostinato.backends.torch.model import through_head

        return through_head(self.plain_model.project, pooled)

    def sequence_copy(self) -> SequenceCopy:
        from ostinato.backends.torch.sequence_copy import TorchSequenceCopy

        return TorchSequenceCopy(self._kept)


class TorchRunner(TensorRunner):
    """A model's own blocks, one row at a time."""

    def _made(self) -> tuple[Plan, Start, Chunks]:
        from ostinato.backends.torch.chunks import TorchChunks
        from ostinato.backends.torch.plan import TorchStep
        from ostinato.backends.torch.start import CpuEager, CpuLoop

        plan = TorchStep(self.plain_model, self._kept, self._shared, self.n_tokens).plan()
        kind = CpuLoop if self.settled.mode == TWIN else CpuEager
        start = kind(plan, self._shared, self.guard, self.changed.set)
        return plan, start, TorchChunks(self.plain_model, self._kept, self._shared, self.n_tokens)


# What backends of torch's tensors share


def use_threads(settled: Settled) -> None:
    """Tell torch, whose threads are one number for the whole process."""
    if settled.threads is not None:
        import torch

        torch.set_num_threads(settled.threads)


def loaded_with(
    loader: type[DenseLoader], blocks: ModelBlocks, table: TensorTable, settled: Settled, progress: Progress | None
) -> Model:
    """The model with its weights as a loader lays them out."""
    import torch

    from ostinato.backends.torch.load import load

    dtype, device = getattr(torch, settled.dtype), torch.device(settled.device)
    return load(blocks, table, dtype=dtype, device=device, progress=progress, loader=loader)


def model_of(blocks: ModelBlocks, settled: Settled) -> Model:
    """Loaded blocks as torch runs them, from any backend's loader."""
    import torch

    from ostinato.backends.torch.model import Model

    if isinstance(blocks, Model):
        return blocks
    use_threads(settled)
    dtype, device = getattr(torch, settled.dtype), torch.device(settled.device)
    return Model.of(blocks, dtype=dtype, device=device)


def dense_bytes(tensors: HeaderTensors, settled: Settled) -> int:
    return sum(tensor.n_elements for tensor in tensors.values()) * ITEM_BYTES[settled.dtype]


def prefill_bytes(shape: Shape, settled: Settled, rows: int) -> int:
    """Activations of a chunk in a layer: its input, heads, both halves of the MLP, its output."""
    heads = shape.widest(lambda a: a.qkv_width + a.out_width)
    inner = 3 * shape.widest_ff
    if shape.experts is not None:
        inner = max(inner, 3 * shape.experts.n_used * shape.experts.ff_width)
    parts = 2 * shape.n_layers * shape.per_layer_width
    row_bytes = (3 * shape.hidden + heads + inner + parts) * FLOAT_BYTES
    return rows * row_bytes + settled.n_slots * shape.hidden * FLOAT_BYTES


def _step_bytes(shape: Shape, settled: Settled) -> int:
    """Of one slot: the last row and its logits."""
    width = FLOAT_BYTES if shape.wide_residual else ITEM_BYTES[settled.dtype]
    return shape.hidden * width + shape.vocab * FLOAT_BYTES


TORCH: Final = TorchBackend()
