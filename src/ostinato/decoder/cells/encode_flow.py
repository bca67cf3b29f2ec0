"""One encode: a batch of texts in one forward, in which every row sees its whole text (EN-1..5).

Outputs, pooling and the executor are the decoder's; there is no memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ostinato.backends.torch.model import Model
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.batch.sanitizer import sanitize
from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.compute_executor import ComputeExecutor, Extractor, Threads
from ostinato.decoder.cells.eager import EagerGraph, EagerStages, UbatchJob, check_inputs
from ostinato.decoder.cells.flow import Decoded, never
from ostinato.decoder.cells.graphs import GraphKey, GraphLimits, GraphScheduler, Setup
from ostinato.decoder.cells.memory.forward import EncoderMemory
from ostinato.decoder.cells.output import Outputs
from ostinato.decoder.cells.pooling import Pooled, Pooling
from ostinato.decoder.cells.sample_router import SampleRouter
from ostinato.decoder.cells.settings import Settings
from ostinato.errors import ComputeFailed, InternalError, InvalidBatch


class EncodeFlow:
    """Encodes batches through one model. One call at a time."""

    def __init__(self, model: Model, settings: Settings, *, pooled: Pooled | None = None) -> None:
        self.model, self.settings = model, settings
        self.pooled = pooled or Pooled(Pooling.NONE)
        self.outputs = Outputs(
            n_vocab=0,  # an encoder has no logits
            n_embd_out=model.shape.hidden,
            n_batch=settings.n_batch,
            n_seq_max=settings.n_seq_max,
        )
        self.graphs: GraphScheduler[EagerGraph] = GraphScheduler("encoder", self._build, self._reserve)
        self.router = SampleRouter(n_seq_limit=settings.n_seq_limit)
        self._extractor = Extractor(self.outputs, self.router, self.pooled)
        n_threads = torch.get_num_threads()
        self._computing = ComputeExecutor(Threads(batch=n_threads, single=n_threads))
        self._setup = Setup(settings=("encoder", self.pooled.kind))
        self._running = False
        self._ensure_reserved()

    def encode(self, batch: Batch, *, abort: Callable[[], bool] = never) -> Decoded:
        """Encode a batch; raises one of the decode errors."""
        if self._running:
            raise InternalError("an encode was started inside another one of the same encoder (D-20)")
        self._running = True
        try:
            with torch.inference_mode():
                return self._encode(batch, abort)
        finally:
            self._running = False

    def _encode(self, batch: Batch, abort: Callable[[], bool]) -> Decoded:
        s = self.settings
        clean = sanitize(batch, n_vocab=self.model.shape.vocab, n_seq_limit=s.n_seq_limit, output_all=True, memory=None)
        if clean.n_tokens > s.n_ubatch:
            raise InvalidBatch(
                f"{clean.n_tokens} tokens that all see each other must fit one ubatch of {s.n_ubatch} (EN-2)",
                reason="n_ubatch",
            )
        check_inputs(self.model, clean)
        self._ensure_reserved()
        ubatch = Splitter(clean).simple(clean.n_tokens)
        assert ubatch is not None  # the batch has tokens
        self.outputs.reserve(clean.n_tokens, embeddings=self.pooled.per_token, sampling=False)
        self.pooled.clear()
        try:
            self._run(ubatch, abort)
        except BaseException:
            self.outputs.unpublish()  # EN-4
            self.pooled.clear()
            raise
        self.outputs.publish(range(clean.n_tokens), clean.n_tokens)
        return Decoded(self.outputs.n_outputs, self.outputs.ids[: clean.n_tokens])

    def _run(self, ubatch: Ubatch, abort: Callable[[], bool]) -> None:
        def memory() -> EncoderMemory:
            return EncoderMemory.of(self.model.ops, ubatch, self.model.device)

        job = UbatchJob(ubatch, first_row=0, expected=ubatch.n_tokens, memory=memory)
        stages = EagerStages(self.model, self.graphs, self._extractor, self._setup, job, embeddings=True, logits=False)
        rows = self._computing.execute(ubatch, stages, abort).rows
        if rows != job.expected:
            raise ComputeFailed(f"the run produced {rows} rows where {job.expected} were due (UX-1)", reason="rows")

    def _ensure_reserved(self) -> None:
        s = self.settings
        limits = GraphLimits(n_ctx=s.n_ubatch, n_ubatch=s.n_ubatch, n_seq_max=s.n_seq_max, n_outputs_max=s.n_ubatch)
        self.graphs.ensure_reserved(self.graphs.worst_key(limits, self._setup, memory=()))

    def _build(self, key: GraphKey) -> EagerGraph:
        return EagerGraph.of(key, self.model.device)

    def _reserve(self, worst: GraphKey) -> None:
        EagerGraph.of(worst, self.model.device)
