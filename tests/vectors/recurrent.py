"""Vectors of recurrent memory (RM), through its coordinator."""

from typing import Any

from ostinato.decoder.cells.memory.coordinator import Coordinator
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.errors import InvalidBatch
from tests.vectors.memory_steps import SEQUENCE_OPS, apply_all, seq_pos, sequence_op, splitter_of, update


class Steps:
    """A recurrent memory and the steps that the file knows."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.states = RecurrentMemory(given["n_seq_max"], n_snapshots=given.get("n_rs_seq", 0))
        self.memory = Coordinator(recurrent=self.states)
        self.n_ubatch = given["n_ubatch"]
        self.limit = given.get("limit", given["n_seq_max"])
        self.output_all = given.get("output_all", False)
        if self.states.size != given["size"]:
            raise ValueError(f"{given['size']} cells for {given['n_seq_max']} sequences; one each is the rule (RM-1)")

    def step(self, name: str, *arguments: Any) -> Any:
        if name in SEQUENCE_OPS:
            return sequence_op(self.memory, name, *arguments)
        match name:
            case "decode":
                return self.decode(*arguments, apply=True)
            case "prepare":
                return self.decode(*arguments, apply=False)
            case "update":
                return update(self.memory)
        raise ValueError(f"{name!r} is no step of a recurrent memory")

    def decode(self, batch: dict[str, Any], *, apply: bool) -> str:
        """Sanitize, split, prepare, and apply where asked; the status word."""
        try:
            splitter = splitter_of(self.memory, batch, limit=self.limit, output_all=self.output_all)
            cursor = self.memory.prepare_batch(splitter, self.n_ubatch, self.output_all)
        except InvalidBatch:
            return "invalid"
        if apply:
            apply_all(cursor)
        return cursor.status.value


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    steps = Steps(given)
    results = [steps.step(*step) for step in op]
    state = steps.states.state
    cells = zip(state.position, state.ids, strict=True)
    return {
        "results": results,
        "cells": [None if not ids else [position, sorted(ids)] for position, ids in cells],
        "tails": {s: cell for s, cell in enumerate(state.tail) if cell is not None},
        "head": state.head,
        "used": state.used,
        "seq_pos": seq_pos(steps.memory, steps.states.size),
        "rs_idx": state.back,
    }
