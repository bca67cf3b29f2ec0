"""The graph scheduler of the encoder: `graph/scheduler.py` with the encoder's own graph type (GS-5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from ostinato.graph.scheduler import GraphKey, GraphScheduler

Graph = TypeVar("Graph")
GRAPH_TYPE: Final = "encoder"


class EncoderGraphScheduler(GraphScheduler[Graph]):
    """Graphs of encode runs."""

    def __init__(self, build: Callable[[GraphKey], Graph], reserve: Callable[[GraphKey], None]) -> None:
        super().__init__(GRAPH_TYPE, build, reserve)
