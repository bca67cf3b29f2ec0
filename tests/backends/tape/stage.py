"""A stage for one phase of the tape: sizes, a slot table and hops, made up, for kernels that include the real headers.

A test kernel takes its own struct of pointers and numbers, and sets those members of `Tape` that its phase reads: so
nothing here repeats the struct of parts.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from torch import Tensor

from ostinato.loop.layout import Layout
from tests.backends.tape.emulator import Program, compiled, constants

TYPES: Final = {"f32": "TYPE_F32", "f16": "TYPE_F16", "bf16": "TYPE_BF16"}

_SHAPE: Final[Mapping[str, int | str]] = {
    "N_BLOCKS": 2,
    "N_COMPUTE_WARPS": 2,
    "N_LOADER_THREADS": 32,
    "STAGES": 2,
    "STAGE_BYTES": 128,
    "IN_FLIGHT": 1,
    "TILES_AT_ONCE": 4,
    "ACTIVATION_BYTES": 1 << 17,
    "ATTENTION_PLAN_BYTES": 1 << 14,
    "MAX_ROWS": 8,
    "N_LAYERS": 2,
    "HIDDEN": 192,
    "FF": 256,
    "N_HEADS": 4,
    "N_KV_HEADS": 2,
    "GROUP": 2,
    "HEAD_WIDTH": 64,
    "N_TOKENS": 64,
    "NORM_EPS": "1e-5f",
    "QK_NORM_EPS": "1e-6f",
    "QUERY_SCALE": "0.125f",
    "ROPE_SETS": 1,
    "ROPE_HALF": 32,
    "ROPE_NEIGHBOURS": 0,
    "ROPE_AMPLITUDE": "1.0f",
    "SPLITS": 16,
    "LEAST_SPLIT": 32,
    "ACTIVATION_BF16": 1,
    "KEPT": "TYPE_BF16",
    "EMBEDDING_TYPE": "TYPE_BF16",
    "HAS_BIAS": 0,
    "HAS_QK_NORM": 0,
    "WIDE": 1,
    "N_CLOCKED": 1,
}

# What every kernel of these tests begins with.
PLAYER: Final = """
DEVICE ComputeThread compute_warp(u32 tag) {
    ComputeThread p;
    p.thread = thread();
    p.warp = p.thread / 32;
    p.lane = p.thread % 32;
    p.stage = p.phase = 0;
    p.tag = tag;
    p.shared = (Shared*)shared_memory();
    p.ring = shared_memory() + RING_AT;
    p.activations = (u16*)(p.ring + STAGES * STAGE_BYTES);
    return p;
}
"""
SHARED_BYTES: Final = 1 << 18


def headers(layout: Layout, page_tokens: int, **shape: int | str) -> dict[str, str]:
    """shape.h and layout.h of a made-up model."""
    text = constants(**{**_SHAPE, **shape}).replace("#pragma once\n", '#pragma once\n#include "layout.h"\n', 1)
    return {"shape.h": text, "layout.h": layout.header(page_tokens)}


def program(source: str, layout: Layout, page_tokens: int = 16, **shape: int | str) -> Program:
    return compiled(source, headers=headers(layout, page_tokens, **shape))


def words(values: np.ndarray, tag: int) -> np.ndarray:
    """A hop's words: 32 bits each of `values` below, the tag above."""
    return np.ascontiguousarray(values).view(np.uint32).astype(np.uint64) | np.uint64(tag << 32)


def address(memory: np.ndarray | Tensor) -> int:
    return memory.data_ptr() if isinstance(memory, Tensor) else memory.ctypes.data


def given(**members: Any) -> ctypes.Structure:
    """A struct: pointers to arrays and tensors, and ints (32 bits), in the order given; the arrays are kept alive."""
    fields: list[tuple[str, Any]] = [
        (name, ctypes.c_int32 if isinstance(value, int) else ctypes.c_void_p) for name, value in members.items()
    ]
    made = type("Given", (ctypes.Structure,), {"_fields_": fields})()
    for name, value in members.items():
        setattr(made, name, value if isinstance(value, int) else address(value))
    made.kept = members
    return made  # type: ignore[no-any-return]  # made here, of a type that has no other name
