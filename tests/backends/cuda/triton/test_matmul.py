"""The step's products against their twins, in Triton's interpreter: every weight type, epilogue and norm."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.backends.cuda.launch import Launches, TritonLaunch
from ostinato.backends.cuda.packed import Packed
from ostinato.backends.cuda.packed_types import PACKED_TYPES
from ostinato.backends.cuda.triton.matmul import bind_matmul
from ostinato.backends.cuda.triton.tiles import Tile, step_columns, tile_for
from ostinato.backends.torch.ops.matmul import (
    Epilogue,
    InputNorm,
    PreparedInput,
    matmul_torch,
    n_stats,
    stats_torch,
)
from ostinato.backends.weights import Stack
from ostinato.errors import BadPointer, InternalError
from ostinato.files.quants import BLOCKS
from tests.backends.cuda.packing import pack
from tests.backends.cuda.triton.test_packed import random_blocks

N_SLOTS = 20
NAN = float("nan")
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = (*DENSE, *PACKED_TYPES)
EPILOGUES: tuple[Epilogue, ...] = ("store", "add", "gated", "act", "multiply")
# A sum of a few hundred float32 products in another order.
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(type: str, n: int, k: int, seed: int = 0) -> Tensor | Packed:
    if type in DENSE:
        return (noise(n, k, seed=seed) * 0.1).to(DENSE[type])
    return pack(type, random_blocks(type, n, k, seed), n, k)


def columns_of(type: str) -> int:
    """A number of columns that the tiles do not divide, as far as the type allows."""
    return 160 if type in DENSE else 512 if BLOCKS[type].elements == 256 else 96


def small(weight: Tensor | Packed, **cut: Any) -> Tile:
    """A tile of few programs and several turns."""
    return replace(Tile(16, 64 if isinstance(weight, Tensor) else 32, num_warps=1), **cut)


@dataclass
class Rows:
    """Input rows with what a norm needs of them; rows that are not live are poison."""

    x: Tensor
    stats: Tensor
    n_rows: Tensor

    def norm(self, kind: str | None, seed: int = 0) -> InputNorm | None:
        width = self.x.shape[1]
        gain, shift = noise(width, seed=seed + 1), noise(width, seed=seed + 2)
        return {
            None: None,
            "rms": InputNorm(self.stats, gain, None, 1e-5),
            "layer": InputNorm(self.stats, gain.bfloat16(), shift, 1e-5),
            "root": InputNorm(self.stats, None, None, 1e-5),
        }[kind]


def rows_of(n_rows: int, width: int, n_slots: int = N_SLOTS, seed: int = 0) -> Rows:
    # On the grid of bfloat16, so that a last bit of a norm does not decide how a value is rounded.
    x = noise(n_slots, width, seed=seed).bfloat16().float()
    stats = stats_torch(x)
    x[n_rows:], stats[n_rows:] = NAN, NAN
    return Rows(x, stats, torch.tensor([n_rows], dtype=torch.int32))


def check(given: Rows, weight: Any, epilogue: Epilogue, width: int, tile: Tile | None, **more: Any) -> None:
    """The kernel leaves what its twin leaves, and beyond the live rows nothing."""
    n_slots, live = len(given.x), int(given.n_rows)
    start = noise(n_slots, width, seed=9)
    start[live:] = NAN
    ours, theirs = start.clone(), start.clone()
    stats, expected_stats = (torch.full((n_slots, n_stats(width), 2), NAN) for _ in range(2))
    if isinstance(weight, Stack):
        bind_matmul(given.x, weight, ours, given.n_rows, epilogue=epilogue, tile=tile, **more)()
        matmul_torch(given.x, weight, theirs, given.n_rows, epilogue=epilogue, **more)
    else:
        bind_matmul(given.x, weight, ours, given.n_rows, epilogue=epilogue, stats=stats, tile=tile, **more)()
        matmul_torch(given.x, weight, theirs, given.n_rows, epilogue=epilogue, stats=expected_stats, **more)
    scale = float(theirs[:live].abs().max())
    torch.testing.assert_close(ours / scale, theirs / scale, equal_nan=True, **CLOSE)
    torch.testing.assert_close(stats / scale**2, expected_stats / scale**2, equal_nan=True, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("type", TYPES)
def test_every_weight_type_with_every_epilogue(type: str, epilogue: Epilogue) -> None:
    """E-17, E-74."""
    n, k = 40, columns_of(type)  # 40 outputs, or 20: no whole tiles of 16
    weight = weight_of(type, n, k)
    activation = "silu" if epilogue in ("gated", "act") else None
    width = n // 2 if epilogue == "gated" else n
    check(
        rows_of(3, k, n_slots=5), weight, epilogue, width, small(weight), activation=activation, bias=noise(n, seed=5)
    )


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["rms", "layer", "root"])
@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q4_0", "Q4_K"])
def test_the_input_is_normed_on_the_way(type: str, norm: str) -> None:
    k = columns_of(type)
    weight, given = weight_of(type, 16, k), rows_of(3, k, n_slots=4)
    if norm == "root":
        given = replace(given, x=given.x.bfloat16())
    check(given, weight, "store", 16, small(weight), norm=given.norm(norm))


@pytest.mark.parametrize("n_rows", [1, 3, 16, 17])
@pytest.mark.parametrize("type", ["BF16", "Q8_0"])
def test_any_number_of_rows_up_to_the_slots(type: str, n_rows: int) -> None:
    weight = weight_of(type, 16, 64)
    check(rows_of(n_rows, 64), weight, "add", 16, small(weight))


@pytest.mark.parametrize("type", ["BF16", "F32", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"])
def test_warps_may_share_the_columns_or_the_outputs(type: str) -> None:
    k = 1024 if type in ("Q4_K", "Q6_K") else 256
    weight = weight_of(type, 32, k)
    given = rows_of(2, k, n_slots=2)
    for slices in (2, 4):
        check(given, weight, "store", 32, Tile(32, k, slices=slices, num_warps=slices))


@pytest.mark.parametrize("type", ["BF16", "Q4_0"])
def test_programs_that_share_an_output_leave_the_same_as_one(type: str) -> None:
    weight, given = weight_of(type, 48, 160), rows_of(17, 160)
    for epilogue in ("add", "gated"):
        activation = "silu" if epilogue == "gated" else None
        cut = small(weight, split_k=3)
        check(given, weight, epilogue, 48 // (1 + (epilogue == "gated")), cut, activation=activation)


def test_running_a_product_twice_gives_the_same_output_and_leaves_its_counters_at_zero() -> None:
    weight, given = weight_of("BF16", 32, 128), rows_of(3, 128)
    out = torch.full((N_SLOTS, 32), NAN)
    launch = bind_matmul(given.x, weight, out, given.n_rows, tile=small(weight, split_k=2))
    launch()
    first = out.clone()
    launch()
    assert torch.equal(first[:3], out[:3])
    assert isinstance(launch, TritonLaunch)
    assert not launch.args[-1].any()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_activations_far_from_zero_do_not_overflow(activation: Any) -> None:
    weight = torch.eye(16)
    x = torch.tensor(
        [[-1e4, -90.0, -20.0, -3.0, -1.0, -1e-3, -1e-20, 0.0, 1e-20, 1e-3, 1.0, 3.0, 20.0, 90.0, 1e4, 2.0]]
    )
    ours, theirs = torch.empty(1, 16), torch.empty(1, 16)
    one = torch.ones(1, dtype=torch.int32)
    bind_matmul(x, weight, ours, one, epilogue="act", activation=activation, tile=Tile(16, 16, num_warps=1))()
    matmul_torch(x, weight, theirs, one, epilogue="act", activation=activation)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.25, "each"])
def test_scale_and_soft_cap_come_after_the_bias(scale: Any) -> None:
    weight, given = weight_of("BF16", 40, 96), rows_of(2, 96, n_slots=3)
    factor = noise(40, seed=4) if scale == "each" else scale
    check(given, weight, "store", 40, small(weight), bias=noise(40, seed=3).bfloat16(), scale=factor, softcap=1.5)


def test_a_stack_of_types_writes_one_output() -> None:
    parts = (weight_of("Q4_0", 24, 64), weight_of("BF16", 16, 64), weight_of("Q8_0", 8, 64))
    stack, given = Stack(parts), rows_of(3, 64, n_slots=4)
    more = {"norm": given.norm("rms"), "bias": noise(48, seed=3), "scale": noise(48, seed=4)}
    check(given, stack, "store", 48, Tile(16, 64, num_warps=1), **more)


def test_a_gated_stack_multiplies_up_into_what_gate_wrote() -> None:
    stack, given = Stack((weight_of("Q4_0", 24, 64), weight_of("Q5_0", 24, 64))), rows_of(3, 64, n_slots=4)
    check(given, stack, "gated", 24, Tile(16, 64, num_warps=1), norm=given.norm("rms"), activation="gelu_tanh")


def test_a_gated_weight_of_six_bits_is_two_products() -> None:
    weight, given = weight_of("Q6_K", 48, 256), rows_of(3, 256, n_slots=4)
    out = torch.zeros(4, 24)
    assert isinstance(bind_matmul(given.x, weight, out, given.n_rows, epilogue="gated", activation="silu"), Launches)
    check(given, weight, "gated", 24, None, norm=given.norm("rms"), activation="silu", bias=noise(48, seed=3))


def test_a_stack_that_cannot_be_one_product_is_refused() -> None:
    given = rows_of(1, 64, n_slots=1)
    uneven = Stack((torch.ones(8, 64), torch.ones(16, 64)))
    with pytest.raises(InternalError, match=r"equal height, not \[8, 16\]"):
        bind_matmul(given.x, uneven, torch.empty(1, 12), given.n_rows, epilogue="gated", activation="silu")
    with pytest.raises(InternalError, match="leaves no stats"):
        bind_matmul(given.x, uneven, torch.empty(1, 24), given.n_rows, stats=torch.empty(1, 2, 2))


def test_a_writer_prepares_the_next_input_and_may_write_bfloat16() -> None:
    weight, given = weight_of("BF16", 40, 64), rows_of(3, 64, n_slots=4)
    gain = noise(40, seed=8)
    outs = []
    for bind in (True, False):
        out, prepared = torch.ones(4, 40).bfloat16(), PreparedInput(torch.full((4, 40), NAN).bfloat16(), gain)
        if bind:
            bind_matmul(given.x, weight, out, given.n_rows, epilogue="add", prepared=prepared, tile=small(weight))()
        else:
            matmul_torch(given.x, weight, out, given.n_rows, epilogue="add", prepared=prepared)
        outs.append((out, prepared.out))
    for ours, theirs in zip(*outs, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-2, atol=1e-2)  # a bit of bfloat16
    assert outs[0][1][3:].isnan().all()


@pytest.mark.parametrize("type", ["F32", "BF16", "Q4_0", "Q4_K", "Q6_K"])
def test_the_bits_of_a_row_depend_on_the_row_alone(type: str) -> None:
    """E-80. Its place, the rows beside it, how many they are and how many could be: none of them moves a bit."""
    k = 256
    weight = weight_of(type, 32, k)
    row, gain = noise(k, seed=7), noise(k, seed=8)
    seen = set()
    for place, n_rows, n_slots in ((0, 9, 9), (2, 11, 16), (15, 16, 16), (16, 25, 32), (0, 16, 20)):
        x = noise(n_slots, k, seed=place + n_slots) * 100
        x[place] = row
        out = torch.zeros(n_slots, 32)
        stats = torch.zeros(n_slots, 2, 2)
        live = torch.tensor([n_rows], dtype=torch.int32)
        norm = InputNorm(stats_torch(x), gain, None, 1e-6)
        bind_matmul(x, weight, out, live, epilogue="add", norm=norm, stats=stats, tile=Tile(32, k, num_warps=1))()
        seen.add((out[place].numpy().tobytes(), stats[place].numpy().tobytes()))
    assert len(seen) == 1


@pytest.mark.parametrize("type", ["Q5_0", "Q4_K"])
def test_few_rows_take_the_short_way_to_the_same_values(type: str) -> None:
    weight, given = weight_of(type, 32, 256), rows_of(5, 256)
    outs = []
    for few in (True, False):
        out = torch.full((N_SLOTS, 32), NAN)
        bind_matmul(given.x, weight, out, given.n_rows, tile=Tile(32, 256, num_warps=1, few=few))()
        outs.append(out)
    torch.testing.assert_close(*outs, equal_nan=True, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("type", ["Q4_0", "Q4_K"])
def test_gate_and_up_one_after_the_other_are_the_same_bits_as_both_at_once(type: str) -> None:
    k = columns_of(type)
    given, weight = rows_of(10, k), weight_of(type, 32, k)
    outs = []
    for apart in (False, True):
        out = torch.zeros(N_SLOTS, 16)
        more: dict[str, Any] = {"epilogue": "gated", "norm": given.norm("root"), "activation": "silu"}
        bind_matmul(given.x, weight, out, given.n_rows, tile=small(weight, apart=apart), **more)()
        outs.append(out)
    assert torch.equal(*outs)


def test_outputs_past_the_end_are_not_written() -> None:
    weight, given = weight_of("BF16", 37, 64), rows_of(3, 64, n_slots=3)
    guarded = torch.full((3, 40), 7.0)
    bind_matmul(given.x, weight, guarded[:, :37], given.n_rows, tile=small(weight))()
    assert (guarded[:, 37:] == 7).all()
    assert not (guarded[:, :37] == 7).any()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda a: a | {"x": torch.empty(0, 64)}),
        ("x", lambda a: a | {"x": torch.zeros(4, 64, dtype=torch.float64)}),
        ("x", lambda a: a | {"x": torch.zeros(4, 32)}),
        ("weight", lambda a: a | {"weight": torch.zeros(64, 32).T}),
        ("out", lambda a: a | {"out": torch.zeros(3, 32)}),
        ("n_rows", lambda a: a | {"n_rows": torch.zeros(1)}),
        ("bias", lambda a: a | {"bias": torch.zeros(31)}),
        ("norm.stats", lambda a: a | {"norm": InputNorm(torch.zeros(4, 3, 2), torch.zeros(64), None, 1e-5)}),
        ("stats", lambda a: a | {"stats": torch.zeros(4, 2, 3)}),
        ("weight.quants", lambda a: a | {"weight": replace(weight_of("Q4_0", 32, 64), planes=(torch.zeros(8),) * 2)}),  # type: ignore[type-var]  # a Packed
    ],
)
def test_memory_that_a_kernel_must_not_touch_is_refused_by_name(name: str, change: Any) -> None:
    """E-1."""
    good: dict[str, Any] = {
        "x": torch.zeros(4, 64),
        "weight": torch.zeros(32, 64),
        "out": torch.zeros(4, 32),
        "n_rows": torch.ones(1, dtype=torch.int32),
    }
    with pytest.raises(BadPointer, match=rf"^{name} "):
        bind_matmul(**change(good))
    bind_matmul(**good, tile=Tile(32, 64, num_warps=1))()


def test_a_tensor_of_another_device_is_refused() -> None:
    with pytest.raises(BadPointer, match=r"out .* lies on meta; the kernel runs on cpu"):
        bind_matmul(
            torch.zeros(4, 64),
            torch.zeros(32, 64),
            torch.zeros(4, 32, device="meta"),
            torch.ones(1, dtype=torch.int32),
        )


def test_every_type_and_shape_has_a_tile_that_fits_it() -> None:
    for type in TYPES:
        for n, k in ((64, 256), (64, 768), (40000, 256)) + (((64, 96),) if columns_of(type) == 96 else ()):
            weight = torch.empty(n, k, dtype=DENSE[type]) if type in DENSE else Packed(type, n, k, ())
            for epilogue in EPILOGUES:
                tile = tile_for(weight, epilogue)
                assert tile.slices in (1, tile.num_warps)
                if isinstance(weight, Packed):
                    assert k % step_columns(weight, tile) == 0
