"""The sixteen lanes that native arithmetic is written over: right functions, and the same bits on every CPU."""

import ctypes
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.backends.native import cpu_levels
from ostinato.backends.native.library import source
from ostinato.build import shared_object

pytestmark = pytest.mark.slow  # the compiler, once for each level

SOURCE = r"""
#include "lanes.h"
#include "scalars.h"
#define EACH(name, expression)                                         \
    extern "C" void name(const float* from, float* to, int n) {        \
        for (int i = 0; i < n; i += LANES) {                           \
            Lanes x = load(from + i);                                  \
            store(to + i, (expression));                               \
        }                                                              \
    }
EACH(e_exp, exp(x))
EACH(e_tanh, tanh(x))
EACH(e_erf, erf(x))
EACH(e_silu, silu(x))
EACH(e_gelu, gelu_erf(x))
EACH(e_gelu_tanh, gelu_tanh(x))
EACH(e_sum, lanes(sum(x)))
EACH(e_largest, lanes(largest(x)))
EACH(e_some, load_some(from + i, i / LANES % 17))
EACH(e_first, keep_first(x, i / LANES % 17, -3.0f))
EACH(e_nearest, to_float(to_nearest(x)))
static Lanes by_f16(Lanes x) { unsigned short h[LANES]; to_f16(h, x); return from_f16(h); }
static Lanes by_bf16(Lanes x) { unsigned short h[LANES]; to_bf16(h, x); return from_bf16(h); }
EACH(e_f16, by_f16(x))
EACH(e_bf16, by_bf16(x))
extern "C" void e_f16_alone(const float* from, float* to, int n) {
    for (int i = 0; i < n; i++) to[i] = f16_to_float(float_to_f16(from[i]));
}
extern "C" void e_cos(const float* from, float* to, int n) {
    for (int i = 0; i < n; i++) to[i] = cos_sin(std::fabs(from[i])).cosine;
}
extern "C" void e_sin(const float* from, float* to, int n) {
    for (int i = 0; i < n; i++) to[i] = cos_sin(std::fabs(from[i])).sine;
}
extern "C" void e_log(const float* from, float* to, int n) {
    for (int i = 0; i < n; i++) to[i] = float(log_of(std::fabs(from[i]) + 1.0));
}
extern "C" void e_fma(const float* from, float* to, int n) {
    for (int i = 0; i < n; i += LANES) {
        const int j = (i + 5 * LANES) % n, k = (i + 11 * LANES) % n;
        store(to + i, fma(load(from + i), load(from + j), load(from + k)));
    }
}
extern "C" void e_bf16_alone(const float* from, float* to, int n) {
    for (int i = 0; i < n; i++) to[i] = bf16_to_float(float_to_bf16(from[i]));
}
"""
NAMES = re.findall(r"\b(e_\w+)[,(]", SOURCE)


def levels() -> list[cpu_levels.Level]:
    found = cpu_levels.features()
    return [level for level in cpu_levels.levels_of(cpu_levels.architecture()) if level.needs <= found]


def numbers() -> Tensor:
    random = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.01, 1.0, 10.0, 100.0, 1e5, 1e-6]).repeat_interleave(1 << 12)
    special = torch.tensor([0.0, -0.0, 87.9, -86.9, 1e-40, 65504.0, 65520.0, -65519.9] * 2)
    return torch.cat((torch.randn(len(sizes), generator=random) * sizes, special))


def applied(library: ctypes.CDLL, name: str, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    assert len(x) % 16 == 0
    getattr(library, name)(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), len(x))
    return out


def opened(level: cpu_levels.Level) -> ctypes.CDLL:
    headers = {name: source(name) for name in ("lanes.h", "lanes_neon.h", "scalars.h")}
    return ctypes.CDLL(str(shared_object(SOURCE, "lanes.cpp", headers=headers, flags=level.flags)))


def bits(x: Tensor) -> NDArray[np.int32]:
    return x.numpy().view(np.int32)


def test_all_levels_give_the_same_bits() -> None:
    first, *others = (opened(level) for level in levels())
    x = numbers()
    for name in NAMES:
        expected = bits(applied(first, name, x))
        for other in others:
            assert (bits(applied(other, name, x)) == expected).all(), name


@pytest.mark.parametrize(
    ("name", "function", "tolerance"),
    [
        ("e_exp", torch.exp, 2e-7),
        ("e_tanh", torch.tanh, 2e-7),
        ("e_silu", torch.nn.functional.silu, 4e-7),
    ],
)
def test_functions_are_right_to_float32(name: str, function: Callable[[Tensor], Tensor], tolerance: float) -> None:
    x = numbers()
    x = x[(x.abs() < 87).view(-1, 16).all(1).repeat_interleave(16)]
    exact = function(x.double())
    error = (applied(opened(levels()[0]), name, x) - exact).abs()
    assert (error <= tolerance * exact.abs() + 1e-38).all()


def test_erf_and_gelu_are_right_in_proportion_to_their_argument() -> None:
    library, x = opened(levels()[0]), numbers()
    assert (applied(library, "e_erf", x) - torch.erf(x.double())).abs().max() < 3e-7
    for name, approximate in (("e_gelu", "none"), ("e_gelu_tanh", "tanh")):
        exact = torch.nn.functional.gelu(x.double(), approximate=approximate)
        assert ((applied(library, name, x) - exact).abs() <= 4e-7 * x.abs()).all(), name


def test_cosine_sine_and_logarithm_are_right_to_the_last_bit_but_one() -> None:
    library, x = opened(levels()[0]), numbers()
    for name, function in (("e_cos", torch.cos), ("e_sin", torch.sin)):
        exact = function(x.abs().double())
        assert ((applied(library, name, x) - exact).abs() <= 0.57 * 2.0**-23 * exact.abs()).all(), name
    exact = torch.log(x.abs().double() + 1)
    assert ((applied(library, "e_log", x) - exact).abs() <= 0.51 * 2.0**-23 * exact.abs() + 1e-45).all()


def test_multiplication_and_addition_are_fused_on_every_cpu() -> None:
    """Products are exact in float64, and so are these sums: all numbers have few bits."""
    x = (torch.randint(-(1 << 20), 1 << 20, (1 << 14,), generator=torch.Generator().manual_seed(1)) / 1024.0).float()
    exact = x.double() * x.roll(-5 * 16).double() + x.roll(-11 * 16).double()
    for level in levels():
        assert torch.equal(applied(opened(level), "e_fma", x), exact.float()), level.name


def test_halves_round_as_torch_rounds_them() -> None:
    library, x = opened(levels()[0]), numbers()
    for name, dtype in (("e_f16", torch.float16), ("e_bf16", torch.bfloat16)):
        assert torch.equal(applied(library, name, x), x.to(dtype).float())
        assert torch.equal(applied(library, f"{name}_alone", x), x.to(dtype).float())


def test_what_is_no_number_stays_none() -> None:
    library, x = opened(levels()[0]), torch.full((16,), float("nan"))
    for name in ("e_exp", "e_tanh", "e_erf", "e_silu", "e_gelu", "e_sum", "e_f16", "e_bf16"):
        assert applied(library, name, x).isnan().all(), name
    assert torch.equal(applied(library, "e_exp", torch.full((16,), float("-inf"))), torch.zeros(16))
