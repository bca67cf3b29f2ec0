"""The contract of a backend: what the engine asks of whoever computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Prefill(Protocol):
    """Runs prompts. Called as a job beside the loop (`Start.beside`)."""

    rows: int  # of any chunk, at most
    n_copies: int  # between host and device, so far
    failures: Mapping[int, str]  # chunks, by their rows, that could not be captured, and why

    def rows_for(self, n_prompt: int) -> int:
        """Rows of every chunk of a prompt of this length; prompts with the same number share what was computed."""

    def run(self, slot: int, tokens: Sequence[int], start: int, pages: Sequence[int], rows: int) -> None:
        """Compute positions [start, start + len(tokens)) of a sequence into its pages, as a chunk of so many rows."""

    def first(self, slot: int) -> None:
        """Choose the first token from the last row that ran for this slot, by its staged admission."""
