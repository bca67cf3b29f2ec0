"""Matrices in tiles: what they hold, what they give, and that a row's bits depend on nothing but the row."""

import ctypes
from collections.abc import Iterator
from itertools import product as product_of
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato import build
from ostinato.backends.native import tiles as tiles_module
from ostinato.backends.native.cpu_levels import COMMON_FLAGS, V4, architecture, features, levels_of
from ostinato.backends.native.library import chosen_level, source
from ostinato.backends.native.tiles import (
    TILE_TYPES,
    TileMatrix,
    empty_tiles,
    fill_tiles,
    nearest_type,
    plane_bytes,
)
from ostinato.backends.torch.ops.experts import experts_torch
from ostinato.backends.torch.ops.linear import linear_torch
from ostinato.backends.torch.weight import dense_of, rows_of
from ostinato.backends.weights import Stack, shape_of
from ostinato.errors import BadFile, HardwareCannot, Unsupported
from ostinato.files.quants import BLOCKS, dequantize
from tests.backends.native.tiled import pack_tiles


def product(x: Tensor, tiles: TileMatrix) -> Tensor:
    return linear_torch(x, tiles, None)


QUANTISED = tuple(type for type in TILE_TYPES if BLOCKS[type].elements > 1)
LEVELS = [level.name for level in levels_of(architecture())[:4]]  # the best, and three with other bodies
# Where a block's float16 numbers are: these must be sane, all other bytes may be anything.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}
HALVES |= {"MXFP4": []}


@pytest.fixture(autouse=True, scope="module")
def each_plane_alone() -> Iterator[None]:
    """Planes on their own, so that a sanitizer sees a read or write past one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles_module, "streamed", lambda n_bytes: torch.empty(n_bytes, dtype=torch.uint8).numpy())
        yield


def blocks(type: str, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Random rows of a type as a file has them, uint8 [rows, row_bytes]; numbers are around one."""
    random = np.random.default_rng(seed)
    block = BLOCKS[type]
    if block.elements == 1:
        values = torch.from_numpy(random.standard_normal((rows, cols), np.float32))
        return values.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type]).view(torch.uint8)
    raw = random.integers(0, 256, (rows * cols // block.elements, block.n_bytes), np.uint8)
    size = {"Q8_0": 0.01, "Q4_K": 0.002, "Q5_K": 0.001, "Q6_K": 0.0005}.get(type, 0.1)
    for at in HALVES.get(type, [208]):
        halves = (random.standard_normal(len(raw)) * size).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if type == "MXFP4":
        raw[:, 0] = random.integers(120, 128, len(raw))  # an exponent
    return torch.from_numpy(raw.reshape(rows, -1))


def values_of(type: str, raw: Tensor) -> Tensor:
    return torch.from_numpy(dequantize(raw.numpy(), type))


def columns(type: str, n: int) -> int:
    return n * (256 if type.endswith("_K") else 32) - (5 if BLOCKS[type].elements == 1 else 0)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: Tensor, wide: bool) -> Tensor:
    """Activations as a quantised matrix sees them, float64: a step for each 32 columns."""
    groups = x.view(len(x), -1, 32)
    most = 16256.0 if wide else 127.0
    top = groups.abs().amax(-1, keepdim=True)
    per = torch.where(
        top >= 1e-30, torch.full_like(top, most) / top, 0.0
    )  # one rounding: a number over a tensor has two
    return ((groups * per).round().double() * (top / torch.full_like(top, most)).double()).flatten(1)


@pytest.mark.parametrize("type", TILE_TYPES)
@pytest.mark.parametrize("rows", [16, 37])
def test_a_row_comes_back_to_the_bit(type: str, rows: int) -> None:
    raw = blocks(type, rows, columns(type, 3))
    tiles = pack_tiles(type, raw)
    assert tiles.shape == shape_of(tiles) == (rows, columns(type, 3))
    ids = torch.tensor([rows - 1, 0, 5, 5])
    assert torch.equal(rows_of(tiles, ids, torch.float32), values_of(type, raw)[ids])
    assert torch.equal(dense_of(tiles, torch.float32), values_of(type, raw))
    assert torch.equal(rows_of(tiles, ids, torch.bfloat16), values_of(type, raw)[ids].bfloat16())


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("type", TILE_TYPES)
@settings(deadline=None, max_examples=12)
@given(n_rows=st.integers(1, 40), n_blocks=st.integers(1, 5), n=st.integers(1, 30), seed=st.integers(0, 1 << 16))
def test_a_product_is_that_of_the_rounded_activations(
    type: str, wide: bool, n_rows: int, n_blocks: int, n: int, seed: int
) -> None:
    """E-75."""
    cols = columns(type, n_blocks)
    raw = blocks(type, n_rows, cols, seed)
    x = noise(n, cols, seed=seed) * noise(n, 1, seed=seed + 1).exp()
    weight = values_of(type, raw).double()
    seen = x.double() if type not in QUANTISED else rounded(x, wide)
    sizes = seen.abs() @ weight.abs().T  # what rounding may cost is in proportion to this
    assert ((product(x, pack_tiles(type, raw, wide=wide)) - seen @ weight.T).abs() <= 4e-7 * sizes + 1e-30).all()


@pytest.mark.parametrize("type", TILE_TYPES)
def test_wide_activations_are_as_good_as_float32(type: str) -> None:
    cols = 1024 if type in QUANTISED else 1021
    raw, x = blocks(type, 64, cols), noise(8, cols)
    exact = x.double() @ values_of(type, raw).double().T
    error = (product(x, pack_tiles(type, raw)) - exact).norm() / exact.norm()
    assert error < (5e-5 if type in QUANTISED else 1e-6)
    if type in QUANTISED:
        assert (product(x, pack_tiles(type, raw, wide=False)) - exact).norm() / exact.norm() < 1e-2


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("type", TILE_TYPES)
def test_a_rows_bits_are_the_same_in_any_batch(type: str, wide: bool) -> None:
    cols = columns(type, 4)
    tiles = pack_tiles(type, blocks(type, 50, cols), wide=wide)
    x = noise(300, cols)
    together = product(x, tiles)
    for n in (1, 2, 3, 4, 5, 7, 8, 12, 13, 31, 257):
        assert torch.equal(product(x[17 : 17 + n], tiles), together[17 : 17 + n]), n


@pytest.mark.parametrize("type", TILE_TYPES)
def test_bits_do_not_depend_on_the_number_of_threads(type: str) -> None:
    raw, x = blocks(type, 333, columns(type, 8)), noise(40, columns(type, 8))
    before = torch.get_num_threads()
    try:
        given_by = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            given_by.append(product(x, pack_tiles(type, raw, n_threads=threads)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(given_by[0], given_by[1])
    assert torch.equal(given_by[0], given_by[2])


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS[1:])
def test_every_level_of_cpu_gives_the_same_bits(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = []
    for type in TILE_TYPES:
        raw, x = blocks(type, 50, columns(type, 3)), noise(30, columns(type, 3))
        x[3, 7], x[4] = 1e4, 0.0
        tiles = pack_tiles(type, raw)
        narrow = TileMatrix(type, *tiles.shape, tiles.planes, wide=False)
        cases.append((type, raw, x, tiles, narrow, product(x, tiles), product(x, narrow)))
    monkeypatch.setenv("OSTINATO_CPU_LEVEL", level)
    try:
        chosen_level()
    except HardwareCannot as error:
        pytest.skip(str(error))
    for type, raw, x, tiles, narrow, by_wide, by_int8 in cases:
        packed = pack_tiles(type, raw)
        assert all(np.array_equal(a, b) for a, b in zip(packed.planes, tiles.planes, strict=True)), type
        for n in (1, 2, 5, 30):
            assert torch.equal(product(x[:n], tiles), by_wide[:n]), type
            assert torch.equal(product(x[:n], narrow), by_int8[:n]), type
        assert torch.equal(dense_of(tiles, torch.float32), values_of(type, raw))


@pytest.mark.slow
@pytest.mark.skipif(not V4.needs <= features(), reason="the tile unit was not emulated: this CPU has no AVX-512 VNNI")
def test_products_on_the_tile_unit_have_the_bits_of_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_CPU_LEVEL", "v4")
    cases = []
    for type, wide in product_of(QUANTISED, (True, False)):
        cols = columns(type, 50 if BLOCKS[type].elements == 32 else 7)  # more than is unpacked at once
        raw, x = blocks(type, 20, cols), noise(39, cols)
        x[3, 7], x[4] = 1e4, 0.0
        cases.append((type, wide, raw, x, product(x, pack_tiles(type, raw, wide=wide))))
    monkeypatch.setenv("OSTINATO_CPU_FLAGS", "-DOSTINATO_AMX -DAMX_EMULATED")
    for type, wide, raw, x, by_avx512 in cases:
        tiles = pack_tiles(type, raw, wide=wide)
        for n in (7, 16, 39):
            assert torch.equal(product(x[:n], tiles), by_avx512[:n]), (type, wide, n)


@pytest.mark.parametrize("type", QUANTISED)
@pytest.mark.parametrize("wide", [True, False])
def test_the_largest_sums_of_integers_fit(type: str, wide: bool) -> None:
    block = BLOCKS[type]
    for quants in (0x00, 0xFF, 0x80, 0x7F):
        raw = torch.full((16, block.n_bytes * 2), quants, dtype=torch.uint8)
        for start in range(0, raw.shape[1], block.n_bytes):
            for at in HALVES.get(type, [208]):
                raw[:, start + at : start + at + 2] = torch.tensor([0x00, 0x3C], dtype=torch.uint8)  # 1.0
            if type == "MXFP4":
                raw[:, start] = 127
        x = torch.full((3, 2 * block.elements), 1.0)
        x[1] = -1.0
        x[2, ::2] = -1.0
        exact = x.double() @ values_of(type, raw).double().T
        sizes = x.double().abs() @ values_of(type, raw).double().abs().T
        assert ((product(x, pack_tiles(type, raw, wide=wide)) - exact).abs() <= 4e-7 * sizes).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("type", ["F16", "Q4_1", "Q8_0", "Q6_K"])
def test_what_is_no_number_is_not_hidden(type: str, value: float) -> None:
    cols = columns(type, 2)
    tiles = pack_tiles(type, blocks(type, 16, cols))
    x = noise(3, cols)
    alone = product(x[:1], tiles)
    x[1, 40] = value
    out = product(x, tiles)
    assert not out[1].isfinite().any()
    assert torch.equal(out[0], alone[0])
    assert out[2].isfinite().all()


def test_activations_of_nothing_give_nothing() -> None:
    tiles = pack_tiles("Q4_1", blocks("Q4_1", 16, 64))
    assert torch.equal(product(torch.zeros(2, 64), tiles), torch.zeros(2, 16))
    assert torch.equal(product(torch.full((1, 64), 1e-40), tiles), torch.zeros(1, 16))
    assert product(torch.zeros(0, 64), tiles).shape == (0, 16)


@pytest.mark.parametrize("type", TILE_TYPES)
def test_tiles_can_be_filled_piece_by_piece(type: str) -> None:
    cols = columns(type, 2)
    raw = blocks(type, 50, cols)
    tiles = empty_tiles(type, 50, cols)
    for start in (32, 0):
        fill_tiles(tiles, raw.numpy()[start : start + 32], start)
    whole = pack_tiles(type, raw)
    assert all(np.array_equal(a, b) for a, b in zip(tiles.planes, whole.planes, strict=True))


@pytest.fixture(scope="module")
def planes_of() -> Any:
    """How `tiles.h` counts the bytes of planes."""
    headers = {name: source(name) for name in ("tiles.h", "lanes.h")}
    text = (Path(__file__).parent / "tiles.cpp").read_text("utf-8")
    return ctypes.CDLL(str(build.shared_object(text, "tiles.cpp", headers=headers, flags=COMMON_FLAGS))).planes_of


@pytest.mark.parametrize("type", TILE_TYPES)
def test_the_sizes_of_planes_are_those_of_the_library(type: str, planes_of: Any) -> None:
    out = (ctypes.c_longlong * 3)()
    for rows, cols in ((1, 256), (16, 512), (50, 1024)):
        planes_of(TILE_TYPES.index(type), rows, cols, out)
        assert tuple(out) == plane_bytes(type, rows, cols)
        stored = -(-rows // 16) * 16 * cols * BLOCKS[type].n_bytes // BLOCKS[type].elements
        assert stored <= sum(out) <= (1.06 if type == "MXFP4" else 1.03) * stored


def test_a_stack_of_tiles_is_multiplied_part_by_part() -> None:
    q, k = blocks("Q4_1", 48, 64), blocks("Q8_0", 20, 64)
    stack = Stack((pack_tiles("Q4_1", q), pack_tiles("Q8_0", k)))
    assert isinstance(stack, Stack)
    assert shape_of(stack) == (68, 64)
    x, bias = noise(5, 64), noise(68)
    out = linear_torch(x, stack, bias)
    by_hand = torch.cat((values_of("Q4_1", q), values_of("Q8_0", k)))
    torch.testing.assert_close(out, x @ by_hand.T + bias, atol=2e-3, rtol=1e-4)
    assert torch.equal(dense_of(stack, torch.float32), by_hand)


def test_experts_may_be_tiles() -> None:
    gate_up = [blocks("Q4_0", 64, 32, seed) for seed in range(3)]
    down = [blocks("Q8_0", 32, 32, seed) for seed in range(3)]
    x, chosen = noise(6, 32), torch.tensor([[0, 2], [1, 2], [2, 0], [0, 1], [1, 0], [2, 1]])
    weights = torch.full((6, 2), 0.5)
    dense_gate_up = torch.stack([values_of("Q4_0", one) for one in gate_up])
    dense_down = torch.stack([values_of("Q8_0", one) for one in down])
    out = experts_torch(
        x,
        tuple(pack_tiles("Q4_0", one) for one in gate_up),
        tuple(pack_tiles("Q8_0", one) for one in down),
        weights,
        chosen,
        "silu",
    )
    exact = experts_torch(x, dense_gate_up, dense_down, weights, chosen, "silu")
    assert (out - exact).norm() < 2e-4 * exact.norm()


def test_a_type_without_tiles_is_kept_as_the_nearest() -> None:
    assert [nearest_type(type) for type in ("Q4_1", "BF16", "Q2_K", "IQ4_XS", "NVFP4", "F64")] == [
        "Q4_1",
        "BF16",
        "Q8_0",
        "Q8_0",
        "Q8_0",
        "F32",
    ]
    with pytest.raises(Unsupported, match="Q9"):
        nearest_type("Q9")


def test_what_does_not_fit_is_refused_in_words() -> None:
    with pytest.raises(Unsupported, match="Q2_K weights are not packed into tiles"):
        empty_tiles("Q2_K", 16, 256)
    with pytest.raises(Unsupported, match="rows of 40 columns are no whole Q4_1 blocks"):
        empty_tiles("Q4_1", 16, 40)
    with pytest.raises(BadFile, match="take 40 bytes"):
        fill_tiles(empty_tiles("Q4_1", 16, 64), np.zeros((16, 41), np.uint8))
