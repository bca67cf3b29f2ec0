"""Old and odd systems: each ends in a sentence that says what to do. None of them could be had: torch and the driver
are stubs here, and answer what their documentation says."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.backends.cuda import gpu
from ostinato.backends.machine import Chip
from ostinato.engine import machine
from ostinato.engine.choose import why_not_here
from ostinato.engine.machine import choose_device, machine_at, why_gpu_unused, why_no_cuda, why_not_usable
from ostinato.errors import HardwareCannot

GB = 10**9
ADA = SimpleNamespace(major=8, minor=9, multi_processor_count=128, shared_memory_per_block_optin=99 << 10)
HOPPER = SimpleNamespace(major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 << 10)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the machine one with an NVIDIA driver and all packages, and with these answers of torch and the driver."""

    def make(
        *cards: SimpleNamespace,
        driver: int | None = 13_000,
        built_for: str | None = "13.0",
        failure: int = 0,
        free: tuple[int, ...] = (),
        lacking: tuple[str, ...] = (),
        archs: tuple[str, ...] = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    ) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("OSTINATO_CHIP", raising=False)
        monkeypatch.setattr(machine, "driver_cuda", lambda: driver)
        monkeypatch.setattr(machine, "driver_version", lambda: "580.1")
        monkeypatch.setattr(machine, "_cu_init", lambda: failure)
        monkeypatch.setattr(machine, "missing", lambda extra: lacking)
        monkeypatch.setattr("ostinato.extras.missing", lambda extra, packages=(): lacking)
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(archs))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[torch.device(device).index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device}")
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: (free[torch.device(device).index], 24 * GB) if free else (0, 0)
        )

    return make


def test_gpus_of_different_kinds_are_each_judged_by_their_own_chip_and_memory(system: Callable[..., None]) -> None:
    system(ADA, HOPPER, free=(20 * GB, 3 * GB))
    assert (choose_device("auto"), choose_device("cuda"), choose_device("cuda:1")) == ("cuda:0", "cuda:0", "cuda:1")
    first, second = (machine_at(device) for device in ("cuda:0", "cuda:1"))
    assert (first.chip, second.chip) == (Chip((8, 9), 128, 99 << 10), Chip((9, 0), 132, 227 << 10))
    assert (first.free_bytes, second.free_bytes, second.total_bytes) == (20 * GB, 3 * GB, 24 * GB)
    with pytest.raises(HardwareCannot, match=r"device cuda:2: this machine has 2 GPU\(s\), numbered from 0"):
        choose_device("cuda:2")


def test_a_slice_of_a_gpu_is_what_it_reports(system: Callable[..., None]) -> None:
    """A MIG slice: few multiprocessors, and memory of its own."""
    system(SimpleNamespace(**{**vars(HOPPER), "multi_processor_count": 16}), free=(9 * GB,))
    found = machine_at("cuda:0")
    assert found.chip is not None
    assert (found.chip.n_multiprocessors, found.chip.attention_programs, found.free_bytes) == (16, 64, 9 * GB)
    assert why_not_here(found)["persistent"] is None


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"driver": None}, "there is no NVIDIA driver"),
        ({"built_for": None}, "this build of torch has no CUDA; install one that has: "),
        ({"driver": 12_040}, "the NVIDIA driver knows CUDA 12.4, and this build of torch is for CUDA 13.0: update the"),
        ({"failure": 100}, "the NVIDIA driver finds no GPU: `nvidia-smi` must list one"),
        ({"failure": 802}, "start NVIDIA's fabric manager"),
        ({"failure": 803}, "library and its kernel module are of different versions: restart the machine"),
        ({"failure": 804}, "take cuda-compat out of LD_LIBRARY_PATH"),
        ({"failure": 999}, "modprobe nvidia_uvm"),
        ({"failure": 3}, "cannot start (error 3)"),
        ({"lacking": ("cuda-core",)}, "an NVIDIA GPU needs cuda-core, which is not installed; type: "),
    ],
)
def test_a_gpu_that_cannot_be_used_has_its_reason_and_what_to_do(
    answers: dict[str, Any], words: str, system: Callable[..., None]
) -> None:
    system(**answers)
    reason = why_no_cuda()
    assert reason is not None
    assert words in reason
    with pytest.raises(HardwareCannot) as refused:
        choose_device("cuda")
    assert str(refused.value) == f"device cuda: {reason}; use the device cpu"
    # Without --device the CPU runs, and where there is a driver that is told with the same reason.
    assert choose_device("auto") == "cpu"
    unused = why_gpu_unused()
    assert (
        unused is None if answers.get("driver", 1) is None else unused is not None and unused[:14] == "the CPU runs: "
    )


@pytest.mark.parametrize("visible", ["", "-1", "7", "GPU-00000000"])
def test_gpus_that_are_hidden_are_named_as_the_reason(
    visible: str, system: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    system(failure=100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    reason = why_no_cuda()
    assert reason is not None
    assert reason.startswith(f"CUDA_VISIBLE_DEVICES is {visible!r}, and names no GPU of this machine: unset it")
    # Who hides all of them on purpose is not told of it at every start.
    assert (why_gpu_unused() is None) == (visible in ("", "-1"))


def test_a_number_is_among_the_visible_gpus(system: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    system(HOPPER, free=(1,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert choose_device("cuda:0") == "cuda:0"
    with pytest.raises(HardwareCannot, match=r"has 1 GPU\(s\) of those that CUDA_VISIBLE_DEVICES='3' leaves, numbered"):
        choose_device("cuda:3")


def test_a_gpu_number_that_is_not_there_is_refused_with_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-12."""
    monkeypatch.setattr("ostinato.engine.machine.driver_cuda", lambda: 13_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == "cuda:1"
    with pytest.raises(HardwareCannot, match=r"cuda:99: this machine has 2 GPU\(s\), numbered from 0"):
        choose_device("cuda:99")


@pytest.mark.parametrize("driver", [12_040, 12_060, 12_080, 12_090])
def test_drivers_for_cuda_12_run_every_mode_with_a_build_of_torch_for_it(
    driver: int, system: Callable[..., None]
) -> None:
    system(HOPPER, driver=driver, built_for="12.6", free=(9 * GB,))
    assert why_no_cuda() is None
    assert set(why_not_here(machine_at("cuda:0")).values()) == {None}


def test_packages_that_do_not_go_together_are_told_before_they_are_needed(
    system: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    system(HOPPER, free=(9 * GB,))
    assert why_no_cuda() is None
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    reason = why_no_cuda()
    assert reason is not None
    assert reason.startswith("cuda-core and cuda-bindings cannot be imported (")
    assert "type: " in reason


def test_a_gpu_that_another_process_fills_so_that_not_even_a_context_fits_is_told(
    system: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    system(HOPPER, free=(0,))

    def full(device: object) -> None:
        raise torch.OutOfMemoryError("CUDA error: out of memory\nCUDA kernel errors might be ...")

    monkeypatch.setattr(gpu, "memory_of", full)
    words = (
        r"^cuda:0 cannot be used \(CUDA error: out of memory\): another process may fill it .*, or use another --device"
    )
    with pytest.raises(HardwareCannot, match=words):
        machine_at("cuda:0")


def test_older_chips_are_refused_by_name(system: Callable[..., None]) -> None:
    system(SimpleNamespace(**{**vars(ADA), "major": 7, "minor": 5}), free=(9 * GB,))
    reasons = why_not_here(machine_at("cuda:0"))
    assert all(why is not None and "7.5" in why for why in reasons.values())


def test_torch_that_finds_nothing_without_a_reason_is_told_too() -> None:
    assert why_not_usable("12.8", 13_000, 0, None) == "torch finds no GPU that it can use: `nvidia-smi` must list one"


@pytest.mark.parametrize(
    ("capability", "archs", "can"),
    [
        ((8, 9), ("sm_80", "sm_90"), True),  # by the binary of an earlier chip of its kind
        ((8, 0), ("sm_86",), False),
        ((12, 0), ("sm_80", "sm_90"), False),  # torch for CUDA 12.6
        ((12, 0), ("sm_90", "compute_90"), True),  # by PTX
        ((12, 1), ("sm_90a", "sm_120"), True),
        ((9, 0), (), True),  # it does not tell
    ],
)
def test_a_build_of_torch_without_kernels_for_the_card_is_told(
    capability: tuple[int, int], archs: tuple[str, ...], can: bool, system: Callable[..., None]
) -> None:
    major, minor = capability
    system(SimpleNamespace(**{**vars(ADA), "major": major, "minor": minor}), archs=archs, free=(9 * GB,))
    if can:
        machine_at("cuda:0")
        return
    words = f"^cuda:0: this build of torch has no kernels for sm_{major}{minor}, only for sm_.*; install one that has: "
    with pytest.raises(HardwareCannot, match=words):
        machine_at("cuda:0")


def test_the_drivers_version_is_that_of_its_module_or_on_wsl_of_nvml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12"
    monkeypatch.setattr(machine, "KERNEL_MODULE", tmp_path / "version")

    class Nvml:
        def nvmlInit_v2(self) -> int:
            return self.failure

        def nvmlShutdown(self) -> int:
            return 0

        def nvmlSystemGetDriverVersion(self, said: Any, size: int) -> int:
            said.value = b"581.15"
            return 0

        failure = 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    assert machine.driver_version() == "581.15"
    (tmp_path / "version").write_text(said)
    assert machine.driver_version() == "580.65.06"
    (tmp_path / "version").unlink()
    monkeypatch.setattr(Nvml, "failure", 18)  # the library and the kernel's module are of different versions
    assert machine.driver_version() is None
