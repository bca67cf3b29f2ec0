"""The stages of a run on an eager backend: a "graph" is the input buffers of one shape of ubatch and a forward.

`EagerStages` implements the compute executor's stages with the model and its memory. States of recurrent layers
become memory only by `commit`, once the whole ubatch has succeeded (RM-19).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace

import torch
from torch import Tensor

from ostinato.backends.torch.model import Model
from ostinato.decoder.batch.clean import CleanBatch
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.compute_executor import Abort, Computed, Extractor
from ostinato.decoder.cells.graphs import GraphKey, GraphScheduler, PreparedGraph, Setup
from ostinato.decoder.cells.memories import MemoryParts
from ostinato.decoder.cells.memory.cursor import PreparedBatch
from ostinato.decoder.cells.memory.forward import ForwardMemory
from ostinato.errors import Aborted, InternalError, InvalidBatch


@dataclass(slots=True)
class EagerGraph:
    """Input buffers for ubatches of one shape, at fixed addresses; mutable, because not every input has a buffer."""

    tokens: Tensor  # int64 [n_tokens]
    positions: Tensor  # int64 [n_tokens], or [dimensions, n_tokens] for a model with several
    output_rows: Tensor  # int64 [n_outputs] which rows are outputs
    embd: Tensor | None = None
    segments: Tensor | None = None  # which of two texts each row belongs to

    @staticmethod
    def of(key: GraphKey, model: Model) -> EagerGraph:
        def numbers(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=model.device)

        n, n_dims = key.n_tokens, model.shape.n_pos_dims
        return EagerGraph(numbers(n), numbers(n) if n_dims == 1 else numbers(n_dims, n), numbers(key.n_outputs))

    def first(self, key: GraphKey) -> EagerGraph:
        """The same memory for a ubatch that is no larger."""
        n = key.n_tokens
        if n > len(self.tokens) or key.n_outputs > len(self.output_rows):
            raise InternalError(
                f"a ubatch of {n} tokens and {key.n_outputs} outputs, and the worst case that was reserved has "  # GS-1
                f"{len(self.tokens)} and {len(self.output_rows)}"
            )
        return EagerGraph(self.tokens[:n], self.positions[..., :n], self.output_rows[: key.n_outputs])


class EagerBuffers:
    """The input buffers of the largest ubatch, kept from its reservation on: graphs use their first rows (GS-1)."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._largest: EagerGraph | None = None

    def reserve(self, key: GraphKey) -> None:
        self._largest = None  # before the new ones are allocated
        self._largest = EagerGraph.of(key, self._model)

    def build(self, key: GraphKey) -> EagerGraph:
        assert self._largest is not None  # reserved
        return self._largest.first(key)


def check_inputs(model: Model, batch: CleanBatch) -> None:
    """Refuse rows that are not as wide as the model's, and segment ids that it does not have."""
    width = model.shape.hidden
    if batch.embd is not None and batch.embd.shape[-1] != width:
        raise InvalidBatch(  # S-5
            f"embd rows are {batch.embd.shape[-1]} wide; this model's are {width}", reason="shape"
        )
    known = 1 if model.type_embedding is None else len(model.type_embedding)
    if batch.segment is not None and not ((batch.segment >= 0) & (batch.segment < known)).all():
        index = int(((batch.segment < 0) | (batch.segment >= known)).argmax())
        what = f"segment {batch.segment[index]}; this model tells {known} apart"
        raise InvalidBatch.of_token(index, what, "segment")


@dataclass(slots=True)
class EagerStages:
    """The stages for the cursor's ubatch, whose output rows begin at `first_row`; mutable, because it holds
    the run's results until the commit."""

    model: Model
    graphs: GraphScheduler[EagerGraph]
    extractor: Extractor
    setup: Setup
    cursor: PreparedBatch
    parts: MemoryParts
    _: KW_ONLY
    embeddings: bool
    logits: bool
    first_row: int = 0
    _memory: ForwardMemory | None = None
    _computed: Computed = field(default_factory=Computed)

    def validate(self, ubatch: Ubatch) -> None:
        """Nothing to do: `check_inputs` has checked the batch, before memory was touched."""

    def prepare(self, ubatch: Ubatch) -> PreparedGraph[EagerGraph]:
        key = self.graphs.key(ubatch, self.setup, n_outputs=ubatch.n_outputs, memory=self.cursor.shape)
        return self.graphs.prepare(key)

    def allocate(self, graph: EagerGraph) -> None:
        """Nothing to do: the graph has its buffers, and torch allocates the rest during the forward."""

    def bind(self, graph: EagerGraph, ubatch: Ubatch) -> None:
        if ubatch.token is not None:
            graph.tokens.copy_(torch.from_numpy(ubatch.token))
        graph.embd = (
            None if ubatch.embd is None else torch.from_numpy(ubatch.embd).to(self.model.device, self.model.dtype)
        )
        graph.segments = None if ubatch.segment is None else torch.from_numpy(ubatch.segment).to(self.model.device)
        graph.positions.copy_(torch.from_numpy(ubatch.pos))
        graph.output_rows.copy_(torch.from_numpy(ubatch.output.nonzero()[0]))
        self._memory = self.parts.forward(self.cursor, self.model)

    def run(self, graph: EagerGraph, *, n_threads: int, abort: Abort) -> None:
        def check() -> None:
            if abort():
                raise Aborted("the caller's signal stopped the run; what was decoded before it stays", reason="abort")

        assert self._memory is not None  # bound
        check()
        if n_threads != torch.get_num_threads():
            torch.set_num_threads(n_threads)
        self._memory = replace(self._memory, before_layer=check)
        tokens = graph.tokens if graph.embd is None else None
        rows_in = self.model.embed(graph.tokens) if graph.embd is None else graph.embd
        hidden = self.model.through(rows_in, graph.positions, self._memory, graph.segments, tokens=tokens)
        rows, self._computed = hidden[graph.output_rows], Computed()
        if len(rows):
            logits = self.model.logits(rows) if self.logits else None
            self._computed = Computed(logits, rows if self.embeddings else None)

    def extract(self, graph: EagerGraph, ubatch: Ubatch) -> int:
        return self.extractor.extract(ubatch, self._computed, first_row=self.first_row, expected=ubatch.n_outputs)

    def drop(self) -> None:
        self.graphs.invalidate()

    def commit(self) -> None:
        """The ubatch has succeeded: write its states to memory. The rows of the next one follow its rows."""
        assert self._memory is not None
        self._memory.commit()
        self.first_row += self.cursor.ubatch.n_outputs
