"""The contract of a backend: what the engine asks of the code that computes.

A chunk carries rows of one or several sequences into their pages. It is run as work beside the decode loop
(`Start.beside`): on a GPU `run` only enqueues, and what it returns is filled when that work is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
OutputKind = Literal["hidden", "logits", "logprobs"]


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
    max_outputs: int  # output rows of one chunk, at most
    n_copies: int  # between host and device, so far
    failures: Mapping[int, str]  # chunks, by their rows, that could not be captured, and why

    def rows_for(self, n_prompt: int) -> int:
        """Rows of every chunk of a prompt of this length; prompts with the same number share what was computed."""

    def run(self, parts: Sequence[ChunkPart], rows: int, want: ChunkWant | None = None) -> ChunkOutput:
        """Compute the parts into their pages, as a chunk of so many rows."""

    def first(self, slot: int) -> None:
        """Sample the first token from the last row that ran for this slot, by its staged admission."""


class Prefill(Protocol):
    """Runs prompts, one sequence at a time. Called as work beside the loop; `Chunks` takes its place."""

    rows: int
    n_copies: int
    failures: Mapping[int, str]

    def rows_for(self, n_prompt: int) -> int:
        """Rows of every chunk of a prompt of this length; prompts with the same number share what was computed."""

    def run(self, slot: int, tokens: Sequence[int], start: int, pages: Sequence[int], rows: int) -> Any:
        """Compute positions [start, start + len(tokens)) of a sequence into its pages, as a chunk of so many rows."""

    def first(self, slot: int) -> None:
        """Sample the first token from the last row that ran for this slot, by its staged admission."""
