"""A file of requests through Ray Data: killed and started again, the same digests as in one process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.scale.conftest import line, read_lines, write_lines

pytest.importorskip("ray", reason="the extra `scale` is not installed: batches on Ray were not tested")
pytestmark = pytest.mark.slow

N = 120


def test_a_batch_over_two_engines_killed_once_has_the_answers_of_one_process(tiny: Path, tmp_path: Path) -> None:
    requests = write_lines(tmp_path / "in", [line(n, max_tokens=16) if n % 40 else "{damaged" for n in range(1, N + 1)])
    words = [sys.executable, "-m", "ostinato", "batch", requests, "OUT", "--model", tiny, "--device", "cpu", "--json"]
    words += ["--context", "256", "--slots", "2"]

    def command(out: str, *more: str) -> list[str]:
        return [*map(str, words[:5]), str(tmp_path / out), *map(str, words[6:]), *more]

    out = tmp_path / "ray"
    with subprocess.Popen(command("ray", "--replicas", "2"), stderr=subprocess.DEVNULL) as running:
        end = time.monotonic() + 100
        while time.monotonic() < end and (not out.exists() or out.read_bytes().count(b"\n") < 20):
            time.sleep(0.01)
        running.kill()
    before = out.read_bytes().count(b"\n")
    assert 20 <= before < N
    done = subprocess.run(command("ray", "--replicas", "2"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["before"] + told["answered"] + told["damaged"] == N
    alone = subprocess.run(command("alone"), capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stderr
    found, wanted = ({one["line"]: one for one in read_lines(tmp_path / name)} for name in ("ray", "alone"))
    assert Counter(one["line"] for one in read_lines(out)) == Counter(range(1, N + 1))
    for number, one in wanted.items():
        mine = found[number]
        if one["response"] is None:
            assert mine == one
        else:
            assert mine["response"]["body"]["digest"] == one["response"]["body"]["digest"]


def test_the_application_for_a_yaml_file_is_built_from_words() -> None:
    """In a process of its own: Ray warns of itself."""
    code = (
        "import ostinato.scale as scale\n"
        "made = scale.app({'model': 'smollm2', 'replicas': 2, 'max_replicas': 4, 'slots': 3})\n"
        "print(type(made).__name__)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "Application\n", ran.stderr
