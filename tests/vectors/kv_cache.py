"""Vectors of the KV cache (KV, SW, SQ, UP), through its coordinator."""

from typing import Any

from ostinato.cache.sequences import MAX_SEQ
from ostinato.cache.window import Window
from ostinato.decoder.cells.memory.coordinator import Coordinator
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.slots import Slot
from ostinato.errors import InvalidBatch
from tests.vectors.kv_cells import fill, told
from tests.vectors.memory_steps import SEQUENCE_OPS, apply_all, seq_pos, sequence_op, splitter_of, update


def cache_of(given: dict[str, Any]) -> KVCache:
    """The cache that a vector begins with."""
    cache = KVCache(
        given["size"],
        n_seq_max=given["n_seq_max"],
        unified=given["unified"],
        window=Window(given.get("swa_type", "none"), given.get("n_swa", 0)),
        can_shift=given.get("can_shift", True),
    )
    for stream, cells in zip(cache.streams, given.get("cells", []), strict=False):
        fill(stream.cells, cells)
    for stream, head in zip(cache.streams, given.get("heads", []), strict=False):
        stream.head = head
    return cache


def slot_of(slot: Slot) -> list[Any]:
    return [[part.stream, part.cells.tolist()] for part in slot.streams]


class Steps:
    """A cache and the steps that the file knows."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.cache = cache_of(given)
        self.memory = Coordinator(self.cache)
        self.n_ubatch = given["n_ubatch"]
        self.limit = MAX_SEQ if given["unified"] else given["n_seq_max"]

    def step(self, name: str, *arguments: Any) -> Any:
        if name in SEQUENCE_OPS:
            return sequence_op(self.memory, name, *arguments)
        match name:
            case "decode":
                return self.decode(*arguments, apply=True)
            case "prepare":
                return self.decode(*arguments, apply=False)
            case "find_slot":
                return self.find_slot(*arguments)
            case "n_kv":
                return self.cache.n_kv()
            case "update":
                return update(self.memory)
        raise ValueError(f"{name!r} is no step of a KV cache")

    def decode(self, batch: dict[str, Any], *, apply: bool) -> Any:
        """Sanitize, split, prepare, and apply where asked: the slots, or why there are none."""
        try:
            splitter = splitter_of(self.memory, batch, limit=self.limit)
            cursor = self.memory.prepare_batch(splitter, self.n_ubatch, False)
        except InvalidBatch:
            return "invalid"
        if cursor.status.is_failure:
            return cursor.status.value
        slots = self.cache.prepare(cursor.ubatches)
        assert slots is not None
        if apply:
            apply_all(cursor)
        return [slot_of(slot) for slot in slots]

    def find_slot(self, batch: dict[str, Any], contiguous: bool) -> Any:
        """The batch as one ubatch."""
        splitter = splitter_of(self.memory, batch, limit=self.limit)
        n_tokens = splitter.batch.n_tokens
        unified = self.cache.unified
        ubatch = splitter.simple(n_tokens) if unified else splitter.equal(n_tokens, sequential=True)
        assert ubatch is not None
        slot = self.cache.find_slot(ubatch, contiguous=contiguous)
        return None if slot is None else slot_of(slot)


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    steps = Steps(given)
    results = [steps.step(*step) for step in op]
    cache = steps.cache
    return {
        "results": results,
        "streams": [{"head": stream.head, "cells": told(stream.cells)} for stream in cache.streams],
        "seq_pos": seq_pos(steps.memory, steps.limit),
        "pending_copies": cache.pending_copies,
        "has_shift": cache.has_shift,
    }
