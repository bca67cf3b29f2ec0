"""Vectors of the cell table (KC): one call after the other on single cells."""

from typing import Any

from ostinato.cache.sequences import MAX_SEQ
from ostinato.decoder.cells.memory.cells import Cells, Saved
from ostinato.errors import InternalError


def fill(cells: Cells, given: dict[str, Any]) -> None:
    """Put in what a vector says is there: index -> [position, ids]."""
    for index, (position, ids) in given.items():
        cells.set_position(int(index), position)
        for s in ids:
            cells.add(int(index), s)


def told(cells: Cells) -> list[Any]:
    """Every cell as the vector file writes it: null, or [position, [ids], shift]."""
    return [
        None if cells.position[i] < 0 else [int(cells.position[i]), cells.ids(i), int(cells.shift[i])]
        for i in range(cells.size)
    ]


def seq_pos(cells: Cells) -> dict[int, list[int | None]]:
    """The extremes of every sequence that has a cell."""
    return {s: [cells.pos_min(s), cells.pos_max(s)] for s in range(MAX_SEQ) if cells.pos_max(s) is not None}


class Table:
    """A cell table and the calls that the file knows."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.cells = Cells(given["size"])
        self.saved: Saved | None = None
        fill(self.cells, given["cells"])

    def call(self, name: str, *arguments: Any) -> bool | None:
        """The result of one call; None where it has none."""
        cells = self.cells
        match name:
            case "pos_set":
                cells.set_position(*arguments)
            case "seq_add":
                cells.add(*arguments)
            case "rm":
                cells.empty(*arguments)
            case "pos_div":
                cells.divide_by(*arguments)
            case "reset_shift":
                cells.reset_shift()
            case "save":
                self.saved = cells.save(*arguments)
            case "restore":
                assert self.saved is not None
                cells.restore(self.saved)
            case "seq_rm" | "seq_keep" | "pos_add":
                change = {"seq_rm": cells.remove, "seq_keep": cells.keep, "pos_add": cells.shift_by}[name]
                return len(change(*arguments)) > 0
            case "pos_in":
                cell, p0, p1 = arguments
                return bool(cells.in_range(p0, p1)[cell])
            case _:
                raise ValueError(f"{name!r} is no call of the cell table")
        return None


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    table = Table(given)
    results: list[bool | None] = []
    for at, call in enumerate(op):
        try:
            results.append(table.call(*call))
        except InternalError:
            return {"error": "internal", "at": at}
    cells = table.cells
    return {
        "results": results,
        "cells": told(cells),
        "used": cells.used,
        "used_min": cells.used_min,
        "used_max_p1": cells.used_stop,
        "has_shift": cells.has_shift,
        "seq_pos": seq_pos(cells),
    }
