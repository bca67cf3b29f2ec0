"""Packed weights: the same bytes in another order, and the assembly that takes them apart."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.backends.cuda.packed import unpack
from ostinato.backends.cuda.packed_types import PACKED_TYPES
from ostinato.errors import Unsupported
from ostinato.files.quants import BLOCKS, dequantize
from tests.backends.cuda.packing import pack

# Rows in whole runs and not; columns with an even number of blocks, an odd one, and more than one block of 256.
SHAPES = ((16, 256), (48, 768), (5, 512), (24, 96), (8, 160), (2, 64))


def random_blocks(type: str, n_rows: int, cols: int, seed: int = 0) -> Tensor:
    """Blocks as a file has them, with any quants and with scales of a size that weights have."""
    rng = np.random.default_rng(seed)
    block = BLOCKS[type]
    n_blocks = cols // block.elements
    raw = rng.integers(0, 256, (n_rows, n_blocks, block.n_bytes), dtype=np.uint8)
    has_two = type in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    for at in (208,) if type == "Q6_K" else (0, 2) if has_two else () if type == "MXFP4" else (0,):
        scale = (rng.standard_normal((n_rows, n_blocks)) * 0.01).astype(np.float16)
        raw[:, :, at : at + 2] = scale.view(np.uint8).reshape(n_rows, n_blocks, 2)
    if type == "MXFP4":
        raw[:, :, 0] = rng.integers(117, 122, (n_rows, n_blocks))  # an exponent
    return torch.from_numpy(raw.reshape(n_rows, -1))


def shapes_of(type: str) -> list[tuple[int, int]]:
    return [shape for shape in SHAPES if shape[1] % BLOCKS[type].elements == 0]


@pytest.mark.parametrize("type", PACKED_TYPES)
def test_unpack_gives_back_the_bytes_of_the_file(type: str) -> None:
    """E-79."""
    for n_rows, cols in shapes_of(type):
        raw = torch.randint(0, 256, (n_rows, cols // BLOCKS[type].elements * BLOCKS[type].n_bytes), dtype=torch.uint8)
        packed = pack(type, raw, n_rows, cols)
        assert torch.equal(unpack(packed), raw)
        assert sum(plane.numel() for plane in packed.planes) == raw.numel()


@pytest.mark.parametrize("type", PACKED_TYPES)
def test_a_packed_matrix_means_what_the_file_means(type: str) -> None:
    for n_rows, cols in shapes_of(type):
        raw = random_blocks(type, n_rows, cols)
        packed = pack(type, raw, n_rows, cols)
        expected = torch.from_numpy(dequantize(raw.numpy(), type))
        assert torch.equal(packed.dense(torch.float32), expected)
        assert torch.equal(packed.dense(torch.bfloat16), expected.bfloat16())
        ids = torch.tensor([n_rows - 1, 0, 1])
        assert torch.equal(packed.rows_at(ids), expected[ids])


def test_the_values_of_a_block_come_in_the_documented_order() -> None:
    """E-21."""
    low, high = np.arange(16, dtype=np.uint8), np.arange(15, -1, -1, dtype=np.uint8)
    block = np.concatenate([np.array([1.0], np.float16).view(np.uint8), low | high << 4])
    packed = pack("Q4_0", torch.from_numpy(block[None]), 1, 32)
    assert packed.dense(torch.float32)[0].tolist() == [*range(-8, 8), *range(7, -9, -1)]


def test_a_large_matrix_is_packed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("Q5_K", 80, 512)
    whole = pack("Q5_K", raw, 80, 512)
    monkeypatch.setattr("ostinato.backends.cuda.packed._CHUNK_BYTES", 40 * raw.shape[1])
    for plane, again in zip(whole.planes, pack("Q5_K", raw, 80, 512).planes, strict=True):
        assert torch.equal(plane, again)


def test_what_cannot_be_packed_is_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match="Q2_K weights are not multiplied packed"):
        pack("Q2_K", torch.zeros(1, 84, dtype=torch.uint8), 1, 256)
    with pytest.raises(Unsupported, match="rows of 896 columns are no whole Q4_K blocks of 256; dequantise"):
        pack("Q4_K", torch.zeros(1, 504, dtype=torch.uint8), 1, 896)


class Assembly:
    """The few instructions of PTX that `unpack.py` uses, so that its assembly can be tried where there is no GPU."""

    def __init__(self, text: str) -> None:
        body = re.sub(r"\.reg [^;]*;", "", text.strip().strip("{}"))
        self.lines = [line.strip() for line in body.split(";") if line.strip()]

    def run(self, n_outputs: int, *inputs: int) -> list[int]:
        values: dict[str, int] = {f"${n_outputs + i}": value for i, value in enumerate(inputs)}
        for line in self.lines:
            name, operands = line.split(None, 1)
            to, *given = (operand.strip() for operand in operands.split(","))
            words = [values[g] if g in values else int(g, 0) for g in given]
            values[to] = getattr(self, name.replace(".", "_"))(*words) & 0xFFFFFFFF
        return [values[f"${i}"] for i in range(n_outputs)]

    @staticmethod
    def prmt_b32(a: int, b: int, select: int) -> int:
        both = (a | b << 32).to_bytes(8, "little")
        return int.from_bytes(bytes(both[select >> 4 * i & 15] for i in range(4)), "little")

    @staticmethod
    def lop3_b32(a: int, b: int, c: int, table: int) -> int:
        assert table == 0xEA, "a & b | c"
        return a & b | c

    @staticmethod
    def shr_u32(a: int, by: int) -> int:
        return a >> by

    @staticmethod
    def shf_r_wrap_b32(low: int, high: int, by: int) -> int:
        return (low | high << 32) >> (by & 31)

    @staticmethod
    def mov_b32(a: int) -> int:
        return a

    @staticmethod
    def fma_rn_bf16x2(a: int, b: int, c: int) -> int:
        x, y, z = (bf16_pair(word) for word in (a, b, c))
        pair = torch.tensor([x[i] * y[i] + z[i] for i in range(2)]).bfloat16()
        return int(pair.view(torch.int32))


def bf16_pair(word: int) -> list[float]:
    pair = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.uint16)
    return [float(v) for v in pair.view(torch.bfloat16)]


def values_of(words: list[int]) -> list[float]:
    return [value for word in words for value in bf16_pair(word)]


def assembly(name: str) -> Assembly:
    from ostinato.backends.cuda.triton import unpack as module

    text: Any = getattr(module, name)
    return Assembly(text.value)


def test_the_assembly_makes_nibbles_into_bfloat16() -> None:
    for word in (0x76543210, 0xFEDCBA98, 0x0F1E2D3C):
        data = word.to_bytes(4, "little")
        low, high = [b & 15 for b in data], [b >> 4 for b in data]
        assert values_of(assembly("_FOUR").run(4, word)) == [128.0 + v for v in low + high]


@pytest.mark.parametrize(("name", "bits"), [("_FIVE", 5), ("_SIX", 6)])
def test_the_assembly_finds_the_further_bits_of_each_column(name: str, bits: int) -> None:
    rng = np.random.default_rng(bits)
    for j in range(0, 32 if bits == 5 else 16, 4):  # the column of a register's first value
        data = rng.integers(0, 256, 4, dtype=np.uint8)
        high, higher = (int(w) for w in rng.integers(0, 1 << 32, 2))
        places = [c // 2 * (bits - 4) + c % 2 * 16 for c in range(j, j + 4)]
        mask = (1 << (bits - 4)) - 1
        low = [int(b) & 15 | (high >> at & mask) << 4 for b, at in zip(data, places, strict=True)]
        top = [int(b) >> 4 | (higher >> at & mask) << 4 for b, at in zip(data, places, strict=True)]
        turn = (j // 4 * 2 * (bits - 4) - 4) & 0xFFFFFFFF
        words = [int.from_bytes(data.tobytes(), "little"), *[high] * 4, *[higher] * 4, *[turn] * 4]
        assert values_of(assembly(name).run(4, *words)) == [128.0 + v for v in low + top]


def test_the_assembly_makes_signed_bytes_into_bfloat16() -> None:
    for start in range(0, 256, 4):
        word = int.from_bytes(bytes(range(start, start + 4)), "little")
        expected = [float(b if b < 128 else b - 256) for b in range(start, start + 4)]
        assert values_of(assembly("_EIGHT").run(2, word)) == expected
