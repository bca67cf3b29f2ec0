"""The CPU's own backend: the native loop in C++, over weights in tiles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ostinato.backends.base import CHUNK_ROWS, MemoryRow, Settled, WeightLayout, dtype_of, kv_type_of, why_not_kept
from ostinato.backends.machine import Chip, DeviceKind, Machine
from ostinato.backends.memory_rows import FLOAT_BYTES, LIBRARIES, output_row, shared_rows, without_empty
from ostinato.backends.native.library import cpu_library, why_no_native
from ostinato.backends.native.pages import KV_TYPES, NativePages
from ostinato.backends.runner import Runner
from ostinato.files.unpack import Floats
from ostinato.loop.wake import FileWakeEvent
from ostinato.models.header import HeaderTensors
from ostinato.models.shape import DeltaShape, Mamba2Shape, MambaShape, Shape, ShortConvShape
from ostinato.options import Activations, LoadOptions

if TYPE_CHECKING:
    from ostinato.backends.base import Chunks, SequenceCopy
    from ostinato.backends.loading import Progress
    from ostinato.loop.plan import Plan
    from ostinato.loop.start import Start
    from ostinato.models.blocks import LoadedModel, ModelBlocks
    from ostinato.models.tensors import TensorTable

HEAD_LANES: Final = 16  # of a head's width, that are multiplied at once
# Of one activation as a number and in two planes, with its share of what a block has (tiles.h), and of one logit in the
# lists that a thread ranks it in (sampler.h).
PREPARED_BYTES: Final = 7
SAMPLER_BYTES: Final = 28


class NativeBackend:
    """Runs decoders of attention and of recurrent layers, and encoders, of any weight type."""

    name = "native"
    device: DeviceKind = "cpu"
    modes: tuple[str, ...] = ("loop",)
    activations: tuple[Activations, ...] = ("wide", "int8")
    kv_types = tuple(KV_TYPES)
    alone = False
    opens_encoders = True

    def why_not_here(self, mode: str, machine: Machine) -> str | None:
        return "the native loop is the CPU's" if machine.kind != "cpu" else why_no_native()

    def why_not(
        self, mode: str, shape: Shape, tensors: HeaderTensors, options: LoadOptions, machine: Machine
    ) -> str | None:
        if options.dtype not in ("auto", "float32"):  # its rows are float32
            return (
                f"--dtype {options.dtype} asks for dense weights, and the native loop multiplies packed ones: "
                "leave it out"
            )
        kv_type = kv_type_of(options, dtype_of(options, machine.kind))
        return (
            why_not_blocks(shape)
            or why_not_kept("the native loop", self.kv_types, kv_type)
            or self.why_not_here(mode, machine)
        )

    def layout(self, shape: Shape, options: LoadOptions, kind: DeviceKind) -> WeightLayout:
        return "tiles"

    def other_sums(self, shape: Shape, settled: Settled, chip: Chip | None) -> str | None:
        return None

    def needs(self, shape: Shape, tensors: HeaderTensors, settled: Settled) -> tuple[MemoryRow, ...]:
        from ostinato.backends.native.plan import chunk_rows
        from ostinato.backends.native.tile_weights import tiled_bytes

        step = settled.n_slots * (shape.hidden + shape.vocab) * FLOAT_BYTES
        rows = chunk_rows(shape, settled.max_pages * settled.page_tokens)
        workspace, most = (_workspace_bytes(shape, settled, n) for n in (min(rows, CHUNK_ROWS["cpu"]), rows))
        return without_empty(
            MemoryRow("weights", sum(tiled_bytes(name, tensor) for name, tensor in tensors.items())),
            *shared_rows(shape, settled),
            MemoryRow("step buffers", step),
            MemoryRow("native workspace (about)", workspace),
            MemoryRow("native workspace of long texts (at first use)", most - workspace, on_demand=True),
            *((output_row(shape, rows),) if shape.causal else ()),
            LIBRARIES,
        )

    def prepare(self, settled: Settled, talk: Callable[[str], None]) -> None:
        cpu_library(talk)

    def compile(self, blocks: ModelBlocks, table: TensorTable, settled: Settled) -> None:
        """`prepare` has compiled all of it."""

    def load(
        self, blocks: ModelBlocks, table: TensorTable, settled: Settled, progress: Progress | None = None
    ) -> LoadedModel:
        from ostinato.backends.native.tile_weights import load_tiles

        return load_tiles(blocks, table, settled.activations, settled.threads or 1, progress)

    def open(self, model: ModelBlocks, settled: Settled, *, outbox_entries: int | None = None) -> Runner:
        return NativeRunner(model, settled, outbox_entries=outbox_entries)


class NativeRunner(Runner):
    """The whole loop in C++, by this machine's object unless another is given."""

    def __init__(
        self,
        model: ModelBlocks,
        settled: Settled,
        *,
        outbox_entries: int | None = None,
        library: ctypes.CDLL | None = None,
    ) -> None:
        self._library = library or cpu_library()
        super().__init__(model, settled, outbox_entries=outbox_entries)

    def _memory(self) -> NativePages:
        return NativePages.of(
            self.plain_model.shape, self.groups, n_slots=self.settled.n_slots, kv_type=self.settled.kv_type
        )

    def sequence_copy(self) -> SequenceCopy:
        return self._copy

    def ranked(self, pooled: Floats) -> Floats:
        from ostinato.backends.native.ranking import ranked

        assert self.plain_model.ranking is not None
        return ranked(self.plain_model.ranking, pooled)

    def projected(self, pooled: Floats) -> Floats:
        from ostinato.backends.native.ranking import projected

        return projected(self.plain_model.projections, pooled)

    def _wake_event(self) -> FileWakeEvent:
        return FileWakeEvent()

    def _made(self) -> tuple[Plan, Start, Chunks]:
        from ostinato.backends.native.chunks import NativeChunks
        from ostinato.backends.native.plan import NativeStep, native_plan
        from ostinato.backends.native.sequence_copy import NativeSequenceCopy
        from ostinato.backends.native.start import NativeLoop

        model, activations = self.plain_model, self.settled.activations
        assert isinstance(self.changed, FileWakeEvent)
        self._copy = NativeSequenceCopy(self._kept)
        native = NativeStep(
            self._library,
            model,
            self._kept,
            self._shared,
            self.n_tokens,
            activations=activations,
            threads=self.settled.threads or 1,
            wake=self.changed.fd,
        )
        self.host.on_publish = native.host_published
        constants = f"{model.shape}, {self.n_tokens} tokens, {activations} activations"
        plan = native_plan(model, self._kept, self._shared, native, constants)
        return plan, NativeLoop(plan, native, self.guard), NativeChunks(native)


def why_not_blocks(shape: Shape) -> str | None:
    """Why the native loop cannot express a model; None where it can."""
    widths = {width for one in shape.attention.values() for width in (one.head_width, one.value_width)}
    odd = {width for width in widths if width % HEAD_LANES}
    checks = (
        (
            any(one.own_value_width not in (0, one.head_width) for one in shape.attention.values()),
            "the native loop wants values as wide as keys",
        ),
        (
            bool(odd),
            f"the native loop wants heads whose width is a multiple of {HEAD_LANES}, and this model's is "
            f"{min(odd, default=0)}",
        ),
        (
            shape.experts is not None and (shape.experts.latent_width or 0) > shape.hidden,
            "the native loop wants experts' latent space to be no wider than the model",
        ),
    )
    return next((reason for lacks, reason in checks if lacks), None)


def _workspace_bytes(shape: Shape, settled: Settled, chunk_rows: int) -> int:
    """The native loop's activations of a chunk's rows in a layer, and its sampler's lists."""
    rows = max(settled.n_slots, chunk_rows)
    heads, qkv = shape.widest(lambda a: a.out_width), shape.widest(lambda a: a.qkv_width)
    experts = shape.experts
    n_used, ff = 1, shape.widest_ff
    if experts is not None:
        n_used, ff = experts.n_used, max(shape.widest_ff, experts.ff_width, experts.shared_width)
    inner, recurrent_bytes = _recurrent_row(shape)
    widest = max(shape.hidden, heads, ff, inner)
    row_bytes = FLOAT_BYTES * (2 * shape.hidden + max(shape.hidden, heads, inner) + qkv + heads + 2 * n_used * ff)
    row_bytes += recurrent_bytes + _latent_row(shape, settled.threads or 1)
    row_bytes += FLOAT_BYTES * shape.n_layers * shape.per_layer_width
    row_bytes += PREPARED_BYTES * widest
    if experts is not None:
        row_bytes += n_used * (FLOAT_BYTES * shape.hidden + PREPARED_BYTES * widest)
        row_bytes += FLOAT_BYTES * (2 * experts.n_experts + (experts.latent_width or 0))
        row_bytes += FLOAT_BYTES * shape.hidden if experts.shared_width else 0
    sampled = shape.vocab if shape.causal else 0
    return rows * row_bytes + (SAMPLER_BYTES * (settled.threads or 1) + FLOAT_BYTES) * sampled


def _latent_row(shape: Shape, threads: int) -> int:
    """Of a row in latent attention: what is compressed and expanded, and of each thread a head's input."""
    n_bytes = 0
    for one in shape.attention.values():
        if one.latent is not None:
            own, rotated = one.latent, one.head_width - one.latent.kv_rank
            widest = one.n_heads * max(own.plain_width + rotated, own.value_width)
            floats = one.head_width + (own.q_rank or 0) + 2 * widest
            a_head = PREPARED_BYTES * (one.head_width + (own.q_rank or 0))
            n_bytes = max(n_bytes, FLOAT_BYTES * floats + PREPARED_BYTES * widest + threads * a_head)
    return n_bytes


def _recurrent_row(shape: Shape) -> tuple[int, int]:
    """Of a row in a recurrent block: the channels that are scanned, and the bytes of what it keeps until its end."""
    inner = own = 0
    for recurrent in shape.recurrent.values():
        match recurrent:
            case MambaShape(inner=channels):
                kept = 4 * channels + recurrent.dt_rank + 2 * recurrent.state
            case Mamba2Shape(inner=channels):
                kept = channels + 2 * recurrent.conv_width + 3 * recurrent.n_heads
            case ShortConvShape(width=channels):
                kept = 4 * channels
            case DeltaShape(inner=channels):
                kept = 2 * sum(recurrent.conv_parts) + channels + 4 * recurrent.n_heads
        inner, own = max(inner, channels), max(own, kept)
    beside = shape.recurrent.keys() & shape.attention.keys()
    return inner, FLOAT_BYTES * (own + (shape.hidden if beside else 0))


NATIVE: Final = NativeBackend()
