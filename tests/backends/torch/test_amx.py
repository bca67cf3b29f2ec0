"""A CPU that announces AMX and refuses it must not end the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ostinato.backends.torch import amx


@pytest.fixture(autouse=True)
def a_home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    monkeypatch.delenv(amx.LIMIT, raising=False)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What torch's matrix library was switched to."""
    switched: list[bool] = []
    monkeypatch.setattr(torch.backends.mkldnn, "set_flags", switched.append)
    return switched


def announces(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    monkeypatch.setattr(amx, "cpu_line", lambda name: flags if name == "flags" else "a CPU")


def works(monkeypatch: pytest.MonkeyPatch, answer: bool) -> list[bool]:
    tries: list[bool] = []

    def once() -> bool:
        tries.append(answer)
        return answer

    monkeypatch.setattr(amx, "amx_works", once)
    return tries


def test_where_amx_fails_the_library_is_left_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, library: list[bool]
) -> None:
    announces(monkeypatch, "avx512f amx_bf16")
    tries = works(monkeypatch, False)
    said: list[str] = []
    amx.make_bfloat16_safe(said.append)
    amx.make_bfloat16_safe(said.append)
    assert tries == [False]  # the finding was kept
    assert library == [False, False]
    assert "AMX" in said[0]


@pytest.mark.parametrize(("flags", "n_tries"), [("avx2", 0), ("avx512f amx_bf16", 1)])
def test_a_cpu_without_amx_or_with_a_working_one_is_not_limited(
    flags: str, n_tries: int, monkeypatch: pytest.MonkeyPatch, library: list[bool]
) -> None:
    announces(monkeypatch, flags)
    tries = works(monkeypatch, True)
    amx.make_bfloat16_safe(lambda _: None)
    assert (len(tries), library) == (n_tries, [])


def test_a_limit_that_is_set_already_is_respected(monkeypatch: pytest.MonkeyPatch, library: list[bool]) -> None:
    announces(monkeypatch, "amx_bf16")
    tries = works(monkeypatch, False)
    monkeypatch.setenv(amx.LIMIT, "AVX2")
    amx.make_bfloat16_safe(lambda _: None)
    assert (tries, library, os.environ[amx.LIMIT]) == ([], [], "AVX2")


def test_a_broken_note_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "amx.json").write_text("{")
    announces(monkeypatch, "amx_bf16")
    works(monkeypatch, True)
    amx.make_bfloat16_safe(lambda _: None)


@pytest.mark.slow
def test_bfloat16_runs_on_this_machine_the_first_time_and_the_second(tiny_gguf: Path) -> None:
    opened = f"LLM({str(tiny_gguf)!r}, device='cpu', dtype='bfloat16')"
    code = f"from ostinato import LLM; print(len({opened}.logits([5, 6, 7])))"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr
