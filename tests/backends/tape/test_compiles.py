"""The whole kernel compiles for every chip, with a ring that fits there and registers that it has.

A few models together have every type of weights: some of them here, every one of them on every chip in `make soak`.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ostinato.backends.machine import SHARED_BYTES, Capability, Chip
from ostinato.backends.tape.backend import MOST_SLOTS
from ostinato.backends.tape.from_header import TapeBuild, tape_build
from ostinato.backends.tape.sizes import LEAST_STAGES, STATIC_BYTES, TapeSizes
from ostinato.backends.tape.start import tape_binary
from ostinato.backends.torch.model import Model
from ostinato.errors import HardwareCannot
from ostinato.lab.random_weights import RandomFile
from ostinato.loop.layout import Layout
from ostinato.models.named_shapes import named_shape
from ostinato.models.shape import Shape
from ostinato.options import Activations
from tests.backends.tape.loop import why_not_tape
from tests.backends.tape.models import FAMILIES, shape_of
from tests.backends.tape.resources import fits_registers, resources_of
from tests.backends.tape.test_plan import H200, headers_for, matrices_of
from tests.counts import soaking
from tests.named_model import random_model_of

# The widths of a model of a billion weights; one layer and few tokens, on which no code depends.
BILLION = {"hidden": 2048, "n_heads": 32, "n_kv_heads": 8, "ff_width": 8192, "vocab": 4096}


def one_layer(family: str) -> Shape:
    return shape_of(family, windows=(None,), **BILLION)


def unfilled_bytes(file: RandomFile, name: str) -> NDArray[np.uint8]:
    info = file.tensors[name]
    return np.zeros((prod(info.shape[:-1]), info.n_bytes // prod(info.shape[:-1])), np.uint8)


def unfilled(family: str, dtype: torch.dtype, mix: str | None) -> Model:
    shape, weight_type = one_layer(family), FAMILIES[family]
    with patch.object(RandomFile, "_make", unfilled_bytes):  # weights that are not multiplied
        return random_model_of(weight_type, shape, dtype, mix=mix)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "mix", "activations"),
    [
        ("llama", torch.bfloat16, None, "wide"),
        ("qwen3", torch.bfloat16, "q4_k_m", "wide"),
        ("llama", torch.float16, "q4_k_m", "int8"),
    ],
    ids=["bfloat16", "packed, with norms of q and k", "float16, packed, 8 bits of activations"],
)
def test_the_whole_kernel_compiles_for_the_card(
    family: str, dtype: torch.dtype, mix: str | None, activations: Activations
) -> None:
    model, layout = unfilled(family, dtype, mix), Layout(8, 64, BILLION["vocab"])
    assert why_not_tape(model, 8, "bf16") is None
    sizes = TapeSizes.of(
        model.shape, matrices_of(model), 8, H200, kv_type="bf16", page_tokens=64, max_pages=layout.max_pages
    )
    assert sizes.grid.n_blocks == H200.n_multiprocessors
    headers = headers_for(model, sizes, layout, "bf16", activations)
    try:
        binary = tape_binary(headers, H200, {})
    except HardwareCannot as error:
        pytest.skip(f"the tape was not compiled for {H200.exact_arch}: {error}")
    assert binary.startswith(b"\x7fELF")
    assert b".text.tape" in binary


# --- every chip ---

# Multiprocessors of a card of each capability; fewer blocks have more tiles each, and a little less room for the ring.
CARDS: dict[Capability, int] = {(8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}
# And those that are like another one by their limits.
ALL_CARDS: dict[Capability, int] = {**CARDS, (8, 7): 16, (10, 3): 160, (12, 1): 48}
SHAPES = ("smollm2-135m", "llama-1b", "llama-8b")
TYPES = ("bf16", "q4_k_m", "q5_k", "q6_k", "q8_0")  # together every type of the tape
# Bytes that the compiler spilled at most (docs/tape.md). Columns of SmolLM2 and Gemma 3 do not fill whole chunks, which
# takes more registers with packed weights.
SPILLED: dict[Capability, int] = {
    (8, 0): 512, (8, 6): 512, (8, 7): 512, (8, 9): 512, (9, 0): 0, (10, 0): 640, (10, 3): 640, (12, 0): 640,
    (12, 1): 640,
}  # fmt: skip
SPILLED_FOR_RESTS, WITH_RESTS = 1536, ("smollm2-135m", "gemma3-1b")


def chip_of(capability: Capability) -> Chip:
    return Chip(capability, ALL_CARDS[capability], SHARED_BYTES[capability])


def build_of(name: str, type: str, capability: Capability, n_slots: int) -> TapeBuild:
    shape = named_shape(name)
    tensors, packed = RandomFile(shape, type).tensors, type != "bf16"
    return tape_build(shape, tensors, chip_of(capability), n_slots=n_slots, context=8192, packed=packed)


def with_most_slots(name: str, type: str, capability: Capability) -> TapeBuild:
    for n_slots in range(MOST_SLOTS, 0, -1):
        with suppress(HardwareCannot):
            return build_of(name, type, capability, n_slots)
    raise AssertionError(f"{name} {type} does not fit {capability} with any number of slots")


@pytest.mark.parametrize("capability", ALL_CARDS)
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_ring_fits_on_every_chip(name: str, type: str, capability: Capability) -> None:
    sizes = with_most_slots(name, type, capability).sizes
    assert sizes.n_stages >= LEAST_STAGES
    assert sizes.shared_bytes + STATIC_BYTES <= SHARED_BYTES[capability]
    assert build_of(name, type, capability, 1).sizes.n_stages >= sizes.n_stages
    if SHARED_BYTES[capability] >= SHARED_BYTES[8, 0]:
        assert sizes.n_slots == MOST_SLOTS


def check_compiles(name: str, type: str, capability: Capability) -> None:
    made = with_most_slots(name, type, capability)
    try:
        used = resources_of(made)
    except HardwareCannot as error:
        pytest.skip(f"the tape was not compiled for {made.chip.arch}: {error}")
    print(f"{name} {type} {made.chip.arch}: {made.sizes.n_slots} slots, {made.sizes.n_stages} stages, {used}")
    assert used.static_bytes <= STATIC_BYTES
    assert fits_registers(made.sizes.n_threads, used.registers)
    allowed = SPILLED[capability] + (SPILLED_FOR_RESTS if name in WITH_RESTS else 0)
    assert used.stored_bytes <= allowed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "type", "capability"), [("llama-1b", "q4_k_m", (8, 0)), ("llama-8b", "bf16", (8, 9))])
def test_it_compiles_below_hopper(name: str, type: str, capability: Capability) -> None:
    check_compiles(name, type, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_norms_after_a_block_and_two_kinds_of_rope_compile(capability: Capability) -> None:
    check_compiles("gemma3-1b", "bf16", capability)


@pytest.mark.soak
@pytest.mark.parametrize("capability", ALL_CARDS)
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_every_type_compiles_for_every_chip(name: str, type: str, capability: Capability) -> None:
    if not soaking():
        pytest.skip("compiled with OSTINATO_SOAK=1 only")
    check_compiles(name, type, capability)


# --- the page ---


def ring_table() -> str:
    """Of docs/tape.md: the most slots of 8, and the stages that the ring has with them, and with one slot."""
    arches = [".".join(map(str, capability)) for capability in CARDS]
    lines = [f"| | {' | '.join(arches)} |", f"|---|{'---|' * len(CARDS)}"]
    for name in SHAPES:
        for type in ("bf16", "q4_k_m", "q8_0"):
            cells = []
            for capability in CARDS:
                most, alone = with_most_slots(name, type, capability).sizes, build_of(name, type, capability, 1).sizes
                cells.append(f"{most.n_slots}: {most.n_stages}, 1: {alone.n_stages}")
            lines.append(f"| {name} {type} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_page_has_the_rings_of_every_chip() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tape.md").read_text("utf-8")
    assert ring_table() in page, f"docs/tape.md should have:\n{ring_table()}"
