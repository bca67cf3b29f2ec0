"""The products of a prompt's chunk, in Triton's interpreter: every weight type, on odd sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.backends.cuda.triton.gemm import GEMM_TILES, GemmTile, bind_gemm
from ostinato.backends.torch.ops.matmul import product_torch
from ostinato.backends.weights import Stack
from ostinato.errors import BadPointer
from tests.backends.cuda.triton.test_matmul import DENSE, TYPES, columns_of, noise, weight_of

SMALL = GemmTile(16, 16, 32, num_warps=1, num_stages=1)


def product(x: Tensor, weight: Any) -> Tensor:
    """The product as the kernel has it: packed weights rounded to bfloat16."""
    if isinstance(weight, Stack):
        return torch.cat([product(x, part) for part in weight.parts], 1)
    if not isinstance(weight, Tensor):
        weight = weight.dense(torch.bfloat16)
    return product_torch(x, weight, None)


def check(x: Tensor, weight: Any, n: int, *, dtype: torch.dtype = torch.float32, **more: Any) -> None:
    out = torch.full((len(x), n), float("nan"), dtype=dtype)
    bind_gemm(x, weight, out, tile=SMALL, **more)()
    expected = product(x, weight)
    expected = expected if more.get("bias") is None else expected + more["bias"].float()
    expected = expected if more.get("scale") is None else expected * more["scale"]
    scale = float(expected.abs().max())
    bound = 2e-5 if dtype == torch.float32 else 5e-3  # sums in another order, or a bit of bfloat16
    torch.testing.assert_close(out.float() / scale, expected / scale, rtol=bound, atol=bound)


@pytest.mark.parametrize("type", TYPES)
def test_every_weight_type_on_sizes_that_are_no_whole_tiles(type: str) -> None:
    k = columns_of(type)
    check(noise(5, k), weight_of(type, 20, k), 20)


@pytest.mark.parametrize("type", ["Q4_0", "Q5_0", "Q5_1", "Q8_0"])
def test_an_even_number_of_blocks(type: str) -> None:
    check(noise(3, 128), weight_of(type, 16, 128), 16)


def test_bias_scale_and_bfloat16_in_and_out() -> None:
    x, weight = noise(20, 96).bfloat16(), weight_of("BF16", 40, 96)
    check(x, weight, 40, dtype=torch.bfloat16, bias=noise(40, seed=3))
    check(x, weight, 40, scale=0.5, bias=noise(40, seed=3).bfloat16())
    check(x, weight, 40, scale=noise(40, seed=4))


def test_a_stack_of_types_writes_one_output() -> None:
    stack = Stack((weight_of("Q4_0", 24, 64), weight_of("BF16", 16, 64)))
    check(noise(4, 64), stack, 40, bias=noise(40, seed=3), scale=noise(40, seed=4))


@pytest.mark.parametrize("type", ["F32", "BF16", "Q4_K"])
def test_the_bits_of_a_row_depend_on_the_row_alone(type: str) -> None:
    """E-80."""
    k = 256
    weight = weight_of(type, 16, k)
    row = noise(k, seed=7)
    seen = set()
    for place, n_rows in ((0, 1), (3, 4), (15, 16), (16, 33), (32, 33)):
        x, out = noise(n_rows, k, seed=place), torch.zeros(n_rows, 16)
        x[place] = row
        bind_gemm(x, weight, out, tile=SMALL)()
        seen.add(out[place].numpy().tobytes())
    assert len(seen) == 1


def test_rows_past_the_end_are_neither_read_nor_written() -> None:
    """E-35."""
    x, out = torch.full((8, 64), float("nan")), torch.full((8, 24), 7.0)
    x[:5] = noise(5, 64)
    bind_gemm(x[:5], weight_of("BF16", 20, 64), out[:5, :20], tile=SMALL)()
    assert not out[:5, :20].isnan().any()
    assert (out[5:] == 7).all()
    assert (out[:, 20:] == 7).all()


def test_the_tile_is_chosen_by_the_weight_and_not_by_the_rows() -> None:
    weight = weight_of("BF16", 32, 64)
    cuts = []
    for n_rows in (1, 100, 512):
        launch: Any = bind_gemm(torch.zeros(n_rows, 64), weight, torch.zeros(n_rows, 32))
        cuts.append({name: launch.constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps")})
    assert cuts[0] == cuts[1] == cuts[2]
    assert set(GEMM_TILES) == {"bf16", "f16", "f32", "packed"}
    assert len(DENSE) == 3


def test_memory_that_a_kernel_must_not_touch_is_refused_by_name() -> None:
    """E-1."""
    with pytest.raises(BadPointer, match=r"^out "):
        bind_gemm(torch.zeros(4, 64), torch.zeros(32, 64), torch.zeros(3, 32))
