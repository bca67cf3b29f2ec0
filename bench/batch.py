"""What do the batch sanitizer and the splits cost, and what do they produce?

    python -m bench.batch [--rounds 20] [--snapshot FILE]

Batches of 32, 512 and 8,192 tokens over 1, 8 and 64 sequences of ragged lengths, on one core. A sanitizer run checks
a batch that continues a memory, given as arrays or as Python lists; a split run cuts the clean batch to its end. What
comes out (ubatches, outputs, sets) is counted too; `--snapshot` writes the counts, which a test compares.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.note import Series, as_json, versions
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.batch.clean import CleanBatch
from ostinato.decoder.batch.sanitizer import sanitize
from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.batch.ubatch import Ubatch

TOKENS = (32, 512, 8_192)
SEQUENCES = (1, 8, 64)
N_VOCAB, LAST, KEEP_TAIL = 32_000, 99, 4
LIMIT_MS = 2.0  # what the sanitizer may take for the largest batch given as arrays


class Remembered:
    """A memory in which every sequence stands at the same position."""

    def pos_min(self, s: int) -> int | None:
        return 0

    def pos_max(self, s: int) -> int | None:
        return LAST


@dataclass(frozen=True, slots=True)
class Case:
    """One batch: ragged prompts one after the other, every eighth token and the last one an output."""

    n_tokens: int
    n_seqs: int

    @property
    def name(self) -> str:
        return f"{self.n_tokens} tokens, {self.n_seqs} sequences"

    @property
    def n_ubatch(self) -> int:
        return max(8, self.n_tokens // 16)

    def arrays(self) -> Batch:
        weight = 1 + np.arange(self.n_seqs) % 3
        ends = np.cumsum(weight) * self.n_tokens // weight.sum()
        ids = np.searchsorted(ends, np.arange(self.n_tokens), side="right")
        begins = np.concatenate([[0], ends[:-1]])
        output = np.arange(self.n_tokens) % 8 == 0
        output[-1] = True
        return Batch(
            token=np.arange(self.n_tokens) * 7_919 % N_VOCAB,
            pos=LAST + 1 + np.arange(self.n_tokens) - begins[ids],
            seq_id=ids,
            n_seq_id=np.ones(self.n_tokens, np.int64),
            output=output,
        )

    def lists(self) -> Batch:
        given = self.arrays()
        token, pos, ids, output = (np.asarray(f).tolist() for f in (given.token, given.pos, given.seq_id, given.output))
        return Batch(token=token, pos=pos, seq_id=[[s] for s in ids], output=output)


CASES = tuple(Case(n_tokens, n_seqs) for n_tokens in TOKENS for n_seqs in SEQUENCES)


def clean(batch: Batch) -> CleanBatch:
    return sanitize(batch, n_vocab=N_VOCAB, n_seq_limit=max(SEQUENCES), memory=Remembered())


# Each kind of split as (splitter, n_ubatch) -> next ubatch.
SPLITS: dict[str, Callable[[Splitter, int], Ubatch | None]] = {
    "simple": lambda splitter, n: splitter.simple(n),
    "equal": lambda splitter, n: splitter.equal(n, sequential=True),
    "equal, keep tail": lambda splitter, n: splitter.equal(n, sequential=True, n_keep_tail=KEEP_TAIL),
    "seq": lambda splitter, n: splitter.seq(n),
}


def split(batch: CleanBatch, kind: str, n_ubatch: int) -> list[Ubatch]:
    splitter, made = Splitter(batch), []
    while (ubatch := SPLITS[kind](splitter, n_ubatch)) is not None:
        made.append(ubatch)
    return made


def counts(case: Case) -> dict[str, dict[str, int]]:
    """What comes out of a case: the same numbers on every machine."""
    batch = clean(case.arrays())
    found = {"sanitizer": {"outputs": batch.n_outputs, "sequences": len(batch.unique), "sets": len(batch.sets)}}
    for kind in SPLITS:
        made = split(batch, kind, case.n_ubatch)
        found[kind] = {
            "ubatches": len(made),
            "outputs": sum(ubatch.n_outputs for ubatch in made),
            "sets": sum(ubatch.n_seqs for ubatch in made),
        }
    return found


def tasks(case: Case) -> dict[str, Callable[[], object]]:
    arrays, lists = case.arrays(), case.lists()
    batch = clean(arrays)
    return {
        "sanitize arrays": partial(clean, arrays),
        "sanitize lists": partial(clean, lists),
        **{f"split {kind}": partial(split, batch, kind, case.n_ubatch) for kind in SPLITS},
    }


def measure(case: Case, rounds: int) -> list[Series]:
    """Milliseconds of every task, round by round, after one run that is not counted."""
    work = tasks(case)
    runs: dict[str, list[float]] = {task: [] for task in work}
    for n in range(rounds + 1):
        for task, run in work.items():
            started = time.perf_counter()
            run()
            if n > 0:
                runs[task].append(round((time.perf_counter() - started) * 1e3, 4))
    return [Series("ostinato", f"{task}: {case.name}", "ms", tuple(taken)) for task, taken in runs.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--snapshot", type=Path, metavar="FILE", help="write the counts to FILE and measure nothing")
    asked = parser.parse_args()
    if asked.snapshot:
        asked.snapshot.write_text(json.dumps({case.name: counts(case) for case in CASES}, indent=2) + "\n")
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    series: list[Series] = []
    print(f"{'median ms':26}" + "".join(f"{task.removeprefix('split '):>18}" for task in tasks(CASES[0])))
    for case in CASES:
        taken = measure(case, asked.rounds)
        print(f"{case.name:26}" + "".join(f"{s.median:18.3f}" for s in taken))
        series += taken
    question = f"does the sanitizer take less than {LIMIT_MS} ms for {max(TOKENS)} tokens, and what do the splits cost?"
    command = f"python -m bench.batch --rounds {asked.rounds}"
    print(as_json(question, command, versions("numpy"), cores=1, series=series))


if __name__ == "__main__":
    main()
