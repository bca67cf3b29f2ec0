"""The GPU's general backend: Triton kernels over packed or dense weights, in `loop`, `graph` and `eager`.

Attention, latent attention (`latent.py`), feed-forward and recurrent blocks (`mixers.py`) run as fused kernels, in
steps and in prompts.
"""

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
from ostinato.backends.cuda.chip import (
    LEAST_SHARED_BYTES,
    LEAST_TILE,
    STORED_BYTES,
    chunk_block,
    chunk_bytes,
    chunk_rows,
    latent_bytes,
    latent_cut,
    latent_width,
    other_cut,
    padded,
    product_bytes,
    step_block,
    step_bytes,
)
from ostinato.backends.machine import Chip, DeviceKind, Machine, cuda_version, why_too_old
from ostinato.backends.memory_rows import FLOAT_BYTES, output_row, shared_rows, without_empty
from ostinato.backends.runner import Runner
from ostinato.backends.torch.backend import TensorRunner, loaded_with, model_of, prefill_bytes
from ostinato.cache.kv_bytes import KV_FORMATS
from ostinato.errors import Unsupported
from ostinato.extras import install_command
from ostinato.models.header import HeaderTensors
from ostinato.models.shape import Shape
from ostinato.options import Activations, KVType, LoadOptions

if TYPE_CHECKING:
    from ostinato.backends.base import Chunks
    from ostinato.backends.cuda.start import CudaStart
    from ostinato.backends.loading import Progress
    from ostinato.backends.torch.kernels import Kernels
    from ostinato.backends.torch.load import DenseLoader
    from ostinato.backends.torch.model import Model
    from ostinato.files.checkpoint import TensorInfo
    from ostinato.loop.plan import Plan
    from ostinato.loop.start import Start
    from ostinato.models.blocks import ModelBlocks
    from ostinato.models.tensors import TensorTable

WHILE_NODES_SINCE: Final = 12_040  # the driver's number for CUDA 12.4
# Of one row: where attention over a long row is cut, each cut leaves sums of its own (triton/attend.py).
ATTENTION_CUTS: Final = 64
# Parts of an expert's columns, whose programs leave sums of their own (triton/experts.py).
EXPERT_PARTS: Final = 4
# The sampler keeps a scaled copy of the logits and a little beside it.
SAMPLER_COPIES: Final = 1.1
# What cuBLAS, Triton's modules and the captured graphs take on a GPU, generously.
GPU_LIBRARIES: Final = 256 << 20


class CudaBackend:
    """Runs every decoder whose heads are whole multiples of 16 wide, and latent attention of any width."""

    name = "cuda"
    device: DeviceKind = "cuda"
    modes: tuple[str, ...] = ("loop", "graph", "eager")
    activations: tuple[Activations, ...] = ("wide",)
    kv_types: tuple[KVType, ...] = ("f32", "f16", "bf16", "q8_0")
    alone = False
    opens_encoders = False

    def why_not_here(self, mode: str, machine: Machine) -> str | None:
        if machine.kind != "cuda":
            return "graphs are CUDA's"
        too_old = None if machine.chip is None else why_too_old(machine.chip)
        no_while = why_driver_has_no_while(machine.driver_cuda) if mode == "loop" else None
        return why_no_packages(machine) or too_old or no_while

    def why_not(
        self, mode: str, shape: Shape, tensors: HeaderTensors, options: LoadOptions, machine: Machine
    ) -> str | None:
        if machine.kind != "cuda":
            return f"{self.why_not_here(mode, machine)}, and this model is on the CPU"
        if mode == "eager" and not shape.causal:
            return None  # torch's own blocks encode, and no kernel of ours
        kv_type = kv_type_of(options, dtype_of(options, machine.kind))
        reason = why_not_blocks(shape) or why_not_kept("the GPU", self.kv_types, kv_type)
        reason = reason or why_not_latent(shape, kv_type)
        reason = reason or self.why_not_here(mode, machine)
        if reason is None and machine.chip is not None:
            reason = why_no_room(shape, tensors, kv_type, machine.chip)
        return reason

    def layout(self, shape: Shape, options: LoadOptions, kind: DeviceKind) -> WeightLayout:
        return plain_layout(options)

    def other_sums(self, shape: Shape, settled: Settled, chip: Chip | None) -> str | None:
        return other_cut(shape, settled.kv_type, chip)

    def needs(self, shape: Shape, tensors: HeaderTensors, settled: Settled) -> tuple[MemoryRow, ...]:
        weights = MemoryRow("weights", weight_bytes(tensors, settled))
        return without_empty(weights, *rows_beside_weights(shape, settled)) if shape.causal else (weights,)

    def prepare(self, settled: Settled, talk: Callable[[str], None]) -> None:
        from ostinato.backends.cuda.launcher import prepare_launcher

        prepare_launcher()

    def compile(self, blocks: ModelBlocks, table: TensorTable, settled: Settled) -> None:
        if not blocks.shape.causal:
            return  # torch's own blocks encode
        import torch

        from ostinato.backends.cuda.ahead import launches_of_chunks, launches_of_step
        from ostinato.backends.cuda.masks import mask_module
        from ostinato.backends.cuda.ready import compile_missing
        from ostinato.backends.cuda.start import boundary_module

        device, kernels, model = torch.device(settled.device), kernels_for(settled), model_ahead(blocks, table, settled)
        launches = [*launches_of_step(model, settled, kernels), *launches_of_chunks(model, settled, kernels)]
        compile_missing(launches, device)
        layout = settled.tables_layout(blocks.shape)
        boundary_module(layout, settled.page_tokens, device)
        if settled.grammar_bytes:
            mask_module(layout, device)

    def load(
        self, blocks: ModelBlocks, table: TensorTable, settled: Settled, progress: Progress | None = None
    ) -> Model:
        return loaded_with(loader_of(settled), blocks, table, settled, progress)

    def open(self, model: ModelBlocks, settled: Settled, *, outbox_entries: int | None = None) -> Runner:
        if not model.shape.causal:
            raise Unsupported(f"{model.shape.family} is an encoder: it embeds text and generates none")
        return CudaRunner(model_of(model, settled), settled, outbox_entries=outbox_entries)


class CudaRunner(TensorRunner):
    """Steps, and prompts in chunks, of fused kernels."""

    n_compiled_late = 0  # programs of kernels that were not ready when this was opened

    def _made(self) -> tuple[Plan, Start, Chunks]:
        from ostinato.backends.cuda.chunks import FusedChunks
        from ostinato.backends.cuda.launch import launches_in
        from ostinato.backends.cuda.ready import compile_missing

        plan, start = self._step()
        try:
            chunks = FusedChunks(self.plain_model, self._kept, self._shared, self.n_tokens, kernels_for(self.settled))
            # None where the backend compiled for these settings before it loaded the model (E-9).
            bound = [[node.run for node in plan.nodes], chunks.bound()]
            self.n_compiled_late = compile_missing(launches_in(bound), self.plain_model.device)
            chunks.capture(start.side)
        except BaseException:
            start.close()  # which may hold the card
            raise
        return plan, start, chunks

    def _step(self) -> tuple[Plan, CudaStart]:
        from ostinato.backends.cuda.plan import FusedPlan

        plan = FusedPlan(self.plain_model, self._kept, self._shared, self.n_tokens, kernels_for(self.settled)).plan()
        return plan, self._start(plan)

    def _start(self, plan: Plan) -> CudaStart:
        from ostinato.backends.cuda.graph import CudaGraph
        from ostinato.backends.cuda.start import CudaStart
        from ostinato.backends.cuda.while_graph import WhileGraph

        kinds: dict[str, type[CudaStart]] = {"eager": CudaStart, "graph": CudaGraph, "loop": WhileGraph}
        return kinds[self.settled.mode](plan, self._shared, self.guard, self.changed.set)


# Its kernels, before weights are read


def kernels_for(settled: Settled) -> Kernels:
    """Those of the GPU on which a model is to run."""
    from ostinato.backends.cuda import gpu
    from ostinato.backends.cuda.kernels import triton_kernels

    return triton_kernels(gpu.chip_of(settled.device))


def model_ahead(blocks: ModelBlocks, table: TensorTable, settled: Settled) -> Model:
    """The model as it will be loaded, without memory for its weights."""
    import torch

    from ostinato.backends.cuda.ahead import without_memory

    return without_memory(blocks, table, getattr(torch, settled.dtype), loader_of(settled))


# How it keeps weights


def plain_layout(options: LoadOptions) -> WeightLayout:
    """As the file has them, unless a dtype was asked for."""
    return "packed" if options.dtype == "auto" else "dense"


def loader_of(settled: Settled) -> type[DenseLoader]:
    from ostinato.backends.cuda.load import PackedLoader
    from ostinato.backends.torch.load import DenseLoader

    return PackedLoader if settled.weights == "packed" else DenseLoader


def weight_bytes(tensors: HeaderTensors, settled: Settled) -> int:
    """Of weights that stay as in the file where that is settled and kernels multiply them, else dense."""
    from ostinato.backends.cuda.packed_types import stays_packed

    packed, size = settled.weights == "packed", ITEM_BYTES[settled.dtype]

    def kept(name: str, tensor: TensorInfo) -> bool:
        # Of the one tensor of both, latent attention's matrices are taken apart (`PackedLoader.head_matrices`).
        return packed and stays_packed(tensor.type, tensor.shape) and not name.endswith("attn_kv_b.weight")

    return sum(tensor.n_bytes if kept(name, tensor) else tensor.n_elements * size for name, tensor in tensors.items())


# What it can run


def why_not_blocks(shape: Shape) -> str | None:
    """Why there are no kernels for a model's blocks; None where there are."""
    if not shape.causal:
        return f"{shape.family} is an encoder"
    for one in shape.attention.values():
        if one.latent is not None:
            if one.rope is None or one.window is not None or one.softcap is not None or one.temperature is not None:
                return "latent attention without rotary positions, or with windows, soft caps or query temperatures"
            continue
        if one.head_width % 16:
            return f"heads of width {one.head_width}; the kernels need a multiple of 16"
        if one.value_width != one.head_width:
            return f"values of width {one.value_width} beside keys of {one.head_width}; the kernels need them alike"
    return None


def why_not_latent(shape: Shape, kv_type: KVType) -> str | None:
    """Why keys of latent attention cannot be kept so: a block of Q8_0 has numbers of one part of a key."""
    for one in shape.attention.values():
        parts = one.head_width - one.value_width, one.value_width
        if one.latent is not None and not all(map(KV_FORMATS[kv_type].fits, parts)):
            rotated, rank = parts
            return f"latent attention over {kv_type} keys of {rotated} rotated numbers and {rank} compressed ones"
    return None


def why_no_room(shape: Shape, tensors: HeaderTensors, kv_type: KVType, chip: Chip) -> str | None:
    """Which kernel does not fit a block of a chip even with the fewest stages; None where all of them do."""
    needed: dict[str, int] = {}
    if chip.shared_bytes < LEAST_SHARED_BYTES:  # less than every known chip has
        from ostinato.backends.cuda.triton.tiles import least_bytes

        needed |= {f"the product with {tensor.type} weights": least_bytes(tensor) for tensor in tensors.values()}
    for one in shape.attention.values():
        if one.latent is not None:
            width, stored = latent_width(one.head_width - one.value_width, one.value_width), STORED_BYTES[kv_type]
            cut = latent_cut(chip, width, stored, LEAST_TILE)
            needed[f"latent attention over {kv_type} keys of {one.head_width}"] = latent_bytes(chip, width, stored, cut)
            continue
        width, multiplied, stored = padded(one.head_width), product_bytes(kv_type), STORED_BYTES[kv_type]
        block, rows = chunk_block(chip, width, multiplied), chunk_rows(chip, width, multiplied)
        what, group = f"over {kv_type} keys of {one.head_width}", one.n_heads // one.n_kv_heads
        needed[f"the prompt's attention {what}"] = chunk_bytes(width, multiplied, block, 1, rows=rows)
        needed[f"a step's attention {what}"] = step_bytes(width, stored, step_block(chip, width, stored, group), group)
    name = max(needed, key=lambda one: needed[one], default=None)
    if name is None or needed[name] <= chip.shared_bytes:
        return None
    return f"{name} needs {needed[name]} bytes of shared memory, and a block has {chip.shared_bytes} here"


def why_no_packages(machine: Machine) -> str | None:
    """Why a GPU cannot be used by our kernels at all; None where it can."""
    return f"not installed: {', '.join(machine.missing)}; type: {install_command('gpu')}" if machine.missing else None


def why_driver_has_no_while(version: int | None) -> str | None:
    """Why a driver of this version, as it numbers them (12040 is 12.4), has no WHILE nodes; None where it has."""
    if version is None:
        return "the NVIDIA driver does not tell which CUDA it knows; WHILE nodes need 12.4 or newer"
    if version < WHILE_NODES_SINCE:
        return f"the NVIDIA driver knows CUDA {cuda_version(version)}; WHILE nodes need 12.4 or newer"
    return None


# What it takes of memory


def rows_beside_weights(shape: Shape, settled: Settled) -> tuple[MemoryRow, ...]:
    # Rows are normed in float32 and multiplied in the model's type (outputs.py).
    beside_logits = shape.hidden * (FLOAT_BYTES + ITEM_BYTES[settled.dtype])
    mixing = _mixer_bytes(shape, CHUNK_ROWS["cuda"]) + _latent_bytes(shape, CHUNK_ROWS["cuda"])
    return (
        *shared_rows(shape, settled),
        MemoryRow("step buffers", _step_bytes(shape, settled)),
        MemoryRow("prefill buffers (about)", prefill_bytes(shape, settled, CHUNK_ROWS["cuda"]) + mixing),
        MemoryRow("workspace (about)", _workspace_bytes(shape, settled)),
        output_row(shape, CHUNK_ROWS["cuda"], beside_logits),
    )


def _step_bytes(shape: Shape, settled: Settled) -> int:
    """Between the nodes of a step, by the class that allocates them, on a device where nothing is."""
    import torch

    from ostinato.backends.cuda.plan import StepBuffers

    step = StepBuffers.of(shape, settled.n_slots, torch.device("meta"))
    beside = _mixer_bytes(shape, settled.n_slots) + _latent_bytes(shape, settled.n_slots)
    return sum(buffer.nbytes for buffer in step.named.values()) + beside


def _mixer_bytes(shape: Shape, rows: int) -> int:
    """Between the stages of recurrent blocks, likewise."""
    import torch

    from ostinato.backends.cuda.mixers import MixerBuffers

    if not shape.recurrent:
        return 0
    made = MixerBuffers.of(shape.recurrent.values(), rows, torch.float32, torch.device("meta"))
    return sum(buffer.nbytes for buffer in made.named.values())


def _latent_bytes(shape: Shape, rows: int) -> int:
    """Between the stages of latent attention, likewise."""
    import torch

    from ostinato.backends.cuda.latent import LatentBuffers

    made = LatentBuffers.of(shape, rows, torch.float32, torch.device("meta"))
    return 0 if made is None else sum(buffer.nbytes for buffer in made.named.values())


def _workspace_bytes(shape: Shape, settled: Settled) -> int:
    """What kernels keep between their parts, and what the libraries take for themselves."""
    per_slot = shape.widest(lambda a: a.n_heads * (a.value_width + 2))
    attention = settled.n_slots * ATTENTION_CUTS * per_slot * FLOAT_BYTES
    sampler = int(SAMPLER_COPIES * settled.n_slots * shape.vocab * FLOAT_BYTES)
    return attention + _experts_bytes(shape, settled.n_slots) + sampler + GPU_LIBRARIES


def _experts_bytes(shape: Shape, n_slots: int) -> int:
    """The sums that programs of routed experts leave each other."""
    if shape.experts is None:
        return 0
    widest = max(2 * shape.experts.ff_width, shape.experts.latent_width or shape.hidden)
    return n_slots * shape.experts.n_used * EXPERT_PARTS * widest * FLOAT_BYTES


CUDA: Final = CudaBackend()
