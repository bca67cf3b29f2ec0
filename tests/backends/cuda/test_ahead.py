"""Kernels are compiled before weights take memory, all of them, and what cannot be compiled is told there (E-9)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from ostinato import LLM
from ostinato.backends.base import Settled
from ostinato.backends.cuda import gpu, ready, start
from ostinato.backends.cuda.launch import TritonLaunch
from ostinato.backends.machine import TUNED
from ostinato.backends.tape import start as tape_start
from ostinato.backends.torch import load as torch_load
from ostinato.engine.load import load_model
from ostinato.errors import HardwareCannot
from ostinato.files.checkpoint import Checkpoint, open_checkpoint
from ostinato.models.registry import read_shape
from tests.backends.families import FAMILIES, LATENT, RECURRENT

ROOT = Path(__file__).parents[3]
ON_A_GPU = Settled(
    "cuda:0", "cuda", "loop", "bfloat16", "bf16", 64, n_slots=2, n_pages=2, weights="packed", grammar_bytes=1 << 20
)
ON_THE_TAPE = replace(ON_A_GPU, backend="tape", mode="persistent")


class ClaimedError(Exception):
    """Memory for weights was asked for: loading has come so far."""


class GpuOfNames:
    """Notes what is compiled, claimed and read, in order; ends when memory is claimed, since there is none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[str] = []
        self.fails: dict[str, Exception] = {}  # by the kernel's name
        monkeypatch.setattr(ready, "_READY", {})
        monkeypatch.setattr(ready, "_current", lambda device: nullcontext())
        monkeypatch.setattr(gpu, "chip_of", lambda device: TUNED)
        monkeypatch.setattr(start, "loaded", lambda name, *_: self.noted.append(name))
        monkeypatch.setattr(tape_start, "tape_kernel", lambda *_: self._made("tape"))
        monkeypatch.setattr(torch_load, "BumpAllocator", self._claim)
        monkeypatch.setattr(TritonLaunch, "compile", lambda launch: self._made(launch.kernel.__name__))
        for name in ("raw", "read"):
            monkeypatch.setattr(Checkpoint, name, lambda *_, **__: self.noted.append("bytes"))

    def _made(self, name: str) -> None:
        if name in self.fails:
            raise self.fails[name]
        self.noted.append(name)

    def _claim(self, n_bytes: int, device: torch.device) -> Any:
        self.noted.append("memory for weights")
        raise ClaimedError


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> GpuOfNames:
    return GpuOfNames(monkeypatch)


def load(file: Path, settled: Settled) -> None:
    with open_checkpoint(file) as checkpoint:
        load_model(checkpoint, read_shape(checkpoint), settled)


def test_everything_is_compiled_before_memory_for_weights_is_claimed(card: GpuOfNames, tiny_gguf: Path) -> None:
    with pytest.raises(ClaimedError):
        load(tiny_gguf, ON_A_GPU)
    *kernels, boundary, masks, last = card.noted
    assert (boundary, masks, last) == ("step_boundary.cu", "step_masks.cu", "memory for weights")
    assert {"matmul_kernel", "attend_kernel", "choose_kernel"} <= set(kernels)  # of a step
    assert {"gemm_kernel", "chunk_attention_kernel", "logprobs_kernel"} <= set(kernels)  # of prompts and outputs
    card.noted.clear()
    with pytest.raises(ClaimedError):  # a second engine of the process
        load(tiny_gguf, ON_A_GPU)
    # Of which the first two are kept by their bytes (E-8).
    assert card.noted == ["step_boundary.cu", "step_masks.cu", "memory for weights"]


def test_an_llm_compiles_its_sampler_for_the_tokens_of_its_tokenizer(
    card: GpuOfNames, tiny_gguf: Path, tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def note(launch: TritonLaunch) -> None:
        if launch.kernel.__name__ == "choose_kernel":
            found.append(launch.constants["S"].n_tokens)

    monkeypatch.setattr(LLM, "_choose", lambda *_: ON_A_GPU)
    monkeypatch.setattr(TritonLaunch, "compile", note)
    with pytest.raises(ClaimedError):
        LLM(tiny_gguf)
    assert set(found) == {tiny_llm.tokenizer.vocab_size}


def test_the_persistent_kernel_and_its_prompts_kernels_come_before_weights_too(
    card: GpuOfNames, tiny_gguf: Path
) -> None:
    with pytest.raises(ClaimedError):
        load(tiny_gguf, ON_THE_TAPE)
    assert card.noted[0] == "tape"
    assert card.noted[-1] == "memory for weights"
    assert "gemm_kernel" in card.noted
    assert "attend_kernel" not in card.noted  # of a step, which is the tape's


def test_where_the_persistent_kernel_cannot_be_had_the_mode_below_is_compiled_for(
    card: GpuOfNames, tiny_gguf: Path
) -> None:
    """E-57: that mode will be opened in its place, over the weights that are read now."""
    card.fails["tape"] = HardwareCannot("132 blocks wait for each other, and 66 fit")
    with pytest.raises(HardwareCannot, match="66 fit"):
        load(tiny_gguf, ON_THE_TAPE)
    assert card.noted == []
    with pytest.raises(ClaimedError):
        load(tiny_gguf, replace(ON_THE_TAPE, fallback="loop"))
    assert {"attend_kernel", "gemm_kernel", "step_boundary.cu"} <= set(card.noted)


def test_a_kernel_that_cannot_be_had_ends_the_loading_before_any_weight_is_read(
    card: GpuOfNames, tiny_gguf: Path
) -> None:
    card.fails["gemm_kernel"] = HardwareCannot("gemm_kernel needs 240000 (shared memory), and this GPU has 101376")
    with pytest.raises(HardwareCannot, match="gemm_kernel needs 240000"):
        load(tiny_gguf, ON_A_GPU)
    assert "memory for weights" not in card.noted
    assert "bytes" not in card.noted


class Kernel:
    """One that Triton compiles, or fails to."""

    __name__ = "matmul_kernel"

    def __init__(self, error: Exception | None = None, late: Exception | None = None) -> None:
        self._error, self._late = error, late
        self.n_compiled = 0

    def warmup(self, *args: Any, grid: tuple[int, ...], **words: Any) -> Kernel:
        self.n_compiled += 1
        if self._error is not None:
            raise self._error
        return self

    @property
    def run(self) -> None:
        """Triton loads a binary when this is asked for, and finds there that it does not fit."""
        if self._late is not None:
            raise self._late


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (
            Kernel(RuntimeError("a pass\nPassManager::run failed")),
            "could not compile matmul_kernel: PassManager::run f",
        ),
        (Kernel(ValueError()), "could not compile matmul_kernel: ValueError"),
        (Kernel(late=OutOfResources(240_000, 101_376, "shared memory")), r"matmul_kernel needs 240000 .*has 101376"),
    ],
)
def test_what_a_compiler_says_becomes_an_error_with_the_kernels_name(kernel: Kernel, said: str) -> None:
    with pytest.raises(HardwareCannot, match=said):
        TritonLaunch(kernel, (1,), (), {}).compile()


def test_a_program_is_compiled_once_whatever_is_launched_with_it() -> None:
    """As Triton tells programs apart: by types, alignment to 16, whole numbers that are 1 or multiples of 16."""
    kernel, device = Kernel(), torch.device("cpu", 7)
    x = torch.zeros(64)
    same: list[tuple[Any, ...]] = [(x, 32, 0.5, None), (x[4:], 64, 1.5, None)]
    assert ready.compile_missing([TritonLaunch(kernel, (1,), args, {"N": 1}) for args in same], device) == 1
    others: list[tuple[Any, ...]] = [
        (x[1:], 32, 0.5, None), (x.half(), 32, 0.5, None), (x, 1, 0.5, None), (x, 33, 0.5, None),
        (x, 2**40, 0.5, None), (x, 32, 0.5, x), (x, 32, 2, None), ((x, 32), 32, 0.5, None),
    ]  # fmt: skip
    launches = [TritonLaunch(kernel, (1,), args, {"N": 1}) for args in others]
    launches += [TritonLaunch(kernel, (1,), same[0], {"N": 2}), TritonLaunch(kernel, (1,), same[0], {"num_warps": 8})]
    assert ready.compile_missing([*launches, *launches], device) == len(launches) == kernel.n_compiled - 1
    assert ready.compile_missing(launches, device) == 0


@pytest.fixture(scope="module")
def phases() -> dict[str, dict[str, Any]]:
    """What the child says of each model."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.backends.cuda.compiled_ahead"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert child.returncode == 0, child.stderr[-3000:]
    return {row["model"]: row for row in map(json.loads, child.stdout.splitlines())}


@pytest.mark.slow
def test_what_is_compiled_ahead_is_what_an_engine_launches_by_tritons_own_keys(
    phases: dict[str, dict[str, Any]],
) -> None:
    """Of packed weights, experts, recurrent layers and the rest: the programs compiled ahead are those that are
    launched later, and no other; a second engine compiles nothing."""
    other = phases.pop("opened for fewer tokens")
    assert set(phases) > {*FAMILIES, *RECURRENT, *LATENT, "K types", "prompts from the tape"}
    for name, row in phases.items():
        assert row["ahead"] > 15, name
        assert (row["late"], row["never_launched"], row["again"], row["told"]) == ([], [], 0, None), name
        assert row["loaded"] == ([] if row["same_header"] else ["step_boundary.cu"]), name
    assert phases["tape"]["same_header"]  # the persistent kernel that was compiled is the one that is opened
    assert phases["prompts from the tape"]["same_header"]
    assert set(other["late"]) == {"shape_kernel", "gather_kernel", "choose_kernel"}  # so this test can fail
    assert other["told"].startswith("shape_kernel is not compiled for cuda:0")
