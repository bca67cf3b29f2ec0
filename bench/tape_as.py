"""The persistent kernel as if on other chips: does it give the same bits as the card's own variant, and how fast is it?

    python -m bench.tape_as [--as sm_80 --as sm_89 --as sm_90] [--only bits|speed]

Each chip has children of its own with OSTINATO_CHIP set: the kernel is made for that chip, with its loader and its
ring, and assembled for the card that is there. As sm_90 it is what chips newer than Hopper get. The same tokens are fed
to all of them step by step, over keys and values that begin as zeros, so that the digest of the logits depends on this
kernel alone. A variant that lifts its weights is compared with the card's own kernel made to lift them: a tensor core
aligns products by the exponents of their operands, so sums of lifted weights may end in other bits. Then decode is
measured, one child at a time. It exits with 1 where bits differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Final

import torch

from bench.gpu_models import TAPE, kv_type_of, model_on, settled_for
from bench.gpu_speed import Meter
from ostinato.backends.machine import PRETENDED
from ostinato.backends.tape import sizes as tape_sizes
from ostinato.engine.driver import LoopDriver
from ostinato.engine.engine import Engine
from ostinato.engine.open import open_runner
from ostinato.lab.bench import read_bandwidth

OWN: Final = "own"
LIFTED: Final = "own, lifted"
NEWER: Final = "sm_90"  # its PTX is what chips newer than Hopper get
CHIPS: Final = ("sm_80", "sm_89", NEWER)
# Shape, type, slots: together every type of weights.
BITS: Final = (
    *(("tiny", type, 8) for type in ("bf16", "f16", "q4_k_m", "q5_k", "q6_k", "q8_0")),
    ("smollm2-135m", "bf16", 3),
    ("llama-1b", "q4_k_m", 1),
)
# As many slots of 8B as 99 KB of shared memory have room for.
SPEED: Final = (("llama-1b", "bf16", 8), ("llama-1b", "q4_k_m", 8), ("llama-8b", "q4_k_m", 4))
N_STEPS, DEPTH, CONTEXT, AT_ONCE = 48, 500, 2048, 12


def digest(driver: LoopDriver, n_rows: int, vocab: int) -> str:
    """Of the logits of so many rows over N_STEPS steps, whose tokens are given."""
    runner = driver.runner
    for slot in range(n_rows):
        driver.admit(slot, [slot + 1], most=N_STEPS + 2)
    driver.step()  # admits
    driver.synchronize()
    assert runner.memory.kv is not None
    for half in (*runner.memory.kv.keys.values(), *runner.memory.kv.values.values()):
        half.values.zero_()
    total = hashlib.sha256()
    for step in range(N_STEPS):
        tokens = torch.tensor([(7 * step + 13 * row + 3) % vocab for row in range(n_rows)])
        runner.tables.table["token"][:n_rows].copy_(tokens)
        driver.synchronize()
        driver.step()
        driver.synchronize()
        total.update(runner.plan.buffer("logits").tensor[:n_rows].cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def bits(name: str, type: str, n_slots: int) -> dict[str, Any]:
    model = model_on(name, type, "cuda")
    settled = settled_for(model, TAPE, n_slots=n_slots, context=512, kv_type=kv_type_of(type))
    with closing(LoopDriver(open_runner(model, settled))) as driver:
        sizes = driver.runner.start._step.sizes  # type: ignore[attr-defined]  # of a TapeLoop
        found = digest(driver, n_slots, model.shape.vocab)
    variant = sizes.variant
    return {
        "digest": found,
        "stages": sizes.n_stages,
        "bulk_copies": variant.bulk_copies,
        "lifted": variant.lift_weights,
    }


def speed(name: str, type: str, n_slots: int) -> dict[str, Any]:
    bandwidth, model = read_bandwidth("cuda"), model_on(name, type, "cuda")
    settled = settled_for(model, TAPE, n_slots=n_slots, context=CONTEXT, kv_type=kv_type_of(type))
    with Engine(model, settled) as engine:
        meter = Meter(model, type, bandwidth, DEPTH)
        figures = {batch: meter.decode(engine, batch, 256) for batch in (1, n_slots)}
    return {f"tok_s of {batch}": round(figure["tok_s"]) for batch, figure in figures.items()}


WORKS: Final = {"bits": bits, "speed": speed}


def child(chip: str, work: str, case: Sequence[Any]) -> dict[str, Any]:
    """What a process says that takes the card for that chip."""
    environment = dict(os.environ) if chip in (OWN, LIFTED) else {**os.environ, PRETENDED: chip}
    asked = [sys.executable, "-m", "bench.tape_as", "--child", json.dumps([work, *case])]
    asked += ["--lifted"] if chip in (LIFTED, NEWER) else []  # newer chips lift, and 9.0 does not
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def compare(chips: Sequence[str]) -> bool:
    """Whether all chips have the digest of the card's own kernel that lifts as theirs does, for every case."""
    cases = [(chip, case) for case in BITS for chip in (OWN, LIFTED, *chips)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda one: child(one[0], "bits", one[1]), cases))
    told = dict(zip(cases, found, strict=True))
    all_same = True
    for (chip, case), said in told.items():
        reference = told[LIFTED if said.get("lifted") else OWN, case]
        same = "digest" in said and said["digest"] == reference.get("digest")
        all_same &= same
        print("same " if same else "OTHER", *case, chip, json.dumps(said), flush=True)
    return all_same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--as", dest="chips", metavar="CHIP", action="append", help="all of sm_80, sm_89 and sm_90 if none"
    )
    parser.add_argument("--only", choices=WORKS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--lifted", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.lifted:
        tape_sizes.SUBNORMALS_TESTED = frozenset()  # type: ignore[misc]  # of this process alone
    if asked.child is not None:
        work, *case = json.loads(asked.child)
        print(json.dumps(WORKS[work](*case)))
        return
    chips = asked.chips or list(CHIPS)
    same = asked.only == "speed" or compare(chips)
    for case in () if asked.only == "bits" else SPEED:
        for chip in (OWN, *chips):
            print("speed", *case, chip, json.dumps(child(chip, "speed", case)), flush=True)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
