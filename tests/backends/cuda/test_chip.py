"""What follows from a chip's limits: stages, and the cut of the prompt's attention; nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch

from ostinato.backends.cuda.backend import why_no_room
from ostinato.backends.cuda.chip import (
    LEAST_SHARED_BYTES,
    LEAST_TILE,
    LatentCut,
    choices,
    chunk_block,
    chunk_bytes,
    chunk_rows,
    latent_bytes,
    latent_cut,
    other_cut,
    reads_shared,
    registers_alone,
    stages_that_fit,
    step_block,
    step_bytes,
)
from ostinato.backends.cuda.packed import Packed
from ostinato.backends.cuda.packed_types import PACKED_TYPES
from ostinato.backends.cuda.triton import experts
from ostinato.backends.cuda.triton.gemm import GEMM_TILES
from ostinato.backends.cuda.triton.gemm import fitted as fitted_gemm
from ostinato.backends.cuda.triton.tiles import ROWS, Given, fitted, iteration_bytes, tile_for
from ostinato.backends.machine import SHARED_BYTES, TUNED, Chip, pretended
from ostinato.backends.torch.ops.matmul import Epilogue
from ostinato.models.named_shapes import named_shape

CHIPS = [Chip(capability, 20, shared) for capability, shared in SHARED_BYTES.items()]
SMALLEST = next(chip for chip in CHIPS if chip.shared_bytes == LEAST_SHARED_BYTES)
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Of each class of outputs and columns, and columns that are odd numbers of blocks.
SHAPES = [(n, k) for n in (576, 6144, 8192, 28_672, 128_256) for k in (256, 576, 2048, 4096, 14_336)]


def weight_of(type: str, n: int, k: int) -> torch.Tensor | Packed | None:
    if type in DENSE:
        return torch.empty(n, k, dtype=DENSE[type], device="meta")
    whole = 256 if type.endswith("_K") else 32
    return Packed(type, n, k, ()) if k % whole == 0 else None


def x_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="meta")


@pytest.mark.slow
@pytest.mark.parametrize("type", [*DENSE, *PACKED_TYPES])
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.arch)
def test_every_product_fits_every_chip_and_differs_in_stages_alone(type: str, chip: Chip) -> None:
    """So no chip changes the cut of K, which decides the bits, and no digest names another arithmetic for it."""
    inputs = [Given(rows, *each) for rows in (ROWS, experts.ROWS) for each in ((4, 0), (2, 0), (4, 4), (4, 8))]
    for (n, k), epilogue, given in product(SHAPES, get_args(Epilogue), inputs):
        weight = weight_of(type, n, k)
        if weight is None:
            continue
        tuned = tile_for(weight, epilogue)
        cut = fitted(tuned, weight, epilogue, given, chip)
        assert replace(cut, num_stages=tuned.num_stages) == tuned
        assert (1 if given.norm_bytes else 2) <= cut.num_stages <= tuned.num_stages
        needed = iteration_bytes(weight, cut, epilogue, given)
        assert (cut.num_stages - 1) * needed <= chip.shared_bytes
        # No stage is given away.
        if not given.norm_bytes:
            assert cut.num_stages == tuned.num_stages or cut.num_stages * needed > chip.shared_bytes


@pytest.mark.parametrize("type", [*DENSE, *PACKED_TYPES])
def test_where_tiles_were_tuned_they_are_as_in_the_table(type: str) -> None:
    for (n, k), epilogue in product(SHAPES, get_args(Epilogue)):
        weight = weight_of(type, n, k)
        if weight is not None:
            tuned = tile_for(weight, epilogue)
            assert fitted(tuned, weight, epilogue, Given(ROWS, 4, 8), TUNED) is tuned


@pytest.mark.parametrize(
    ("type", "n", "k", "epilogue", "item_bytes", "n_bytes"),
    [
        ("BF16", 16_384, 2048, "gated", 2, 110_592),
        ("Q8_0", 2048, 2048, "add", 4, 124_416),
        ("Q4_0", 2048, 8192, "add", 4, 125_952),
        ("Q5_K", 2048, 8192, "add", 4, 176_128),
    ],
)
def test_what_hopper_has_room_for_has_one_stage_less_on_a_card_of_99_kb(
    type: str, n: int, k: int, epilogue: Epilogue, item_bytes: int, n_bytes: int
) -> None:
    """The bytes are what the compiler asks for, to the byte."""
    weight, given = weight_of(type, n, k), Given(ROWS, item_bytes)
    assert weight is not None
    tuned = tile_for(weight, epilogue)
    needed = iteration_bytes(weight, tuned, epilogue, given)
    assert (tuned.num_stages - 1) * needed == n_bytes
    cut = fitted(tuned, weight, epilogue, given, SMALLEST)
    assert cut == replace(tuned, num_stages=tuned.num_stages - 1)
    assert n_bytes - needed <= SMALLEST.shared_bytes < n_bytes


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.arch)
def test_prompt_products_differ_in_stages_alone(chip: Chip) -> None:
    for name, tile in GEMM_TILES.items():
        weight: Any = weight_of({"packed": "Q4_0"}.get(name, name.upper()), 4096, 4096)
        cut = fitted_gemm(tile, weight, x_of(torch.float32 if name == "f32" else torch.bfloat16), chip)
        assert replace(cut, num_stages=tile.num_stages) == tile
        assert cut.num_stages >= 2


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.arch)
@pytest.mark.parametrize("width", [16, 32, 64, 128, 256, 512])
def test_prompt_attention_fits_every_chip(chip: Chip, width: int) -> None:
    for item_bytes in (2, 4):
        block, rows = chunk_block(chip, width, item_bytes), chunk_rows(chip, width, item_bytes)
        assert chunk_bytes(width, item_bytes, block, 1, rows=rows) <= chip.shared_bytes
        assert (rows == 64) == (chunk_bytes(width, item_bytes, block, 1) <= chip.shared_bytes)
        is_whole = block == chunk_block(TUNED, width, item_bytes) == 64
        assert is_whole == (chunk_bytes(width, item_bytes, 64, 1) <= chip.shared_bytes)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.arch)
@pytest.mark.parametrize("group", [1, 8, 16])
def test_a_steps_attention_fits_every_chip(chip: Chip, group: int) -> None:
    for width in (16, 32, 64, 128, 256, 512):
        for item_bytes in (1, 2, 4):
            block = step_block(chip, width, item_bytes, group)
            assert step_bytes(width, item_bytes, block, group) <= chip.shared_bytes
            assert (block == 16) == (width == 512 and item_bytes == 4 and chip.shared_bytes < SHARED_BYTES[8, 0])


def test_what_a_steps_attention_needs_is_what_the_compiler_asks_for() -> None:
    """To the byte, with two stages, one of which is there at once."""
    assert [step_bytes(512, 4, block, 8) for block in (32, 16)] == [166_144, 99_584]


def test_what_prompt_attention_needs_is_what_the_compiler_asks_for() -> None:
    """To the byte, with more than one stage."""
    assert chunk_bytes(256, 2, 64, 2) == 106_496
    assert chunk_bytes(128, 2, 64, 2) == 57_344
    assert chunk_bytes(256, 2, 64, 2, row_bytes=272) == 75_776  # q8_0, with its scales
    assert chunk_bytes(128, 2, 64, 3, row_bytes=136) == 59_392
    assert chunk_bytes(128, 4, 64, 1) == 98_304
    assert chunk_bytes(512, 2, 64, 2) == 204_800  # of compute capability 8
    assert [reads_shared(Chip(capability, 1, 1)) for capability in ((8, 9), (9, 0), (12, 0))] == [False, True, False]
    # Of compute capability 9, where the weights of V are in registers.
    for needed, stages, width, row_bytes in (
        *((81_920, 2, 128, None), (163_840, 2, 256, None), (327_680, 2, 512, None)),
        *((83_968, 3, 128, 136), (133_120, 2, 256, 272), (266_240, 2, 512, 544)),  # q8_0
    ):
        assert chunk_bytes(width, 2, 64, stages, row_bytes, shared=True) == needed + 64 * 64 * 2
    assert chunk_bytes(512, 2, 64, 2, 544, shared=True) > TUNED.shared_bytes > chunk_bytes(512, 2, 64, 1)


def test_only_keys_of_the_widest_heads_are_cut_otherwise_and_that_is_named() -> None:
    wide = named_shape("llama-1b").with_attention(head_width=256, value_width=256)
    cuts = {(chip.arch, kv): other_cut(wide, kv, chip) for chip in CHIPS for kv in ("f32", "f16", "bf16", "q8_0")}
    assert {key: cut for key, cut in cuts.items() if cut is not None} == {
        ("sm_80", "f32"): "prompt attention by 32",
        ("sm_87", "f32"): "prompt attention by 32",
        **{(arch, "f32"): "prompt attention by 16" for arch in ("sm_86", "sm_89", "sm_120", "sm_121")},
    }
    assert not any(other_cut(named_shape("llama-8b"), "f32", chip) for chip in CHIPS)
    assert other_cut(wide, "f32", None) is None
    widest = named_shape("gemma4-26b-a4b")  # heads of 512
    small = {chip.arch: other_cut(widest, "bf16", chip) for chip in CHIPS}
    assert (small["sm_80"], small["sm_89"], small["sm_90"]) == (
        "prompt attention by 32",
        "prompt attention by 16",
        None,
    )


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.arch)
def test_latent_attention_of_published_models_fits_every_chip_in_the_same_cut(chip: Chip) -> None:
    """So no digest names another arithmetic for it."""
    for item_bytes, rows in product((1, 2, 4), (LEAST_TILE, 64)):
        cut, tuned = (latent_cut(one, 576, item_bytes, rows) for one in (chip, TUNED))
        assert latent_bytes(chip, 576, item_bytes, cut) <= chip.shared_bytes
        assert (cut.block, cut.rows <= tuned.rows) == (tuned.block, True)
        assert cut.stages in (2, 3)
    shape = named_shape("glm-4.7-flash")
    assert not any(other_cut(shape, kv_type, chip) for kv_type in ("f32", "f16", "bf16", "q8_0"))


def test_latent_attention_without_room_takes_fewer_keys_and_that_is_named() -> None:
    chip = replace(SMALLEST, shared_bytes=50_000)
    assert latent_cut(chip, 576, 2, 64) == LatentCut(16, 16, 2)
    assert other_cut(named_shape("glm-4.7-flash"), "bf16", chip) == "latent attention by 16"
    reason = why_no_room(named_shape("glm-4.7-flash"), {}, "f32", chip)
    assert reason == (
        "latent attention over f32 keys of 576 needs 75008 bytes of shared memory, and a block has 50000 here"
    )


def test_a_block_that_is_alone_on_its_multiprocessor_is_given_all_registers() -> None:
    assert registers_alone(TUNED, 196_608, 8) == {"maxnreg": 255}
    assert registers_alone(TUNED, 196_608, 16) == {"maxnreg": 128}
    assert registers_alone(TUNED, 90_000, 8) == {}
    assert registers_alone(TUNED, 90_000, 8, blocks=2) == {"maxnreg": 128}
    assert registers_alone(TUNED, TUNED.shared_bytes // 2, 8) == {}
    assert registers_alone(replace(TUNED, has_ptx=False), 196_608, 8) == {}


def test_stages_are_never_more_than_wanted_nor_none() -> None:
    assert [stages_that_fit(SMALLEST, 4, n_bytes) for n_bytes in (1024, 30_000, 50_000, 60_000, 200_000)] == [
        4, 4, 3, 2, 1,
    ]  # fmt: skip


def test_a_chip_that_is_only_pretended_is_told_first() -> None:
    told = choices(pretended(TUNED, "sm_89"))[0]
    assert (told.choice, told.reason) == ("as if it were sm_89", "OSTINATO_CHIP says so; this GPU is sm_90")
    assert "chip" not in [one.what for one in choices(TUNED)]
