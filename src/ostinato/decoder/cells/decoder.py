"""The decoder for library users: any batch of tokens of any sequences in, rows of logits, embeddings or samples out;
the caller manages memory (D-1..26, EN-1..5).

    decoder = llm.decoder(n_seq_max=4, n_outputs_max=64)
    decoder.decode(Batch(token=[1, 2, 3], seq_id=[[0], [0], [1]], output=[0, 1, 1]))
    decoder.logits(1), decoder.memory.seq_rm(0)

A decode follows the specification's order: check the batch, apply pending memory updates, find room, reserve outputs,
run the ubatches one after the other, publish. A refused batch has changed nothing (G-3); a batch that fails half-way
leaves the ubatches before the failure in memory and no others (G-4). docs/decoder.md describes it. Failures are one
exception per class, each with `.code`, `.reason` and `.index`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from ostinato.backends.torch.model import Model
from ostinato.cache import state_file
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.batch.sanitizer import CleanBatch, sanitize
from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.cells.compute_executor import ComputeExecutor, Extractor
from ostinato.decoder.cells.eager import EagerBuffers, EagerGraph, EagerStages, check_inputs
from ostinato.decoder.cells.graphs import GraphKey, GraphScheduler, Setup, classed
from ostinato.decoder.cells.memories import MemoryParts, memory_for
from ostinato.decoder.cells.memory.coordinator import Coordinator, flush, prepare_with_retry
from ostinato.decoder.cells.memory.cursor import PreparedBatch
from ostinato.decoder.cells.memory.saved import SavedKV, SavedStates
from ostinato.decoder.cells.memory.status import Status
from ostinato.decoder.cells.output import Outputs
from ostinato.decoder.cells.sample_router import BackendSampler, SampleRouter
from ostinato.decoder.cells.settings import Settings, settle
from ostinato.decoder.cells.ubatch_executor import UbatchExecutor
from ostinato.decoder.pooling import Pooled, Pooling
from ostinato.decoder.pooling import pooling as pooling_named
from ostinato.errors import Aborted, BadOption, InternalError, InvalidBatch, Unsupported
from ostinato.files.unpack import Floats
from ostinato.options import KVType
from ostinato.processes import OpenedHere


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of a decode: the number of output rows, and the row of each batch index (None: not an output)."""

    n_outputs: int
    ids: tuple[int | None, ...]


def never() -> bool:
    """The default abort signal, which never aborts."""
    return False


class Decoder:
    """Decodes batches, or encodes them where the model is an encoder and has no memory (D-2).

    `LLM.decoder` makes one. `outputs` is everything that the last decode published, with reasons for what is absent; a
    returned tensor is a view of its buffers, valid until the next accepted decode. One call at a time (D-20).

    Args:
        model: the loaded weights.
        n_ctx: positions of memory; with `unified`, shared by all sequences, and then it may exceed the context that the
            model was trained for. It is rounded up to a multiple of 256, and so is each sequence's part without
            `unified`. The factors of longrope follow it: beyond the original context, the long ones rotate every
            sequence.
        n_batch: tokens that one call may have.
        n_ubatch: tokens of one forward.
        n_seq_max: sequences; 0 is read as 1.
        unified: all sequences share one memory; else each has an equal part.
        n_outputs_max: rows that one call may ask for; 0 is as many as a batch has tokens.
        n_outputs_max_per_seq: the same for one sequence; 0 is no limit of its own.
        n_rs_seq: snapshots kept of each recurrent state, to roll back.
        kv_type: how keys and values are stored.
        embeddings: publish hidden rows too, not flagged outputs alone.
        pooling: one vector per sequence: `none`, `mean`, `cls`, `last` or `rank`.

    Raises:
        BadOption: a setting is of a wrong type, or a name is unknown.
        InvalidBatch: a size is out of range, or does not go with another.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        unified: bool = True,
        n_outputs_max: int = 0,
        n_outputs_max_per_seq: int = 0,
        n_rs_seq: int = 0,
        kv_type: KVType = "f32",
        embeddings: bool = False,
        pooling: str = "none",
    ) -> None:
        if kv_type not in get_args(KVType):
            raise BadOption(f"kv_type is {kv_type!r}; known: {', '.join(get_args(KVType))}")
        pooling_named(pooling)
        for name, value in (("unified", unified), ("embeddings", embeddings)):
            if not isinstance(value, bool):
                raise BadOption(f"{name} is {value!r}; it must be True or False")
        causal = model.shape.causal
        self.settings: Settings = settle(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_seq_max=n_seq_max,
            unified=unified,
            n_outputs_max=n_outputs_max,
            n_outputs_max_per_seq=n_outputs_max_per_seq,
            n_rs_seq=n_rs_seq,
            causal=causal,
            has_encoder=not causal,
        )
        model, shape = model.for_length(n_ctx), model.shape
        self._rope_set = shape.rope_set(n_ctx) if shape.n_rope_sets > 1 else None
        self.model, self._embeddings = model, embeddings or not causal
        self._pooled = _pooled(model, pooling) if self._embeddings else None
        self._parts = memory_for(model, self.settings, kv_type)
        self.outputs = Outputs(
            n_vocab=0 if model.head is None else model.shape.vocab,
            n_embd_out=model.shape.hidden,
            n_batch=self.settings.n_batch,
            n_seq_max=self.settings.n_seq_max,
        )
        self.outputs.reserve(self.settings.n_seq_max, embeddings=self._embeddings, sampling=False)

        buffers = EagerBuffers(model)
        self._graphs: GraphScheduler[EagerGraph] = GraphScheduler(
            "decoder" if causal else "encoder", buffers.build, buffers.reserve
        )
        self._router = SampleRouter(n_seq_limit=self.settings.n_seq_limit, on_change=self._graphs.request_reservation)
        self._extractor = Extractor(self.outputs, self._router, self._pooled)
        n_threads = torch.get_num_threads()
        self._computing = ComputeExecutor(batch=n_threads, single=n_threads)
        self._ubatches = UbatchExecutor()
        self._running = False
        self._opened = OpenedHere()
        self._graphs.ensure_reserved(self._worst())

    # Decoding

    def decode(self, batch: Batch, *, abort: Callable[[], bool] = never) -> Decoded:
        """Decode a batch, or encode it where there is no memory. `abort` is called during the run; true stops it."""
        self._opened.check()
        if not isinstance(batch, Batch):
            raise InvalidBatch(f"a Batch is needed, not {type(batch).__name__}: Batch(token=[...])", reason="type")
        if self._running:
            raise InternalError("a decode was started inside another one of the same decoder")  # D-20
        self._running = True
        try:
            with torch.inference_mode():
                return self._decode(batch, abort)
        finally:
            self._running = False

    def register(self, sequence: int, sampler: BackendSampler | None) -> bool:
        """Sample a sequence inside the run by this sampler, or no longer; False where it cannot run there (SR-1)."""
        return self._router.register(sequence, sampler)

    # Outputs

    def reorder(self) -> None:
        """Put all rows into batch order now, instead of at the first read (OUT-12)."""
        self.outputs.reorder()

    def logits(self, index: int) -> Tensor | None:
        """Float32 logits [n_vocab] of a batch index; -1 is the last output. None where there are none."""
        return self.outputs.logits(index).value

    def embedding(self, index: int) -> Tensor | None:
        """The hidden row of a batch index, with pooling none."""
        return self.outputs.embedding(index).value

    def pooled(self, sequence: int) -> Tensor | None:
        """The pooled vector of a sequence of the last batch; None with pooling none."""
        found = None if self._pooled is None else self._pooled.get(sequence)
        return None if found is None else torch.from_numpy(found)

    @property
    def counters(self) -> Mapping[str, int]:
        """How often graphs were reserved, built and reused, and ubatches rolled back."""
        graphs = self._graphs
        return {
            "reserved": graphs.n_reserved,
            "built": graphs.n_built,
            "reused": graphs.n_reused,
            "rolled_back": self._ubatches.n_roll_backs,
        }

    # Memory. Pending shifts and copies are carried out before saving and before loading (ST-10).

    @property
    def parts(self) -> MemoryParts:
        """The memory's caches and states with their tensors; read-only."""
        if not self.model.shape.causal:
            raise Unsupported(f"{self.model.shape.family} is an encoder: it has no memory")
        return self._parts

    @property
    def memory(self) -> Coordinator:
        """The memory: `seq_rm`, `seq_cp`, `seq_keep`, `seq_add`, `seq_div`, `clear`, `pos_min`, `pos_max`."""
        return self.parts.memory

    def save_all(self, note: Mapping[str, Any] | None = None) -> bytes:
        """The whole memory as bytes (ST-1)."""
        self._update()
        return state_file.save(self._saved_parts(), note=note)

    def load_all(self, data: bytes) -> None:
        """Replace the whole memory; BadFile where the bytes are damaged or of another model."""
        self._update()
        state_file.load(self._saved_parts(), None, data)

    def save_sequence(self, sequence: int, note: Mapping[str, Any] | None = None) -> bytes:
        """One sequence as bytes."""
        self._update()
        return state_file.save(self._saved_parts(), sequence, note=note)

    def load_sequence(self, sequence: int, data: bytes) -> None:
        """Replace one sequence by a saved one."""
        self._update()
        state_file.load(self._saved_parts(), sequence, data)

    def _saved_parts(self) -> state_file.StateParts:
        parts = self.parts
        caches = tuple(SavedKV(*part, self._rope_set) for part in (parts.full, parts.windowed) if part is not None)
        states = None if parts.recurrent is None else SavedStates(*parts.recurrent)
        return state_file.StateParts(self.model.shape.family, caches, states)

    # Inside

    def _update(self, abort: Callable[[], bool] = never) -> None:
        """Carry out pending shifts and copies (D-11); this invalidates graphs built before (UP-8)."""
        self._opened.check()
        if self._parts.memory.prepare_update(optimise=False) is Status.SUCCESS and abort():
            raise Aborted("the caller's signal stopped the pending update of memory", reason="abort")  # UP-5
        with torch.inference_mode():
            if classed("could not bring memory up to date", lambda: flush(self._parts.memory)):
                self._graphs.request_reservation()
        self._graphs.ensure_reserved(self._worst())

    def _decode(self, batch: Batch, abort: Callable[[], bool]) -> Decoded:
        clean = self._judge(batch)
        self._graphs.ensure_reserved(self._worst())  # D-9
        self._update(abort)
        splitter = Splitter(clean)
        cursor = prepare_with_retry(
            self._parts.memory,
            splitter,
            self.settings.n_ubatch,
            self._embeddings,
            on_compaction=self._graphs.request_reservation,
        )
        self._graphs.ensure_reserved(self._worst())
        keeps_rows = self._embeddings and not self._pools
        self.outputs.reserve(clean.n_outputs, embeddings=keeps_rows, sampling=bool(self._router.samplers))  # D-13
        if self._pooled is not None:
            self._pooled.clear()
        try:
            self._router.begin()
            self._run_all(cursor, abort)
        except BaseException:
            self._forget()
            raise
        self._router.commit()
        self.outputs.publish(splitter.out_ids.tolist(), clean.n_outputs)
        return Decoded(self.outputs.n_outputs, self.outputs.ids[: clean.n_tokens])

    def _judge(self, batch: Batch) -> CleanBatch:
        """Check the batch, in the order of D-1 to D-7, before anything changes (D-10)."""
        s = self.settings
        if batch.token is None and batch.embd is None:
            raise InvalidBatch("the batch has neither token nor embd", reason="empty")  # D-1
        self._router.check_limit(batch, limit=s.n_outputs_max_per_seq, output_all=self._embeddings)
        clean = sanitize(
            batch,
            n_vocab=self.model.shape.vocab,
            n_seq_limit=s.n_seq_limit,
            output_all=self._embeddings,
            n_pos_per_embd=self.model.shape.n_pos_dims,
            memory=self._parts.memory,
        )
        if not s.causal and clean.n_tokens > s.n_ubatch:
            raise InvalidBatch(
                f"{clean.n_tokens} tokens that all see each other must fit one ubatch of {s.n_ubatch}",  # D-7, EN-2
                reason="n_ubatch",
            )
        if clean.n_tokens > s.n_batch:
            raise InvalidBatch(f"{clean.n_tokens} tokens; a batch holds {s.n_batch} at most", reason="n_batch")  # D-7
        if clean.n_outputs > s.n_outputs_max:
            raise InvalidBatch(  # D-7
                f"{clean.n_outputs} outputs; {s.n_outputs_max} at most were asked for", reason="n_outputs"
            )
        check_inputs(self.model, clean)
        return clean

    def _run_all(self, cursor: PreparedBatch, abort: Callable[[], bool]) -> None:
        """Run the ubatches in order; each becomes part of memory only when it has succeeded (D-15, D-26)."""
        logits = self.model.head is not None and not self._pools
        setup, embeddings = self._setup(), self._embeddings
        stages = EagerStages(
            self.model, self._graphs, self._extractor, setup, cursor, self._parts, embeddings=embeddings, logits=logits
        )
        more = True
        while more:
            self._ubatches.execute(cursor, lambda: self._run(stages, abort), expected=cursor.ubatch.n_outputs)
            more = cursor.advance()

    def _run(self, stages: EagerStages, abort: Callable[[], bool]) -> int:
        ubatch = stages.cursor.ubatch
        rows = self._computing.execute(ubatch, stages, abort).rows
        if rows == ubatch.n_outputs:
            classed("could not keep the states of a run", stages.commit)
        return rows

    def _forget(self) -> None:
        """After a failed ubatch: make the batch's outputs unreadable, and restore the samplers (D-16, SR-11)."""
        self._router.undo()
        self.outputs.unpublish()
        if self._pooled is not None:
            self._pooled.clear()

    @property
    def _pools(self) -> bool:
        """Whether there is a vector per sequence and no row per token; logits of every token would cost most then."""
        return self._pooled is not None and not self._pooled.per_token

    def _setup(self) -> Setup:
        pooling = None if self._pooled is None else self._pooled.kind
        return Setup(settings=(self.settings.causal, self._embeddings, pooling), samplers=self._router.samplers)

    def _worst(self) -> GraphKey:
        return self._graphs.worst_key(self.settings, self._setup(), memory=self._parts.memory.prepare_full())


def _pooled(model: Model, name: str) -> Pooled:
    kind = pooling_named(name, ranks=model.ranking is not None)
    if kind is not Pooling.RANK:
        return Pooled(kind)

    def head(vector: Floats) -> Floats:
        scores: Floats = model.rank(torch.from_numpy(vector).to(model.device).unsqueeze(0))[0].cpu().numpy()
        return scores

    return Pooled(kind, head=head, rank_by=Pooling(model.shape.rank_by))
