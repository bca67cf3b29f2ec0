"""Every kernel of the default plans, compiled for cards that are not in this machine: it fits what their blocks have.

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

from bench.card_models import models, tiny_models
from bench.cards import MARK, Row, main, table
from bench.launches import bound_kernels
from ostinato.backends.cuda.backend import why_not_blocks
from ostinato.backends.machine import TUNED
from ostinato.models.registry import FAMILIES
from tests.counts import soaking
from tests.families import samples

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


ALIKE = """
import re
from bench.cards import DEFAULT, generation_of, product_of, work_for
from bench.compiling import _made, compile_fast

compile_fast()
seen = set()
for archs in (["sm_89", "sm_80", "sm_86", "sm_87"], ["sm_120", "sm_121"]):
    for kernel, _ in work_for(archs[:1], DEFAULT):
        if (archs[0], kernel.name, kernel.variant) not in seen:
            seen.add((archs[0], kernel.name, kernel.variant))
            made = [_made(kernel.function, kernel.specialised, arch) for arch in archs]
            texts = {re.sub(r"^\\.target .*", "", one.asm["ptx"], flags=re.MULTILINE) for one in made}
            print(kernel.name, kernel.variant, *archs, len(texts), len({one.metadata.shared for one in made}))
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


def test_there_is_a_model_of_every_family_that_the_gpu_runs_as_wide_as_published_ones() -> None:
    runs = {family for family, own in samples().items() if any(why_not_blocks(one.shape) is None for one in own)}
    assert {family.name for family in FAMILIES} - runs == {
        *("bert", "modern-bert", "nomic-bert", "xlm-roberta", "gemma-embedding"),  # encoders
    }
    for found, least in ((models(), 768), (tiny_models(), 64)):
        assert runs - {shape.family for shape in found.values() if shape.hidden >= least} == set()


def test_kernels_of_every_model_can_be_bound_with_packed_weights() -> None:
    for name, shape in models().items():
        bound = {kernel.name for kernel in bound_kernels(shape, "q4_k_m", "bf16", TUNED)}
        assert bound >= {"embed", "matmul", "gemm", "sample choose"}, name


@pytest.mark.soak
def test_chips_of_a_generation_get_the_same_ptx_but_for_their_name() -> None:
    """So that the sweep lets Triton make it once for all of them."""
    if not soaking():
        pytest.skip("compiled with OSTINATO_SOAK=1 only")
    done = child("-c", ALIKE)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) >= 40  # twenty kernels and types in each generation
    assert [line for line in lines if not line.endswith(" 1 1")] == []


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
