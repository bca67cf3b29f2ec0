"""One decode or encode: any batch of tokens of any sequences in, rows of logits, embeddings or samples out (D-1..26,
EN-1..5).

The order is the specification's: check the batch, apply pending memory updates, find room, reserve outputs, run the
ubatches one after the other, publish. A refused batch has changed nothing (G-3); a batch that fails half-way leaves
the ubatches before the failure in memory and no others (G-4). docs/decoder.md describes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ostinato.backends.torch.model import Model
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.batch.sanitizer import CleanBatch, sanitize
from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.compute_executor import ComputeExecutor, Extractor, Threads
from ostinato.decoder.cells.eager import EagerGraph, EagerStages, check_inputs
from ostinato.decoder.cells.graphs import GraphKey, GraphScheduler, Setup, classed
from ostinato.decoder.cells.memories import MemoryParts
from ostinato.decoder.cells.memory.coordinator import Coordinator, flush, prepare_with_retry
from ostinato.decoder.cells.memory.cursor import PreparedBatch
from ostinato.decoder.cells.memory.status import Status
from ostinato.decoder.cells.output import Outputs
from ostinato.decoder.cells.sample_router import SampleRouter
from ostinato.decoder.cells.settings import Settings
from ostinato.decoder.cells.ubatch_executor import UbatchExecutor
from ostinato.decoder.pooling import Pooled
from ostinato.errors import Aborted, InternalError, InvalidBatch
from ostinato.processes import OpenedHere


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of a decode: the number of output rows, and the row of each batch index (None: not an output)."""

    n_outputs: int
    ids: tuple[int | None, ...]


def never() -> bool:
    """The default abort signal, which never aborts."""
    return False


class DecodeFlow:
    """Decodes batches through one model and one memory. One call at a time (D-20).

    Rows that were published can be read through `outputs` and `pooled` until the next decode that is accepted.
    """

    def __init__(
        self,
        model: Model,
        settings: Settings,
        parts: MemoryParts,
        pooled: Pooled | None = None,
    ) -> None:
        """`pooled`: where hidden rows are asked for, what becomes of them."""
        self.model, self.settings, self.parts, self.pooled = model, settings, parts, pooled
        self.embeddings = pooled is not None
        self.outputs = Outputs(
            n_vocab=0 if model.head is None else model.shape.vocab,
            n_embd_out=model.shape.hidden,
            n_batch=settings.n_batch,
            n_seq_max=settings.n_seq_max,
        )
        self.outputs.reserve(settings.n_seq_max, embeddings=self.embeddings, sampling=False)
        graph_type = "decoder" if settings.causal else "encoder"

        def build(key: GraphKey) -> EagerGraph:
            return EagerGraph.of(key, model.device)

        # Input buffers are small: to reserve them, it is enough that they could be allocated.
        self.graphs: GraphScheduler[EagerGraph] = GraphScheduler(graph_type, build, build)
        self.router = SampleRouter(n_seq_limit=settings.n_seq_limit, on_change=self.graphs.request_reservation)
        self._extractor = Extractor(self.outputs, self.router, self.pooled)
        n_threads = torch.get_num_threads()
        self._computing = ComputeExecutor(Threads(batch=n_threads, single=n_threads))
        self.ubatches = UbatchExecutor()
        self._running = False
        self._opened = OpenedHere()
        self.graphs.ensure_reserved(self._worst())

    @property
    def memory(self) -> Coordinator:
        return self.parts.memory

    def decode(self, batch: Batch, *, abort: Callable[[], bool] = never) -> Decoded:
        """Decode a batch; raises one of the decode errors, each with `.code`, `.reason` and `.index`."""
        self._opened.check()
        if self._running:
            raise InternalError("a decode was started inside another one of the same decoder (D-20)")
        self._running = True
        try:
            with torch.inference_mode():
                return self._decode(batch, abort)
        finally:
            self._running = False

    def update(self, abort: Callable[[], bool] = never) -> None:
        """Carry out pending shifts and copies (D-11); this invalidates graphs built before (UP-8)."""
        self._opened.check()
        if self.memory.prepare_update(optimise=False) is Status.SUCCESS and abort():
            raise Aborted("the caller's signal stopped the pending update of memory (UP-5)", reason="abort")
        with torch.inference_mode():
            if classed("could not bring memory up to date", lambda: flush(self.memory)):
                self.graphs.request_reservation()
        self.graphs.ensure_reserved(self._worst())

    def _decode(self, batch: Batch, abort: Callable[[], bool]) -> Decoded:
        clean = self._judge(batch)
        self.graphs.ensure_reserved(self._worst())  # D-9
        self.update(abort)
        splitter = Splitter(clean)
        cursor = prepare_with_retry(
            self.memory,
            splitter,
            self.settings.n_ubatch,
            self.embeddings,
            on_compaction=self.graphs.request_reservation,
        )
        self.graphs.ensure_reserved(self._worst())
        self.outputs.reserve(clean.n_outputs, embeddings=self._keeps_rows, sampling=bool(self.router.samplers))  # D-13
        if self.pooled is not None:
            self.pooled.clear()
        try:
            self.router.begin()
            self._run_all(cursor, abort)
        except BaseException:
            self._forget()
            raise
        self.router.commit()
        self.outputs.publish(splitter.out_ids.tolist(), clean.n_outputs)
        return Decoded(self.outputs.n_outputs, self.outputs.ids[: clean.n_tokens])

    def _judge(self, batch: Batch) -> CleanBatch:
        """Check the batch, in the order of D-1 to D-7, before anything changes (D-10)."""
        s = self.settings
        if batch.token is None and batch.embd is None:
            raise InvalidBatch("the batch has neither token nor embd (D-1)", reason="empty")
        self.router.check_limit(batch, limit=s.n_outputs_max_per_seq, output_all=self.embeddings)
        clean = sanitize(
            batch,
            n_vocab=self.model.shape.vocab,
            n_seq_limit=s.n_seq_limit,
            output_all=self.embeddings,
            memory=self.memory,
        )
        if not s.causal and clean.n_tokens > s.n_ubatch:
            raise InvalidBatch(
                f"{clean.n_tokens} tokens that all see each other must fit one ubatch of {s.n_ubatch} (D-7, EN-2)",
                reason="n_ubatch",
            )
        if clean.n_tokens > s.n_batch:
            raise InvalidBatch(f"{clean.n_tokens} tokens; a batch holds {s.n_batch} at most (D-7)", reason="n_batch")
        if clean.n_outputs > s.n_outputs_max:
            raise InvalidBatch(
                f"{clean.n_outputs} outputs; {s.n_outputs_max} at most were asked for (D-7)", reason="n_outputs"
            )
        check_inputs(self.model, clean)
        return clean

    def _run_all(self, cursor: PreparedBatch, abort: Callable[[], bool]) -> None:
        """Run the ubatches in order; each becomes part of memory only when it has succeeded (D-15, D-26)."""
        first_row = 0
        while True:
            ubatch = cursor.ubatch
            stages = EagerStages(
                self.model,
                self.graphs,
                self._extractor,
                self._setup(),
                cursor,
                lambda: self.parts.forward(cursor, self.model),
                first_row,
                self.embeddings,
                self._makes_logits,
            )

            def compute(ubatch: Ubatch = ubatch, stages: EagerStages = stages) -> int:
                rows = self._computing.execute(ubatch, stages, abort).rows
                if rows == ubatch.n_outputs:
                    classed("could not keep the states of a run", stages.commit)
                return rows

            self.ubatches.execute(cursor, compute, expected=ubatch.n_outputs)
            first_row += ubatch.n_outputs
            if not cursor.advance():
                return

    def _forget(self) -> None:
        """After a failed ubatch: make the batch's outputs unreadable, and restore the samplers (D-16, SR-11)."""
        self.router.undo()
        self.outputs.unpublish()
        if self.pooled is not None:
            self.pooled.clear()

    # Graphs

    @property
    def _keeps_rows(self) -> bool:
        """Whether embeddings are rows beside the logits, and not pooled."""
        return self.pooled is not None and self.pooled.per_token

    @property
    def _makes_logits(self) -> bool:
        """Whether logits are computed: not for pooled vectors, where a head over every token would cost the most."""
        return self.model.head is not None and (self.pooled is None or self.pooled.per_token)

    def _setup(self) -> Setup:
        pooling = None if self.pooled is None else self.pooled.kind
        return Setup(settings=(self.settings.causal, self.embeddings, pooling), samplers=self.router.samplers)

    def _worst(self) -> GraphKey:
        return self.graphs.worst_key(self.settings, self._setup(), memory=self.memory.prepare_full())
