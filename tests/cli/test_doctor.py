"""`ostinato doctor`: an honest report on whatever machine the tests run on."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run


def report(ostinato: Run) -> dict[str, Any]:
    ran = ostinato("doctor", "--json")
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_it_says_what_can_run_and_why_not_the_rest(ostinato: Run) -> None:
    import torch

    found = report(ostinato)
    modes = {(mode["device"], mode["mode"]): mode for mode in found["modes"]}
    assert modes["cpu", "eager"]["can_run"]
    assert modes["cuda", "eager"]["can_run"] == torch.cuda.is_available()
    assert all(mode["can_run"] or mode["reason"] for mode in found["modes"])
    for name in ("graph", "loop", "persistent"):
        assert "not built yet" in modes["cuda", name]["reason"]


def test_it_knows_the_machine(ostinato: Run) -> None:
    import torch

    found = report(ostinato)
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == torch.__version__
    assert 1 <= found["cpu"]["cores"] <= (os.cpu_count() or 1)
    assert 0 < found["memory"]["free"] <= found["memory"]["total"]


def test_it_knows_the_store(ostinato: Run, home: Path) -> None:
    kept = report(ostinato)["store"]
    assert (kept["home"], kept["writable"], kept["models"]) == (str(home), True, [])
    assert kept["free"] > 0
    assert not home.exists()


def test_a_store_that_cannot_be_written_is_pointed_out(
    ostinato: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "file" / "home"))
    ran = ostinato("doctor")
    assert ran.code == 0
    assert "NOT WRITABLE: set OSTINATO_HOME" in ran.out


def test_plain_output_fits_people(ostinato: Run) -> None:
    ran = ostinato("doctor")
    assert ran.code == 0
    for words in ("python", "torch", "memory", "cpu eager", "can run", "cuda persistent", "store"):
        assert words in ran.out
