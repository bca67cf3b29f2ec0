"""A chip by its limits, and the one that OSTINATO_CHIP makes of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ostinato.backends.machine import SHARED_BYTES, TUNED, Chip, pretended
from ostinato.errors import HardwareCannot


def test_a_chip_is_named_as_the_compilers_name_it() -> None:
    assert Chip((8, 6), 84, 99 << 10).arch == Chip((8, 6), 84, 99 << 10).exact_arch == "sm_86"
    assert (TUNED.arch, TUNED.exact_arch) == ("sm_90", "sm_90a")
    assert Chip((12, 0), 170, 99 << 10).exact_arch == "sm_120a"


def test_instructions_follow_from_the_capability_as_a_number() -> None:
    chips = {capability: Chip(capability, 1, shared) for capability, shared in SHARED_BYTES.items()}
    assert [one for one, chip in chips.items() if not chip.has_bulk_copies] == [(8, 0), (8, 6), (8, 7), (8, 9)]


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_87", "sm_89"])
def test_a_smaller_chip_is_believed_in_with_its_limits_and_the_gpus_multiprocessors(name: str) -> None:
    chip = pretended(TUNED, name)
    assert chip.arch == name
    assert chip.shared_bytes == SHARED_BYTES[chip.capability]
    assert chip.n_multiprocessors == TUNED.n_multiprocessors
    assert chip.is_pretended
    assert chip.device_capability == (9, 0)
    assert not TUNED.is_pretended


@pytest.mark.parametrize("name", ["sm89", "sm_75", "sm_100", "hopper"])
def test_a_chip_that_this_gpu_cannot_run_as_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(HardwareCannot, match=rf"OSTINATO_CHIP is {name!r}; this GPU .sm_90. can run as .*sm_89"):
        pretended(TUNED, name)


def test_a_chip_with_more_shared_memory_than_the_gpu_is_refused_with_both_numbers() -> None:
    with pytest.raises(HardwareCannot, match=r"sm_80, whose blocks have 166912 bytes .* .sm_89. have 101376"):
        pretended(Chip((8, 9), 128, 99 << 10), "sm_80")


def test_the_variable_is_read_where_a_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ostinato.backends.cuda.gpu import chip_of

    card = SimpleNamespace(major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: card)
    monkeypatch.delenv("OSTINATO_CHIP", raising=False)
    assert chip_of(0) == TUNED
    monkeypatch.setenv("OSTINATO_CHIP", "sm_89")
    assert chip_of(0) == Chip((8, 9), 132, 101_376, (9, 0))
