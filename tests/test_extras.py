"""What is optional: every extra is known, and what to type for it is right."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from ostinato import LLM, extras
from ostinato.errors import HardwareCannot
from ostinato.extras import check_extra, install_command, why_missing

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_packages_of_an_extra_are_those_of_the_project() -> None:
    assert set(extras.PACKAGES) == set(EXTRAS) - {"dev"}
    for extra, packages in extras.PACKAGES.items():
        assert set(packages) == packages_of(extra) - NOT_IMPORTED


NOT_IMPORTED = {"uvloop", "httptools"}  # found by others, or done without


def packages_of(extra: str) -> set[str]:
    """The packages of an extra, with those of the extras that it holds."""
    named = [re.match(r"[\w-]+(?:\[(\w+)\])?", entry) for entry in EXTRAS[extra]]
    own = {found[0].split("[")[0]: found[1] for found in named if found}
    held = own.pop("ostinato", None)
    return own.keys() | (packages_of(held) if held else set())


def test_a_gpu_runs_with_the_bindings_of_cuda_12_and_of_13() -> None:
    """A build of torch needs those of its own CUDA; both were compiled with (docs/install.md)."""
    wanted = next(SpecifierSet(entry[len("cuda-bindings") :]) for entry in EXTRAS["gpu"] if "cuda-bindings" in entry)
    assert [version in wanted for version in ("12.8.0", "12.9.4", "12.9.10", "13.0.3", "13.5.0", "14.0.0")] == [
        *(False, True, True, True, True, False)
    ]


def test_what_is_missing_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_missing("torch", "it") is None
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(HardwareCannot, match="it needs torch, which is not installed; type: ") as refused:
        check_extra("torch", "it")
    assert install_command("torch") in str(refused.value)
    assert refused.value.exit_code == 4
    assert install_command("serve").endswith(f"--editable '{ROOT}[serve]'")


def test_on_linux_without_a_driver_the_cpu_build_of_torch_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(extras, "_NVIDIA", tmp_path / "absent")
    assert "--torch-backend cpu" in (why_missing("torch", "it") or "")
    monkeypatch.setattr(extras, "_NVIDIA", tmp_path)
    assert "--torch-backend cpu" not in (why_missing("torch", "it") or "")


@pytest.mark.parametrize("words", [{"mode": "eager"}, {"dtype": "bfloat16"}])
def test_what_only_torch_can_do_is_refused_before_anything_is_loaded(
    words: dict[str, str], tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("ostinato.llm.load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(HardwareCannot, match="needs torch, which is not installed; type: "):
        LLM(tiny_gguf, device="cpu", **words)  # type: ignore[arg-type]  # by name


def test_a_decoder_of_the_callers_own_needs_torch(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_gguf, device="cpu") as llm:
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(HardwareCannot, match=r"LLM\.decoder needs torch"):
            llm.decoder()
