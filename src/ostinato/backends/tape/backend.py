"""The fastest backend: the persistent kernel, which streams weights laid out as a tape and fills the card.

Prompts go through the kernels of `backends/cuda`, over a plain copy of the weights or over the tape itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import TYPE_CHECKING, Final

from ostinato.backends.base import (
    ITEM_BYTES,
    PAGE_TOKENS,
    MemoryRow,
    Settled,
    WeightLayout,
    dtype_of,
    kv_type_of,
    why_not_kept,
)
from ostinato.backends.cuda.backend import (
    CUDA,
    CudaRunner,
    kernels_for,
    loader_of,
    model_ahead,
    plain_layout,
    rows_beside_weights,
    weight_bytes,
    why_driver_has_no_while,
    why_no_packages,
)
from ostinato.backends.cuda.chip import other_cut
from ostinato.backends.machine import Chip, DeviceKind, Machine, why_too_old
from ostinato.backends.memory_rows import without_empty
from ostinato.backends.tape.partition import WEIGHT_TYPES, TapeMatrix, WeightType, matrix_bytes, why_mixed
from ostinato.backends.torch.backend import loaded_with, model_of
from ostinato.errors import HardwareCannot
from ostinato.models.header import (
    HeaderTensors,
    has_layer_norm,
    has_learned_positions,
    has_norm_after_block,
    has_plain_mlp,
)
from ostinato.options import Activations, KVType, LoadOptions

if TYPE_CHECKING:
    from ostinato.backends.cuda.start import CudaStart
    from ostinato.backends.loading import Progress
    from ostinato.backends.runner import Runner
    from ostinato.backends.tape.program import TapeProgram
    from ostinato.backends.torch.model import Model
    from ostinato.files.checkpoint import TensorInfo
    from ostinato.loop.layout import Layout
    from ostinato.loop.plan import Plan
    from ostinato.models.blocks import ModelBlocks
    from ostinato.models.shape import AttentionShape, Multipliers, Shape
    from ostinato.models.tensors import TensorTable

HEAD_WIDTHS: Final = (64, 96, 128, 256)
ACTIVATIONS: Final = ("silu", "gelu_tanh", "gelu")  # in the order of activation.h
HALVES: Final = ("bfloat16", "float16")
MOST_SLOTS: Final = 8  # columns of a tensor core's product
MOST_QUERIES: Final = 8  # that attend at once: columns too
LEAST_PART: Final = 3  # of the queries of a KV head: with smaller ones, keys would be read too often
EMBEDDING: Final = "token_embd.weight"
_QKV: Final = ("attn_qkv", "attn_q", "attn_k", "attn_v")
_BIASED: Final = tuple(f".{name}.bias" for name in _QKV)


class TapeBackend:
    """Runs models of causal attention with RMS norms, gated feed-forward blocks and one kind of rotary positions."""

    name = "tape"
    device: DeviceKind = "cuda"
    modes: tuple[str, ...] = ("persistent",)
    activations: tuple[Activations, ...] = ("wide", "int8")
    kv_types: tuple[KVType, ...] = ("f32", "f16", "bf16", "q8_0")
    alone = True
    opens_encoders = False

    def why_not_here(self, mode: str, machine: Machine) -> str | None:
        if machine.kind != "cuda":
            return "the persistent kernel is CUDA's"
        # Its module is loaded by the same packages as a WHILE graph, on the same drivers.
        reason = why_no_packages(machine) or why_driver_has_no_while(machine.driver_cuda)
        return reason or (None if machine.chip is None else why_too_old(machine.chip))

    def why_not(
        self, mode: str, shape: Shape, tensors: HeaderTensors, options: LoadOptions, machine: Machine
    ) -> str | None:
        if machine.kind != "cuda":
            return f"{self.why_not_here(mode, machine)}, and this model is on the CPU"
        dtype = dtype_of(options, machine.kind)
        kv_type = kv_type_of(options, dtype)
        packed = plain_layout(options) == "packed"
        return (
            why_not_shape(shape)
            or why_not_rows(options.slots, dtype)
            or why_not_kept("the tape", self.kv_types, kv_type)
            or why_not_tensors(shape, tensors, packed=packed)
            or self.why_not_here(mode, machine)
            or why_too_large(shape, tensors, options, kv_type, machine.chip, packed=packed)
        )

    def layout(self, shape: Shape, options: LoadOptions, kind: DeviceKind) -> WeightLayout:
        return plain_layout(options)

    def other_sums(self, shape: Shape, settled: Settled, chip: Chip | None) -> str | None:
        if chip is None:
            return None
        from ostinato.backends.tape.sizes import Variant

        # A tensor core aligns products by the exponents of their operands, so sums of lifted weights end in other bits.
        lifts = settled.weights == "packed" and settled.dtype == "bfloat16" and Variant.of(chip).lift_weights
        found = (other_cut(shape, settled.kv_type, chip), "lifted weights" if lifts else None)
        return ", ".join(filter(None, found)) or None

    def needs(self, shape: Shape, tensors: HeaderTensors, settled: Settled) -> tuple[MemoryRow, ...]:
        plain = settled.prompts == "plain"
        weights = weight_bytes(tensors, settled) if plain else beside_tape_bytes(shape, tensors, settled)
        return without_empty(
            MemoryRow("weights", weights),
            MemoryRow("tape", tape_bytes(shape, tensors, settled)),
            *rows_beside_weights(shape, settled),
        )

    def prepare(self, settled: Settled, talk: Callable[[str], None]) -> None:
        from ostinato.backends.cuda.launcher import prepare_launcher

        prepare_launcher()

    def compile(self, blocks: ModelBlocks, table: TensorTable, settled: Settled) -> None:
        try:
            self._compile(blocks, table, settled)
        except HardwareCannot:
            if settled.fallback is None:
                raise
            CUDA.compile(blocks, table, settled)  # since `open` fails too, and the mode below takes over

    def _compile(self, blocks: ModelBlocks, table: TensorTable, settled: Settled) -> None:
        import torch

        from ostinato.backends.cuda.ahead import launches_of_chunks
        from ostinato.backends.cuda.ready import compile_missing
        from ostinato.backends.tape.program import on_tape_ahead
        from ostinato.backends.tape.start import tape_kernel

        device, layout, page = torch.device(settled.device), settled.tables_layout(blocks.shape), settled.page_tokens
        model = model_ahead(blocks, table, settled)
        program = _program(model, layout, settled)
        tape_kernel(program.header, program.sizes, layout, page, device)
        read = model if settled.prompts == "plain" else on_tape_ahead(model, program)
        compile_missing(launches_of_chunks(read, settled, kernels_for(settled)), device)

    def load(
        self, blocks: ModelBlocks, table: TensorTable, settled: Settled, progress: Progress | None = None
    ) -> Model:
        import torch

        from ostinato.backends.tape.matrices import without_matrices_on

        if settled.prompts == "plain":
            return loaded_with(loader_of(settled), blocks, table, settled, progress)
        on_host = loaded_with(loader_of(settled), blocks, table, replace(settled, device="cpu"), progress)
        return without_matrices_on(on_host, torch.device(settled.device))

    def open(self, model: ModelBlocks, settled: Settled, *, outbox_entries: int | None = None) -> Runner:
        return TapeRunner(model_of(model, settled), settled, outbox_entries=outbox_entries)


class TapeRunner(CudaRunner):
    """One kernel runs every step; prompts as in `backends/cuda`."""

    def _step(self) -> tuple[Plan, CudaStart]:
        import torch

        from ostinato.backends.tape.matrices import why_not_values
        from ostinato.backends.tape.plan import TapeStep, tape_plan
        from ostinato.backends.tape.start import TapeLoop

        reason = why_not_values(self.plain_model)
        if reason is not None:  # a header does not state these
            raise HardwareCannot(reason)
        program = _program(self.plain_model, self._shared.layout, self.settled)
        on_tape = self.settled.prompts == "tape"
        step = TapeStep(self.plain_model, self._kept, self._shared, program, on_tape=on_tape)
        self.plain_model = step.model
        torch.cuda.empty_cache()  # what matrices were laid out in, one at a time
        plan = tape_plan(step.model, self._kept, self._shared, step)
        return plan, TapeLoop(plan, step, self._shared, self.guard, self.changed.set)


def _program(model: Model, layout: Layout, settled: Settled) -> TapeProgram:
    from ostinato.backends.cuda import gpu
    from ostinato.backends.tape.program import TapeProgram

    given = model, layout, settled.page_tokens, settled.tokens_of(model.shape), gpu.chip_of(settled.device)
    return TapeProgram.of(*given, kv_type=settled.kv_type, activations=settled.activations)


# What it can run


def why_not_shape(shape: Shape) -> str | None:
    """Why the kernel cannot express a shape; None where it can."""
    heads = {replace(one, window=None, rope=None) for one in shape.attention.values()}
    ropes = {(rope.width, rope.pairing, rope.amplitude) for rope in shape.rope_kinds}
    first = next(iter(heads), None)
    if shape.recurrent or len(shape.attention) < shape.n_layers or not shape.causal or first is None:
        return "the tape does not know layers that are not causal attention"
    ff_width = shape.widest_ff
    checks = (
        (shape.experts is None, "experts"),
        (_has_known_factors(shape.multipliers), "factors on what goes into attention, or on the gate"),
        (first.qk_norm == "heads", "QK norms over whole rows or after the rotation"),
        (not shape.parallel, "attention and feed-forward in parallel"),
        (not shape.embedding_norm, "a norm behind the embedding"),
        (first.latent is None, "multi-head latent attention"),
        (not first.gated, "gates on the output of attention"),
        (not first.sinks, "attention sinks"),
        (all(one.kv_from is None for one in heads), "layers that read the keys and values of another"),
        (not first.value_norm, "norms of values"),
        (not shape.per_layer_width, "a second embedding of which every layer takes a part"),
        (shape.activation in ACTIVATIONS, f"the activation {shape.activation}: it has {', '.join(ACTIVATIONS)}"),
        (not shape.mlp_bias, "a bias in the feed-forward block"),
        (first.head_width in HEAD_WIDTHS, f"heads of width {first.head_width}: it has {_list(HEAD_WIDTHS)}"),
        (first.value_width == first.head_width, "values that are not as wide as keys"),
        (
            group_of(first) >= min(first.group, LEAST_PART),
            f"{first.group} query heads per KV head: it has 1 to {MOST_QUERIES}, or a multiple of a number from "
            f"{LEAST_PART} to {MOST_QUERIES}",
        ),
        (shape.hidden % 64 == 0, f"a hidden size of {shape.hidden}: it wants a multiple of 64"),
        (ff_width > 0 and ff_width % 64 == 0, f"a feed-forward size of {ff_width}: it wants a multiple of 64"),
        (len(ropes) > 0, "models without rotary positions"),
        (len(ropes) < 2, "rotary positions of different widths, pairs or amplitudes"),
        (len(heads) == 1, "layers with different heads"),
        (len({one.ff_width for one in shape.layers}) == 1, "layers with different feed-forward sizes"),
    )
    return next((f"the tape does not know {what}" for known, what in checks if not known), None)


def group_of(heads: AttentionShape) -> int:
    """Query heads that attend at once: all of a KV head or, where those are too many for one product, the largest equal
    part of them.

    >>> from ostinato.models.shape import AttentionShape
    >>> group_of(AttentionShape(n_heads=48, n_kv_heads=2, head_width=128, value_width=128, query_scale=1.0))
    8
    """
    return next(n for n in range(MOST_QUERIES, 0, -1) if heads.group % n == 0)


def _has_known_factors(multipliers: Multipliers) -> bool:
    """Whether only what attention, the feed-forward block and the head give is multiplied."""
    known = replace(multipliers, attention_out=1.0, mixer_out=1.0, ff_down=1.0, head=1.0)
    return known == type(multipliers)()


def why_not_rows(n_slots: int, dtype: str) -> str | None:
    """Why it cannot have so many slots, or rows of this type; None where it can."""
    if n_slots > MOST_SLOTS:
        return f"the tape has up to {MOST_SLOTS} slots, and {n_slots} are asked for"
    if dtype not in HALVES:
        return f"the tape multiplies bfloat16 or float16, and this model's rows are {dtype}"
    return None


def why_not_tensors(shape: Shape, tensors: HeaderTensors, *, packed: bool) -> str | None:
    """Why it cannot lay out a model's tensors; None where it can, as far as their types are known."""
    if has_norm_after_block(tensors) and not all(f"blk.{n}.{at}.weight" in tensors for n, at in _norms(shape)):
        return "the tape wants norms before every block, and after all of them or none"
    if has_layer_norm(tensors) or has_learned_positions(tensors) or has_plain_mlp(shape, tensors):
        return "the tape wants RMS norms, rotary positions and a gate in the feed-forward block"
    biased = next((name for name in tensors if name.endswith(".bias") and not name.endswith(_BIASED)), None)
    if biased is not None:
        return f"the tape has no bias of {biased.removesuffix('.bias')}"
    for name, parts in linears_of(shape, tensors):
        types = [kept_as(tensor, packed=packed) for tensor in parts]
        lacks = next((type for type in types if type != PLAIN and type not in WEIGHT_TYPES), None)
        if lacks is not None:
            return f"{name}: the tape has no {lacks} weights"
        if name.endswith("gate_up") and len({WEIGHT_TYPES.get(type, WeightType.HALF) for type in types}) > 1:
            return f"{name}: {why_mixed(types)}"
    return None


def _norms(shape: Shape) -> Iterator[tuple[int, str]]:
    """The norms of a model that has them before and after each block."""
    return product(range(shape.n_layers), ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"))


def why_too_large(
    shape: Shape, tensors: HeaderTensors, options: LoadOptions, kv_type: KVType, chip: Chip | None, *, packed: bool
) -> str | None:
    """Why a block of this card has no room for a model that the tape knows; None where it has."""
    if chip is None:
        return None
    from ostinato.backends.tape.sizes import TapeSizes

    page = PAGE_TOKENS["cuda"]
    max_pages = -(-(options.context or shape.default_context) // page)
    matrices, after_norms = matrices_of(shape, tensors, packed=packed), has_norm_after_block(tensors)
    room = {"page_tokens": page, "max_pages": max_pages}
    try:
        TapeSizes.of(shape, matrices, options.slots, chip, kv_type=kv_type, after_norms=after_norms, **room)
    except HardwareCannot as error:
        return str(error)
    return None


# Its matrices, by the header

PLAIN: Final = "plain"  # a half of the model's own type


def kept_as(tensor: TensorInfo, *, packed: bool) -> str:
    """The type that a matrix has when it is laid out: its own where it stays packed."""
    from ostinato.backends.cuda.packed_types import stays_packed

    return tensor.type if packed and stays_packed(tensor.type, tensor.shape) else PLAIN


def linears_of(shape: Shape, tensors: HeaderTensors) -> Iterator[tuple[str, list[TensorInfo]]]:
    """Every product of a model in the tape's order, with the tensors that are multiplied together."""
    for number in range(shape.n_layers):
        at = f"blk.{number}."
        groups = {"qkv": _QKV, "out": ("attn_output",), "gate_up": ("ffn_gate", "ffn_up"), "down": ("ffn_down",)}
        for name, members in groups.items():
            found = [tensors.get(f"{at}{member}.weight") for member in members]
            yield f"layer.{number}.{name}", [tensor for tensor in found if tensor is not None]
    yield "head", [tensors[EMBEDDING if shape.tied_head else "output.weight"]]


def matrices_of(shape: Shape, tensors: HeaderTensors, *, packed: bool) -> list[TapeMatrix]:
    """The matrices of the tape in its order: q, k and v are one or, where their types differ, one for each run."""
    found = []
    for name, parts in linears_of(shape, tensors):
        runs = [list(run) for _, run in groupby(parts, lambda tensor: kept_as(tensor, packed=packed))]
        for run in runs if name.endswith("qkv") else [parts]:
            kind = WEIGHT_TYPES.get(kept_as(run[0], packed=packed), WeightType.HALF)
            rows, columns = sum(tensor.shape[0] for tensor in run), run[0].shape[1]
            found.append(TapeMatrix(kind, rows, columns, name.endswith("gate_up")))
    return found


# What it takes of memory


def tape_bytes(shape: Shape, tensors: HeaderTensors, settled: Settled) -> int:
    """Bytes of the tape, and of the plain embedding that its kernel reads where the weights have a packed one."""
    packed, embedding = settled.weights == "packed", tensors[EMBEDDING]
    widened = 0 if kept_as(embedding, packed=packed) == PLAIN else embedding.n_elements * ITEM_BYTES[settled.dtype]
    matrices = matrices_of(shape, tensors, packed=packed)
    return widened + sum(matrix_bytes(matrix.weight_type, matrix.rows, matrix.columns) for matrix in matrices)


def beside_tape_bytes(shape: Shape, tensors: HeaderTensors, settled: Settled) -> int:
    """Bytes of what lies beside the tape where prompts read it: the embedding (of packed weights it is counted with the
    tape), all that is no matrix, and room for one matrix: each comes alone when it is loaded, and before its product.
    """
    rows = max(shape.widest(lambda a: a.qkv_width), 2 * shape.widest_ff)
    room = max(rows, 0 if shape.tied_head else shape.vocab) * shape.hidden
    for name, tensor in tensors.items():
        is_embedding = name == EMBEDDING and kept_as(tensor, packed=settled.weights == "packed") == PLAIN
        room += tensor.n_elements if len(tensor.shape) != 2 or is_embedding else 0
    return room * ITEM_BYTES[settled.dtype]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


TAPE: Final = TapeBackend()
