"""The contract of a backend: what the engine asks of the code that computes.

A chunk carries rows of one or several sequences into their pages. It is run as work beside the decode loop
(`Start.beside`): on a GPU `run` only enqueues, and what it returns is filled when that work is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ostinato.errors import InternalError

Floats = NDArray[np.float32]
OutputKind = Literal["hidden", "logits", "logprobs"]
LOGITS_BYTES: Final = 64 << 20  # of logits that are there at once: those given, or those behind log-probabilities


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Consecutive positions of one sequence: those of `tokens`, from `start` on, into the pages of its page table.

    `slot`: the slot whose first token is sampled from the last row (`Chunks.first`), or whose recurrent state advances;
    None for a sequence that holds no slot. `outputs`: which rows are asked for, by their index in `tokens`.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    slot: int | None = None
    outputs: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ChunkWant:
    """What is computed of the output rows of a chunk.

    `hidden`: the rows after the final norm. `logits`: float32 logits. `logprobs`: the log-probability of each row's
    target, and the `top` most likely tokens among the first `n_tokens` ids.
    """

    kind: OutputKind
    targets: Sequence[int] = ()
    top: int = 0
    n_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """The output rows of a chunk, in the order of its parts; what was not asked for is None. The arrays are the
    caller's own, and hold their values when the chunk's work is done."""

    hidden: Floats | None = None  # [rows, hidden]
    logits: Floats | None = None  # [rows, vocab]
    logprobs: Floats | None = None  # [rows]
    top_ids: NDArray[np.int32] | None = None  # [rows, top]
    top_logprobs: Floats | None = None  # [rows, top]


class Chunks(Protocol):
    """Runs chunks of prompts and of texts that are scored or embedded. A row's bits are those it has alone."""

    rows: int  # of any chunk, at most
    max_outputs: int  # rows of logits of one chunk, at most; hidden rows and log-probabilities are given of every row
    failures: Mapping[int, str]  # chunks, by their rows, that could not be captured, and why

    @property
    def n_copies(self) -> int:
        """Copies between host and device, so far."""

    def rows_for(self, n_prompt: int) -> int:
        """Rows of every chunk of a prompt of this length; prompts with the same number share what was computed."""

    def run(self, parts: Sequence[ChunkPart], rows: int, want: ChunkWant | None = None) -> ChunkOutput:
        """Compute the parts into their pages, as a chunk of so many rows."""

    def first(self, slot: int) -> None:
        """Sample the first token from the last row that ran for this slot, by its staged admission."""


def rows_of_logits(vocab: int, rows: int) -> int:
    """How many rows of logits are there at once, of a chunk of so many rows.

    >>> rows_of_logits(49_152, 256), rows_of_logits(262_144, 256)
    (256, 64)
    """
    return max(1, min(rows, LOGITS_BYTES // (4 * vocab)))


def output_rows(parts: Sequence[ChunkPart], want: ChunkWant | None, max_outputs: int, vocab: int) -> list[int]:
    """The rows that are asked for, by their index in the chunk; InternalError where they cannot be given so.

    >>> parts = [ChunkPart([7, 8, 9], 0, [0], outputs=[2]), ChunkPart([5, 6], 0, [1], outputs=[0, 1])]
    >>> output_rows(parts, ChunkWant("hidden"), 1, 100)
    [2, 3, 4]
    """
    found: list[int] = []
    n_before = 0
    for part in parts:
        if any(not 0 <= row < len(part.tokens) for row in part.outputs):
            raise InternalError(f"rows {list(part.outputs)} are asked for of a part that has {len(part.tokens)}")
        found += [n_before + row for row in part.outputs]
        n_before += len(part.tokens)
    if want is None:
        if found:
            raise InternalError(f"{len(found)} rows are asked for, and nothing is wanted of them")
    elif want.kind == "logits" and len(found) > max_outputs:
        raise InternalError(f"logits of {len(found)} rows are asked for; at most {max_outputs} are given at once")
    elif want.kind == "logprobs":
        if len(want.targets) != len(found) or any(not 0 <= target < vocab for target in want.targets):
            raise InternalError(f"{len(found)} rows are asked for, and their targets are {list(want.targets)}")
        if not 0 <= want.top <= (want.n_tokens or vocab) <= vocab:
            raise InternalError(f"the {want.top} most likely of {want.n_tokens} tokens of {vocab} are asked for")
    return found
