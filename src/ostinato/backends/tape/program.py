"""What the kernel of a model is compiled from: `shape.h`, the constants that follow from model, chip and options."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ostinato.backends.machine import Chip
from ostinato.backends.tape.backend import ACTIVATIONS, group_of
from ostinato.backends.tape.matrices import attention_of, has_after_norms, on_tape, sources_of
from ostinato.backends.tape.pack import TapeSource
from ostinato.backends.tape.partition import Partition, WeightType, make_partition
from ostinato.backends.tape.sizes import LEAST_SPLIT, SPLITS, TapeSizes, heads_of, is_quantised, multiplied_as
from ostinato.backends.tape.tape_weight import Tape
from ostinato.backends.torch.model import Model
from ostinato.loop.layout import Layout
from ostinato.models.shape import Shape
from ostinato.options import Activations, KVType

CLOCKED_A_LAYER: Final = 5

_TYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Traits(NamedTuple):
    """What the kernel is compiled for of a model, beside its shape and its matrices."""

    dtype: torch.dtype  # of activations, and of plain matrices
    embedding: torch.dtype
    has_bias: bool  # of q, k and v
    qk_norm_eps: float | None  # None: q and k have no norm
    after_norms: bool = False  # each block's output is normed before it is added

    @staticmethod
    def of(model: Model) -> Traits:
        attention = attention_of(model, 0)
        return Traits(
            model.dtype,
            model.embedding.dtype if isinstance(model.embedding, Tensor) else model.dtype,
            attention.qkv.bias is not None,
            None if attention.q_norm is None else attention.q_norm.eps,
            has_after_norms(model),
        )


def shape_header(
    shape: Shape,
    traits: Traits,
    sizes: TapeSizes,
    n_tokens: int,
    kv_type: KVType,
    weight_types: Collection[WeightType],
    activations: Activations,
) -> str:
    """`shape.h`: everything that the kernel is compiled for."""
    s, grid, heads = shape, sizes.grid, heads_of(shape)
    rope, temperature, layer_ropes = s.rope_kinds[0], heads.temperature, layer_ropes_of(s)
    numbers: dict[str, object] = {
        "N_BLOCKS": grid.n_blocks,
        "N_COMPUTE_WARPS": grid.n_compute_warps,
        "N_LOADER_THREADS": sizes.variant.loader_threads,
        "BULK_COPIES": int(sizes.variant.bulk_copies),
        "MOVE_REGISTERS": int(sizes.variant.move_registers),
        "LIFT_WEIGHTS": int(sizes.variant.lift_weights),
        "STAGES": sizes.n_stages,
        "STAGE_BYTES": sizes.stage_bytes,
        "IN_FLIGHT": sizes.in_flight,
        "TILES_AT_ONCE": grid.tiles_at_once,
        "ACTIVATION_BYTES": sizes.activation_bytes,
        "ATTENTION_PLAN_BYTES": sizes.attention_plan_bytes,
        "MAX_ROWS": sizes.n_slots,
        "N_LAYERS": s.n_layers,
        "HIDDEN": s.hidden,
        "FF": s.widest_ff,
        "N_HEADS": heads.n_heads,
        "N_KV_HEADS": heads.n_kv_heads,
        "GROUP": group_of(heads),
        "HEAD_WIDTH": heads.head_width,
        "N_TOKENS": n_tokens,
        "NORM_EPS": _float(s.norm_eps),
        "QK_NORM_EPS": _float(s.norm_eps if traits.qk_norm_eps is None else traits.qk_norm_eps),
        "QUERY_SCALE": _float(heads.query_scale),
        "EMBEDDING_SCALE": _float(_rounded(s.embedding_scale or 1.0, traits.embedding)),
        "OUT_SCALE": _float(s.multipliers.attention_out),
        "DOWN_SCALE": _float(s.multipliers.ff_down),
        "HEAD_SCALE": _float(s.multipliers.head),
        "ACTIVATION": ACTIVATIONS.index(s.activation),
        "SCORE_CAP": _float(heads.softcap or 0.0),
        "LOGIT_CAP": _float(s.logit_softcap or 0.0),
        "QUERY_TEMPERATURE": _float(0.0 if temperature is None else temperature.scale),
        "QUERY_SPAN": 1 if temperature is None else temperature.span,
        "ROPE_KINDS": len(s.rope_kinds),
        "ROPE_BY_LAYER": int(any(layer_ropes)),
        "LAYER_ROPES": ", ".join(map(str, layer_ropes)),
        "ROPE_SETS": s.n_rope_sets,
        "ROPE_HALF": rope.width // 2,
        "ROPE_NEIGHBOURS": int(rope.pairing == "neighbours"),
        "ROPE_AMPLITUDE": _float(rope.amplitude),
        "SPLITS": SPLITS,
        "LEAST_SPLIT": LEAST_SPLIT,
        "ACTIVATION_BF16": int(traits.dtype == torch.bfloat16),
        "KEPT": _TYPES[multiplied_as(kv_type)],
        "KEPT_Q8": int(is_quantised(kv_type)),
        "EMBEDDING_TYPE": _TYPES[traits.embedding],
        "HAS_BIAS": int(traits.has_bias),
        "HAS_QK_NORM": int(traits.qk_norm_eps is not None),
        "HAS_AFTER_NORMS": int(traits.after_norms),
        "AFTER_NORM_EPS": _float(s.after_norm_eps or s.norm_eps),
        **{f"HAS_WEIGHT_{weight_type.name}": int(weight_type in weight_types) for weight_type in WeightType},
        "WIDE": int(activations == "wide"),
        "DEADLINE_NS": f"{sizes.deadline_ns}LL",
        "N_CLOCKED": n_clocked(s),
    }
    lines = ["// Emitted by backends/tape/program.py; edit there.", "#pragma once", '#include "layout.h"']
    return "\n".join([*lines, *(f"#define {name} {value}" for name, value in numbers.items())]) + "\n"


def n_clocked(shape: Shape) -> int:
    """Marks of one block in a step: five of each layer, the head, the choice, the step boundary."""
    return 3 + CLOCKED_A_LAYER * shape.n_layers


def layer_ropes_of(shape: Shape) -> list[int]:
    """Of each layer, which of the model's kinds of rope it has; -1: none."""
    kinds = shape.rope_kinds
    return [-1 if one.rope is None else kinds.index(one.rope) for one in shape.attention.values()]


class TapeProgram(NamedTuple):
    """What the kernel of a model is compiled from: of weights their types and sizes, so they may be without memory."""

    sources: tuple[TapeSource, ...]
    names: tuple[str, ...]  # of the linear that each belongs to
    sizes: TapeSizes
    partition: Partition
    header: str

    @staticmethod
    def of(
        model: Model,
        layout: Layout,
        page_tokens: int,
        n_tokens: int,
        chip: Chip,
        *,
        kv_type: KVType,
        activations: Activations = "wide",
        n_compute_warps: int = 8,
    ) -> TapeProgram:
        names, sources = zip(*sources_of(model), strict=True)
        matrices = [source.matrix for source in sources]
        sizes = TapeSizes.of(
            model.shape,
            matrices,
            layout.n_slots,
            chip,
            n_compute_warps,
            kv_type=kv_type,
            page_tokens=page_tokens,
            max_pages=layout.max_pages,
            after_norms=has_after_norms(model),
        )
        types = {matrix.weight_type for matrix in matrices}
        header = shape_header(model.shape, Traits.of(model), sizes, n_tokens, kv_type, types, activations)
        return TapeProgram(sources, names, sizes, make_partition(matrices, sizes.grid), header)


def on_tape_ahead(model: Model, program: TapeProgram) -> Model:
    """The model that prompts will go through (`on_tape`) before weights are loaded, on a tape without memory."""
    shape, meta = model.shape, model.device
    tape = Tape(torch.empty(program.partition.n_bytes, dtype=torch.uint8, device=meta), program.partition, model.dtype)
    widened = torch.empty((shape.vocab, shape.hidden), dtype=model.dtype, device=meta)
    return on_tape(model, tape, model.embedding if isinstance(model.embedding, Tensor) else widened)


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))


def _float(value: float) -> str:
    return f"{value!r}f" if "." in repr(value) or "e" in repr(value) else f"{value!r}.0f"
