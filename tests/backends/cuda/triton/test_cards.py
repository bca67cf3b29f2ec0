"""Every kernel of the default plans, compiled for cards that nobody has here: it fits what their blocks have.

Compiled in a process of its own, since this one interprets. The full product, for every family, weight type and chip,
is `python -m bench.cards`, which `make soak` runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.cards import MARK, Row, main, table

ROOT = Path(__file__).parents[4]
AS_IF = """
import triton, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bench.compiling import specialisation_of
from ostinato.backends.cuda.launch import compile_as
from ostinato.backends.cuda.triton.gemm import bind_gemm
from ostinato.backends.machine import TUNED, pretended

chip = pretended(TUNED, "sm_89")
compile_as(chip)
half = torch.bfloat16
launch = bind_gemm(torch.zeros(64, 256, dtype=half), torch.zeros(256, 256, dtype=half), torch.zeros(64, 256), chip=chip)
specialised = specialisation_of(launch)
source = ASTSource(launch.kernel, specialised.signature, specialised.fixed, specialised.aligned)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=specialised.options)
print(made.asm["ptx"].split(".target ")[1].split()[0], "wgmma" in made.asm["ptx"], "mma.sync" in made.asm["ptx"])
print(made.asm["cubin"][48:52].hex())
"""


def child(*words: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {} if cache is None else {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.slow
def test_the_default_plans_fit_cards_of_99_and_163_kb() -> None:
    done = child("-m", "bench.cards", "--default", "--fast", "--arch", "sm_89,sm_80")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-3000:]
    assert {row["arch"] for row in rows} == {"sm_80", "sm_89"}
    assert all(0 < row["registers"] <= 255 for row in rows)
    products = [row for row in rows if row["kernel"] == "matmul" and row["arch"] == "sm_89"]
    assert {row["variant"] for row in products} >= {"Q4_1", "Q4_K", "Q6_K"}
    assert max(row["shared_bytes"] for row in products) > 80_000  # what fits is used


@pytest.mark.slow
def test_as_if_makes_ptx_for_the_other_chip_and_a_binary_for_the_one_that_is_there(tmp_path: Path) -> None:
    done = child("-c", AS_IF, cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    made, binary = done.stdout.splitlines()
    assert made == "sm_89 False True"
    assert "5a" in binary  # 90, where the binary's header says its chip


def row(arch: str, **more: Any) -> Row:
    return Row(**{"kernel": "matmul", "variant": "Q4_K", "arch": arch, "warps": 4, "stages": 3, **more})


def test_what_a_chip_has_no_room_for_is_told_with_both_numbers() -> None:
    assert row("sm_80", shared_bytes=110_592, registers=255).problem is None
    assert row("sm_89", shared_bytes=110_592).problem == (
        "needs 110592 bytes of shared memory, and a block of sm_89 has 101376"
    )
    assert row("sm_89", registers=255, warps=16).problem == "needs 130560 registers, and a block of sm_89 has 65536"
    assert row("sm_89", spilled_bytes=4000).problem == "spills 4000 bytes of a thread, more than 2304"
    assert row("gfx942", shared_bytes=65_536).problem is None
    assert "does not compile: no" in str(row("gfx942", error="no").problem)


def test_the_page_says_the_most_that_a_kernel_takes_of_each_chip(tmp_path: Path) -> None:
    rows = [row("sm_89", shared_bytes=4096, registers=40), row("sm_89", shared_bytes=512, registers=90)]
    text = table([*rows, row("sm_80", shared_bytes=70_000, registers=255, spilled_bytes=8)])
    assert text.splitlines() == [
        "| kernel | of | sm_80 | sm_89 |",
        "| --- | --- | ---: | ---: |",
        "| matmul | Q4_K | 70,000 / 255 +8 | 4,096 / 90 |",
    ]
    file, page = tmp_path / "rows", tmp_path / "page.md"
    file.write_text("".join(json.dumps(asdict(one) | {"problem": None}) + "\n" for one in rows), "utf-8")
    page.write_text(f"# Cards\n\n{MARK}\n\nold\n", "utf-8")
    assert main(["--rows", str(file), "--out", str(page)]) == 0
    assert page.read_text("utf-8") == f"# Cards\n\n{MARK}\n\n{table(rows)}"
    assert (ROOT / "docs/cards.md").read_text("utf-8").count(MARK) == 1
