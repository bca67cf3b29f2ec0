"""Every block type against another implementation's dequantisation, bit for bit."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as oracle
from gguf.quants import quantize as oracle_quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ostinato.errors import BadFile, Unsupported
from ostinato.files.iq_grids import grid
from ostinato.files.quants import BLOCKS, CHUNK_ELEMENTS, READABLE, dequantize
from tests.counts import soak

NUMBERS = {"F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
SHARED = sorted(READABLE - NUMBERS.keys())
QUANTISABLE = ["BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]


def random_rows(type: str, n_rows: int, n_blocks: int, seed: int) -> NDArray[np.uint8]:
    n_bytes = n_blocks * BLOCKS[type].n_bytes
    return np.random.default_rng(seed).integers(0, 256, (n_rows, n_bytes), dtype=np.uint8)


def assert_same_bits(type: str, raw: NDArray[np.uint8]) -> None:
    """Equal bits; where both are not a number, which one does not matter."""
    with np.errstate(all="ignore"):
        expected = oracle(raw, gguf.GGMLQuantizationType[type])
    found = dequantize(raw, type)
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    assert same.all(), f"{type}: {np.count_nonzero(~same)} of {same.size} values differ"


def test_every_type_the_other_implementation_dequantises_is_compared() -> None:
    known = {"F32", "F16"} | {type.name for type in gguf.quants._type_traits}
    assert known == set(SHARED)


@pytest.mark.parametrize("type", SHARED)
def test_random_bytes_of_every_type_give_the_same_bits(type: str) -> None:
    """E-21."""
    assert_same_bits(type, random_rows(type, n_rows=37, n_blocks=6, seed=1))


@pytest.mark.parametrize("type", SHARED)
def test_a_tensor_of_several_chunks_gives_the_same_bits(type: str) -> None:
    n_blocks = CHUNK_ELEMENTS // BLOCKS[type].elements // 2 + 3
    assert_same_bits(type, random_rows(type, n_rows=5, n_blocks=n_blocks, seed=2))


@pytest.mark.soak
@settings(max_examples=soak(1_000), derandomize=True, database=None, deadline=None)
@given(
    type=st.sampled_from(SHARED),
    n_rows=st.integers(1, 4),
    n_blocks=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    byte=st.none() | st.sampled_from([0x00, 0x7F, 0x80, 0xFF]),
)
def test_bytes_of_any_kind_give_the_same_bits(
    type: str, n_rows: int, n_blocks: int, seed: int, byte: int | None
) -> None:
    raw = random_rows(type, n_rows, n_blocks, seed)
    if byte is not None:  # the extremes of every field, with holes of chance between them
        raw[np.random.default_rng(seed + 1).random(raw.shape) < 0.8] = byte
    assert_same_bits(type, raw)


@pytest.mark.parametrize("type", ["F16", "BF16"])
def test_all_65536_values_of_a_sixteen_bit_type_are_right(type: str) -> None:
    assert_same_bits(type, np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(4, -1))


@pytest.mark.parametrize("type", ["MXFP4", "NVFP4"])
def test_all_256_scale_bytes_of_a_tiny_float_type_are_right(type: str) -> None:
    raw = random_rows(type, n_rows=256, n_blocks=1, seed=3)
    raw[:, 0] = np.arange(256)
    assert_same_bits(type, raw)


@pytest.mark.parametrize("type", QUANTISABLE)
def test_quantised_numbers_come_back_near_and_with_the_same_bits(type: str) -> None:
    values = np.random.default_rng(4).standard_normal((16, 512)).astype(np.float32)
    raw = oracle_quantize(values, gguf.GGMLQuantizationType[type]).view(np.uint8)
    assert_same_bits(type, raw)
    close = {"BF16": 0.02, "Q8_0": 0.03, "Q5_0": 0.3, "Q5_1": 0.3}.get(type, 3.0)
    assert np.abs(dequantize(raw, type) - values).max() < close


@pytest.mark.parametrize("type", SHARED)
def test_memory_that_is_not_aligned_gives_the_same_bits(type: str) -> None:
    raw = random_rows(type, n_rows=3, n_blocks=2, seed=5)
    shifted = np.zeros(raw.size + 1, np.uint8)[1:].reshape(raw.shape)
    shifted[...] = raw
    assert_same_bits(type, shifted)


@pytest.mark.parametrize(("type", "dtype"), NUMBERS.items())
def test_plain_numbers_are_read_as_what_they_are(type: str, dtype: str) -> None:
    values = np.array([[0, 1, -1, 100], [-128, 127, 5, 6]]).astype(dtype)
    np.testing.assert_array_equal(dequantize(values.view(np.uint8), type), values.astype(np.float32))


def test_block_sizes_agree_with_the_other_implementation() -> None:
    theirs = {type.name: size for type, size in gguf.GGML_QUANT_SIZES.items()}
    assert theirs.keys() == BLOCKS.keys()
    differing = {type for type, block in BLOCKS.items() if (block.elements, block.n_bytes) != theirs[type]}
    assert differing == {"Q8_1"}  # two float16 and 32 bytes; never found in files


@pytest.mark.parametrize("type", sorted(BLOCKS.keys() - READABLE))
def test_a_known_type_that_is_not_read_is_refused_by_name(type: str) -> None:
    with pytest.raises(Unsupported, match=f"{type}.*Q4_K"):
        dequantize(np.zeros((1, BLOCKS[type].n_bytes), np.uint8), type)


def test_a_row_that_is_not_whole_blocks_is_refused() -> None:
    with pytest.raises(BadFile, match="19 bytes are not whole Q4_1 blocks of 20"):
        dequantize(np.zeros((2, 19), np.uint8), "Q4_1")


def test_no_rows_give_no_values() -> None:
    assert dequantize(np.zeros((0, 20), np.uint8), "Q4_1").shape == (0, 32)


def test_grids_have_their_published_sizes_and_cannot_be_changed() -> None:
    sizes = {name: grid(name).shape for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1")}
    assert sizes == {
        "IQ2_XXS": (256, 8),
        "IQ2_XS": (512, 8),
        "IQ2_S": (1024, 8),
        "IQ3_XXS": (256, 4),
        "IQ3_S": (512, 4),
        "IQ1": (2048, 8),
    }
    with pytest.raises(ValueError, match="read-only"):
        grid("IQ1")[0, 0] = 1
