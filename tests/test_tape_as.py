"""The comparison of the persistent kernel's variants, tried in the emulator and without a GPU."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

from bench import tape_as
from ostinato.backends.machine import Capability
from tests.backends.tape.loop import tape_driver
from tests.backends.tape.models import shape_of, small


@pytest.mark.slow
def test_a_digest_is_of_the_bits_and_not_of_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_as, "N_STEPS", 3)

    def digest(capability: Capability, seed: int) -> str:
        with closing(tape_driver(small(shape_of(), seed=seed), capability=capability)) as driver:
            return tape_as.digest(driver, 2, 203)

    assert digest((9, 0), 0) == digest((8, 0), 0) != digest((8, 0), 1)


def test_other_bits_and_children_that_fail_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: dict[str, dict[str, Any]] = {
        tape_as.OWN: {"digest": "a"},
        tape_as.LIFTED: {"digest": "b", "lifted": True},
        "sm_90": {"digest": "a"},
        "sm_80": {"digest": "b", "lifted": True},
    }
    monkeypatch.setattr(tape_as, "child", lambda chip, *_: said[chip])
    assert tape_as.compare(["sm_80", "sm_90"])
    said["sm_80"] = {"digest": "a", "lifted": True}
    assert not tape_as.compare(["sm_80", "sm_90"])
    assert "OTHER tiny bf16 8 sm_80" in capsys.readouterr().out
    said["sm_80"] = {"error": "no"}
    assert not tape_as.compare(["sm_80"])


def test_a_child_that_fails_has_its_last_line_as_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    done = type("Done", (), {"returncode": 1, "stderr": "Traceback\nHardwareCannot: no room\n", "stdout": ""})
    monkeypatch.setattr("subprocess.run", lambda *_, **__: done)
    assert tape_as.child("sm_80", "bits", ("tiny", "bf16", 1)) == {"error": "HardwareCannot: no room"}
    done = type("Done", (), {"returncode": 0, "stderr": "", "stdout": "a line\n" + json.dumps({"digest": "x"})})
    assert tape_as.child(tape_as.OWN, "bits", ("tiny", "bf16", 1)) == {"digest": "x"}
