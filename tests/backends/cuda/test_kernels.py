"""What holds for all Triton kernels (E): the gate of their launches, no access beyond their memory, equal bits at every
batch size, and for each a test that notices when it does nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ostinato
from ostinato.backends.cuda.packed import Packed
from ostinato.backends.cuda.packed_types import PACKED_TYPES
from ostinato.backends.torch.ops.matmul import matmul_torch, n_stats
from ostinato.backends.weights import Stack
from ostinato.errors import BadPointer
from ostinato.lab.random_weights import random_blocks
from tests.backends.cuda.packing import pack
from tests.backends.cuda.triton import (
    test_activation,
    test_add_norm,
    test_attend,
    test_chunk_attention,
    test_embed,
    test_experts,
    test_gemm,
    test_latent,
    test_logprobs,
    test_matmul,
    test_norm,
    test_runs,
    test_sample,
)
from tests.backends.cuda.triton.test_attend import Case, made, reference, run
from tests.backends.tape import test_unpack

pytestmark = pytest.mark.slow

PACKAGE = Path(ostinato.__file__).parent
SPOILED: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(0),
    "freed": lambda: freed(torch.rand(64)),
    "elsewhere": lambda: torch.rand(64, device="meta"),
    "of another type": lambda: torch.rand(64).half(),
    "with holes": lambda: torch.rand(128)[::2],
    "short": lambda: torch.rand(32),
}


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("wrong", SPOILED)
def test_memory_that_a_kernel_must_not_touch_is_refused_by_name_and_the_next_call_works(wrong: str) -> None:
    """E-1."""
    from ostinato.backends.cuda.triton.norm import bind_norm

    x, y, weight = torch.randn(3, 64), torch.full((3, 64), torch.nan), torch.rand(64)
    with pytest.raises(BadPointer, match="weight"):
        bind_norm(x, y, SPOILED[wrong](), None, 1e-6)
    bind_norm(x, y, weight, None, 1e-6)()
    assert bool(y.isfinite().all())


def walled(rows: int, width: int, value: float) -> tuple[Tensor, Tensor]:
    """A matrix, and the memory it lies in: 256 more elements behind it, all of that value."""
    room = torch.full((rows * width + 256,), value)
    return room[: rows * width].view(rows, width), room


@pytest.mark.parametrize(
    ("width", "type", "n_rows"), [*((1000, None, n) for n in (1, 3, 15, 17)), (896, "Q8_0", 3), (1536, "Q4_K", 3)]
)
def test_products_of_odd_sizes_read_and_write_nothing_beyond_them(width: int, type: str | None, n_rows: int) -> None:
    """E-20, E-35."""
    from ostinato.backends.cuda.triton.matmul import bind_matmul

    n_slots, outs = 17, 16 + 5
    x, _ = walled(n_slots, width, torch.nan)
    out, room = walled(n_slots, outs, 12345.0)
    x[:n_rows] = torch.randn(n_rows, width)
    weight: Any = torch.randn(outs, width) / 32 if type is None else random_packed(type, outs, width)
    count = torch.tensor([n_rows], dtype=torch.int32)
    bind_matmul(x, weight, out, count)()
    expected = torch.zeros(n_slots, outs)
    matmul_torch(x, weight, expected, count)
    torch.testing.assert_close(out[:n_rows], expected[:n_rows], rtol=1e-4, atol=1e-4)
    assert bool((room[n_rows * outs :] == 12345.0).all())


def random_packed(type: str, rows: int, cols: int) -> Packed:
    return pack(type, torch.from_numpy(random_blocks(type, rows, cols, np.random.default_rng(1))), rows, cols)


def test_types_that_stand_on_top_of_each_other_are_each_multiplied_by_their_own_kernel() -> None:
    """E-17, E-18."""
    from ostinato.backends.cuda.triton.matmul import bind_matmul

    plain = [torch.randn(16, 256, dtype=torch.float32).to(dtype) / 16 for dtype in (torch.float16, torch.bfloat16)]
    stack = Stack((*(random_packed(type, 16, 256) for type in PACKED_TYPES), *plain))
    x, count = torch.randn(3, 256), torch.tensor([2], dtype=torch.int32)
    out, expected = (torch.full((3, stack.shape[0]), 7.0) for _ in range(2))
    bind_matmul(x, stack, out, count)()
    matmul_torch(x, stack, expected, count)
    for start in range(0, stack.shape[0], 16):
        found, wanted = (each[:, start : start + 16] for each in (out, expected))
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize("type", [None, "Q4_K", "Q8_0"])
def test_a_rows_bits_are_the_same_in_a_batch_of_1_2_8_and_32(type: str | None) -> None:
    """E-80."""
    from ostinato.backends.cuda.triton.matmul import bind_matmul

    # Whole numbers: the sums of a dot are exact, which the interpreter adds in another order for other sizes.
    x = torch.randint(-8, 9, (32, 256)).float()
    weight: Any = torch.randint(-8, 9, (48, 256)).bfloat16() if type is None else random_packed(type, 48, 256)
    alone = None
    for n_rows in (1, 2, 8, 9, 32):
        out, stats = torch.zeros(32, 48), torch.zeros(32, n_stats(48), 2)
        bind_matmul(x, weight, out, torch.tensor([n_rows], dtype=torch.int32), scale=0.3, stats=stats)()
        found = torch.cat((out[0], stats[0].flatten()))
        alone = found if alone is None else alone
        assert torch.equal(found, alone), n_rows


def test_attention_is_right_at_every_length_to_66_and_at_1024() -> None:
    """E-50; tests/backends/cuda/triton/test_attend.py has the step boundaries of pages and splits beyond."""
    for positions in (range(66), (1023,)):
        step = made(Case(tuple(positions), n_heads=1, width=16))
        seen, _ = run(step, programs=1)
        for row, position in enumerate(positions):
            expected = torch.from_numpy(reference(step, row))
            assert (seen[row] - expected).abs().max() <= 1e-5 * expected.abs().max(), position


# By kernel a test that compares it with its reference.
KERNEL_TESTS: dict[str, Callable[[], None]] = {
    "activation_kernel": partial(test_activation.test_rows_are_bent_as_the_twin_bends_them, "silu", True),
    "add_norm_kernel": partial(test_add_norm.test_it_equals_the_twin_and_leaves_dead_rows_alone, 16),
    "attend_kernel": partial(test_attend.test_every_store_grouping_and_width_equals_the_twin, "f32", 1, 64),
    "append_chunk_kernel": partial(
        test_chunk_attention.test_appending_equals_the_twin_and_writes_no_other_cell, "f32", torch.float32
    ),
    "chunk_attention_kernel": partial(test_chunk_attention.test_windows_caps_and_sinks_equal_float64, None, None),
    "embed_kernel": partial(test_embed.test_it_equals_the_twin_and_leaves_dead_rows_alone, torch.float32, None),
    "route_kernel": partial(test_experts.test_routing_takes_the_highest_scores_in_order_of_the_experts, True),
    "experts_gate_up_kernel": partial(test_experts.test_gate_and_up_of_each_rows_own_experts, "F32", 2),
    "experts_down_kernel": partial(test_experts.test_a_row_is_the_weighted_sum_of_its_experts, "F32", 2),
    "gemm_kernel": partial(test_gemm.test_every_weight_type_on_sizes_that_are_no_whole_tiles, "F32"),
    "logprobs_kernel": partial(test_logprobs.test_it_equals_the_twin, 131, 5, 128),
    "matmul_kernel": partial(test_matmul.test_every_weight_type_with_every_epilogue, "F32", "store"),
    "norm_kernel": partial(test_norm.test_rows_of_any_width_are_normed_as_the_twin_does, 64, False),
    "shape_kernel": test_sample.test_greedy_rows_take_what_the_twin_takes,
    "gather_kernel": partial(test_sample.test_draws_are_the_twins_whether_listed_or_searched, test_sample.ROOMY),
    "choose_kernel": test_sample.test_greedy_rows_take_what_the_twin_takes,
    "unpack_kernel": test_unpack.test_plain_weights_come_back_to_the_bit,
    "conv_kernel": partial(test_runs.test_a_convolution_carries_on_from_each_slots_inputs, test_runs.RUNS[0]),
    "keep_inputs_kernel": partial(test_runs.test_a_convolution_carries_on_from_each_slots_inputs, test_runs.RUNS[0]),
    "ssd_kernel": partial(test_runs.test_scans_carry_on_from_each_slots_state, test_runs.RUNS[1]),
    "selective_kernel": partial(test_runs.test_scans_carry_on_from_each_slots_state, test_runs.RUNS[1]),
    "delta_kernel": partial(test_runs.test_scans_carry_on_from_each_slots_state, test_runs.RUNS[1]),
    "short_conv_kernel": partial(
        test_runs.test_a_short_convolution_has_a_gate_before_it_and_one_after_it, test_runs.RUNS[0]
    ),
    "keep_gated_kernel": partial(
        test_runs.test_a_short_convolution_has_a_gate_before_it_and_one_after_it, test_runs.RUNS[0]
    ),
    "gate_kernel": partial(test_runs.test_rows_are_gated_and_normed_by_groups_in_either_order, test_runs.RUNS[0]),
    "selected_kernel": partial(test_runs.test_mambas_selected_parts_are_normed_and_set_apart, True),
    "join_parts_kernel": test_norm.test_parts_of_a_row_are_normed_alone_and_joined_for_live_rows,
    "gate_heads_kernel": partial(test_runs.test_what_heads_have_seen_is_gated_for_live_rows, torch.float32),
    "latent_rows_kernel": partial(test_latent.test_a_step_equals_the_twin_and_touches_nothing_else, "f32"),
    "heads_product_kernel": partial(test_latent.test_a_product_of_each_head_equals_the_twin, "F32", 20, True),
    "attend_latent_kernel": partial(test_latent.test_a_step_equals_the_twin_and_touches_nothing_else, "f32"),
    "merge_latent_kernel": partial(test_latent.test_a_step_equals_the_twin_and_touches_nothing_else, "f32"),
    "attend_latent_chunk_kernel": partial(test_latent.test_every_row_of_a_chunk_equals_the_twin, "f32", torch.float32),
}


def test_every_kernel_is_in_the_catalogue() -> None:
    """E-84."""
    launched = r"^@triton\.jit(?:\(.*\))?\ndef (\w+_kernel)\("
    modules = (PACKAGE / "backends").rglob("*.py")
    found = [name for path in modules for name in re.findall(launched, path.read_text(), re.MULTILINE)]
    assert sorted(found) == sorted(KERNEL_TESTS)


@pytest.mark.parametrize("name", KERNEL_TESTS)
def test_a_kernel_that_does_nothing_is_noticed_by_its_test(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-84."""
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import InterpretedFunction

    run, missed = InterpretedFunction.run, []

    def without(kernel: Any, *args: Any, **words: Any) -> None:
        if kernel.__name__ == name:
            missed.append(name)
        else:
            run(kernel, *args, **words)

    monkeypatch.setattr(InterpretedFunction, "run", without)
    with pytest.raises((AssertionError, InterpreterError)):
        KERNEL_TESTS[name]()
    assert missed
