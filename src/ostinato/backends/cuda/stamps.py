"""Marks between the nodes of a step, by the device's own clock: times of nodes that the host cannot time (E-63).

A mark is a kernel of one thread that adds the time since the last mark to a place of its own. It takes time itself,
which is measured by two marks with nothing between them, and taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ostinato.backends.cuda.start import loaded
from ostinato.loop.plan import Node

BETWEEN, NOTHING, FIRST = 0, 1, 2  # places: before a step's first node, of a mark alone, and of the nodes


class Stamps:
    """Marks for the nodes of one step. Only for measuring: a step with marks is slower by them."""

    def __init__(self, nodes: Sequence[Node], device: torch.device) -> None:
        self._device = device
        self._kernel = loaded("stamp.cu", device).get_kernel("stamp")
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        self._spent = torch.zeros(FIRST + len(nodes), dtype=torch.int64, device=device)
        self._places = {node.name: FIRST + number for number, node in enumerate(nodes)}

    def timed(self, node: Node) -> Node:
        """The node with a mark behind it; the first one of a step with two before it as well."""
        place = self._places[node.name]
        before = (BETWEEN, NOTHING) if place == FIRST else ()

        def run() -> None:
            for mark in before:
                self._mark(mark)
            node.run()
            self._mark(place)

        n_launches = None if node.n_launches is None else node.n_launches + len(before) + 1
        return replace(node, run=run, n_launches=n_launches)

    def forget(self) -> None:
        self._last.zero_()
        self._spent.zero_()
        torch.cuda.synchronize(self._device)

    def microseconds(self) -> dict[str, float]:
        """By the node's name, all steps together, without what the marks take."""
        spent = self._read()
        return {name: max(0.0, (spent[place] - spent[NOTHING]) / 1e3) for name, place in self._places.items()}

    def between(self, n_steps: int) -> float:
        """Microseconds a step from the last node of a step to the first of the next: the step boundary, and the host
        if it launches every step."""
        spent = self._read()
        return max(0.0, (spent[BETWEEN] / max(1, n_steps - 1) - spent[NOTHING] / n_steps) / 1e3)

    def _read(self) -> list[int]:
        torch.cuda.synchronize(self._device)
        return [int(value) for value in self._spent.tolist()]

    def _mark(self, place: int) -> None:
        from cuda.core import LaunchConfig, Stream, launch

        stream = Stream.from_handle(torch.cuda.current_stream(self._device).cuda_stream)
        addresses = self._last.data_ptr(), self._spent[place:].data_ptr()
        launch(stream, LaunchConfig(grid=1, block=1), self._kernel, *addresses)
