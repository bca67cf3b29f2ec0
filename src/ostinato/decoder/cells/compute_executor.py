"""One graph run in six stages: validate, prepare, allocate, bind, run, extract (CX-1..7).

`eager.py` supplies the stages, which know the model; this module defines their order, the error class of each
failure, and the order in which results reach the output rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.graphs import PreparedGraph, classed
from ostinato.decoder.cells.output import Outputs
from ostinato.decoder.cells.sample_router import SampleRouter
from ostinato.decoder.pooling import Pooled
from ostinato.errors import AllocationFailed, ComputeFailed, DecodeError, InvalidBatch

Graph = TypeVar("Graph")
Result = TypeVar("Result")
# Called during a run; true stops it.
Abort = Callable[[], bool]


class Stages(Protocol[Graph]):
    """The stages of a ubatch. Each may raise a DecodeError of its own class (Aborted in `run`)."""

    def validate(self, ubatch: Ubatch) -> None:
        """Refuse a ubatch that must not reach a graph."""

    def prepare(self, ubatch: Ubatch) -> PreparedGraph[Graph]:
        """A graph for the ubatch: a new one, or the one that ran last."""

    def allocate(self, graph: Graph) -> None:
        """Allocate memory for a new graph."""

    def bind(self, graph: Graph, ubatch: Ubatch) -> None:
        """Copy this ubatch's inputs into the graph."""

    def run(self, graph: Graph, *, n_threads: int, abort: Abort) -> None:
        """Compute; raise Aborted when `abort` returns true."""

    def extract(self, graph: Graph, ubatch: Ubatch) -> int:
        """Copy results to the output rows; returns the number of rows."""

    def drop(self) -> None:
        """Forget the stored graph: a later stage failed (GS-3)."""


@dataclass(frozen=True, slots=True)
class Computation:
    """The outcome of the stages: output rows produced, and whether the graph was reused."""

    rows: int
    reused: bool


@dataclass(frozen=True, slots=True)
class ComputeExecutor:
    """Runs the stages in order and stops at the first that fails (CX-3), with `batch` threads for a run of many tokens
    and `single` for one token (CX-4)."""

    batch: int
    single: int

    def execute(self, ubatch: Ubatch, stages: Stages[Graph], abort: Abort = lambda: False) -> Computation:
        """Run all stages; a reused graph is bound, but not allocated again (CX-1, CX-5)."""
        _stage("validate", InvalidBatch, lambda: stages.validate(ubatch))
        try:
            graph, reused = _stage("prepare", ComputeFailed, lambda: stages.prepare(ubatch))
            if not reused:
                _stage("allocate", AllocationFailed, lambda: stages.allocate(graph))
            _stage("bind", ComputeFailed, lambda: stages.bind(graph, ubatch))
            n_threads = self.batch if ubatch.n_tokens > 1 else self.single
            _stage("run", ComputeFailed, lambda: stages.run(graph, n_threads=n_threads, abort=abort))
            return Computation(_stage("extract", ComputeFailed, lambda: stages.extract(graph, ubatch)), reused)
        except BaseException:
            stages.drop()
            raise


def _stage(name: str, failed: type[DecodeError], work: Callable[[], Result]) -> Result:
    """Run one stage; an exception that is no DecodeError gets the stage's class (CX-2)."""
    return classed(f"the stage {name} of a run failed", work, failed=failed, reason=name)


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of a run: a row for every output token of the ubatch, in its order; None if not computed."""

    logits: Tensor | None = None  # [outputs, n_vocab]
    embeddings: Tensor | None = None  # [outputs, n_embd_out]

    @property
    def n_rows(self) -> int:
        """The number of rows of the results."""
        return next((len(rows) for rows in (self.logits, self.embeddings) if rows is not None), 0)


@dataclass(frozen=True, slots=True)
class Extractor:
    """Copies the results of a run to the outputs. `pooled` is None where embeddings were not asked for."""

    outputs: Outputs
    router: SampleRouter
    pooled: Pooled | None = None

    def extract(self, ubatch: Ubatch, computed: Computed, *, first_row: int, expected: int) -> int:
        """Raw logits if wanted, then embeddings, then sampled data (CX-6); the rows produced.

        `first_row` is the number of outputs of the earlier ubatches (D-15). Nothing is written for a ubatch without
        outputs (CX-7), nor when the rows are not as many as expected, which the ubatch executor reports.
        """
        rows = computed.n_rows
        if rows == 0 or rows != expected:
            return rows
        if computed.logits is not None and self.router.wants_raw(ubatch):
            self.outputs.write_logits(first_row, computed.logits)
        if computed.embeddings is not None and self.pooled is not None:
            if self.pooled.per_token:
                self.outputs.write_embeddings(first_row, computed.embeddings)
            else:
                self.pooled.add(ubatch, computed.embeddings.float().cpu().numpy())
        if computed.logits is not None:
            self.router.run(ubatch, computed.logits, self.outputs, first_row=first_row)
        return rows
