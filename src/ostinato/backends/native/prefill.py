"""Prompts by the native loop: nothing is padded, because a row's bits are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ostinato.backends.native.plan import NativeStep


class NativePrefill:
    """Prefill by the native loop, through the same packed weights as its steps; a chunk goes between two of them."""

    n_copies = 0
    failures: Mapping[int, str] = MappingProxyType({})

    def __init__(self, native: NativeStep) -> None:
        self._native = native
        self.rows = native.chunk_rows

    def rows_for(self, n_prompt: int) -> int:
        return self.rows

    def run(self, slot: int, tokens: Sequence[int], start: int, pages: Sequence[int], rows: int) -> None:
        self._native.chunk(slot, tokens, start, pages)

    def first(self, slot: int) -> None:
        self._native.first(slot)
