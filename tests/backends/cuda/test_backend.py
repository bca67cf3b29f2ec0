"""What the GPU's general backend can run, by blocks and sizes, and on which machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostinato.backends.cuda.backend import CUDA, why_not_blocks
from ostinato.backends.machine import SHARED_BYTES, Chip, Machine
from ostinato.extras import install_command
from ostinato.models.header import tensors_in
from ostinato.options import LoadOptions
from tests.backends.families import FAMILIES, LATENT, RECURRENT, family_model
from tests.random_model import random_model

CARD = Machine("cuda:0", 1 << 40, 1 << 40, driver_cuda=13_000)


@pytest.mark.parametrize("family", FAMILIES + RECURRENT + LATENT)
def test_it_runs_every_family_in_every_mode(family: str) -> None:
    model = family_model(family)
    asked = (model.shape, tensors_in(model), LoadOptions(), CARD)
    assert [CUDA.why_not(mode, *asked) for mode in CUDA.modes] == [None] * 3


def test_what_has_no_kernels_is_told_by_name() -> None:
    """E-26."""
    assert why_not_blocks(random_model("encoder").shape) == "bert is an encoder"
    assert "heads of width 8" in (why_not_blocks(random_model("hybrid", hidden=32).shape) or "")
    # Without attention there are no heads.
    assert why_not_blocks(random_model("recurrent", hidden=32).shape) is None


def test_eight_bit_keys_of_latent_attention_need_whole_blocks_of_either_part() -> None:
    """Told before weights are read: 64 numbers are two blocks, 16 rotated and 48 compressed ones are not."""
    model = family_model("deepseek2")
    asked = (model.shape, tensors_in(model), LoadOptions(kv_type="q8_0"), CARD)
    reason = "latent attention over q8_0 keys of 16 rotated numbers and 48 compressed ones"
    assert [CUDA.why_not(mode, *asked) for mode in CUDA.modes] == [reason] * 3


def test_a_machine_is_told_what_it_lacks() -> None:
    assert CUDA.why_not_here("loop", CARD) is None
    bare = replace(CARD, missing=("triton", "cuda-core"))
    assert CUDA.why_not_here("eager", bare) == f"not installed: triton, cuda-core; type: {install_command('gpu')}"
    old = replace(CARD, driver_cuda=12_030)
    assert CUDA.why_not_here("graph", old) is None
    assert CUDA.why_not_here("loop", old) == "the NVIDIA driver knows CUDA 12.3; WHILE nodes need 12.4 or newer"
    assert "does not tell" in (CUDA.why_not_here("loop", replace(CARD, driver_cuda=None)) or "")
    assert CUDA.why_not_here("graph", Machine("cpu", 0, 0)) == "graphs are CUDA's"


def test_chips_older_than_ampere_are_refused_by_their_capability_in_every_mode() -> None:
    turing = replace(CARD, chip=Chip((7, 5), 40, 64 << 10))
    for mode in CUDA.modes:
        reason = CUDA.why_not_here(mode, turing)
        assert reason == "compute capability 7.5 is too old: the kernels need 8.0 (Ampere) or newer"
    for capability, shared in SHARED_BYTES.items():
        assert CUDA.why_not_here("loop", replace(CARD, chip=Chip(capability, 20, shared))) is None


def test_a_kernel_that_fits_no_block_is_told_by_name_before_weights_are_read() -> None:
    model = family_model("llama")
    tiny = replace(CARD, chip=Chip((8, 0), 20, 20_000))
    asked = (model.shape, tensors_in(model), LoadOptions(), tiny)
    reason = CUDA.why_not("loop", *asked)
    assert reason is not None
    assert reason.startswith("the product with F32 weights needs ")
    assert reason.endswith("bytes of shared memory, and a block has 20000 here")
