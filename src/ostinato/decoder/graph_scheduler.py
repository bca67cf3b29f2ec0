"""The graph scheduler of the decoder: `graph/scheduler.py` with the decoder's own graph type (GS-5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from ostinato.graph.scheduler import GraphKey, GraphScheduler

Graph = TypeVar("Graph")
GRAPH_TYPE: Final = "decoder"


class DecoderGraphScheduler(GraphScheduler[Graph]):
    """Graphs of decode runs."""

    def __init__(self, build: Callable[[GraphKey], Graph], reserve: Callable[[GraphKey], None]) -> None:
        super().__init__(GRAPH_TYPE, build, reserve)
