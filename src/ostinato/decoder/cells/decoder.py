"""The decoder for library users: any batch of tokens of any sequences in, rows out; the caller manages memory.

    decoder = llm.decoder(n_seq_max=4, n_outputs_max=64)
    decoder.decode(Batch(token=[1, 2, 3], seq_id=[[0], [0], [1]], output=[0, 1, 1]))
    decoder.logits(1), decoder.memory.seq_rm(0)

It owns the buffers that outputs are read from: a returned tensor is a view, valid until the next accepted decode.
Failures are one exception per class, each with `.code`, `.reason` and `.index`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from ostinato.backends.torch.model import Model
from ostinato.cache import state_file
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.flow import Decoded, DecodeFlow, never
from ostinato.decoder.cells.memories import MemoryParts, memory_for
from ostinato.decoder.cells.memory.coordinator import Coordinator
from ostinato.decoder.cells.memory.saved import SavedKV, SavedStates
from ostinato.decoder.cells.output import Outputs
from ostinato.decoder.cells.sample_router import BackendSampler
from ostinato.decoder.cells.settings import Settings, settle
from ostinato.decoder.pooling import Pooled, Pooling
from ostinato.decoder.pooling import pooling as pooling_named
from ostinato.errors import BadOption, Unsupported
from ostinato.files.unpack import Floats
from ostinato.options import KVType


class Decoder:
    """Decodes batches, or encodes them where the model is an encoder and has no memory (D-2).

    `LLM.decoder` makes one.

    Args:
        model: the loaded weights.
        n_ctx: positions of memory; with `unified`, shared by all sequences.
        n_batch: tokens that one call may have.
        n_ubatch: tokens of one forward.
        n_seq_max: sequences.
        unified: all sequences share one memory; else each has an equal part.
        n_outputs_max: rows that one call may ask for; 0 is as many as a batch has tokens.
        n_outputs_max_per_seq: the same for one sequence; 0 is no limit of its own.
        n_rs_seq: snapshots kept of each recurrent state, to roll back.
        kv_type: how keys and values are stored.
        embeddings: publish hidden rows too, not flagged outputs alone.
        pooling: one vector per sequence: `none`, `mean`, `cls`, `last` or `rank`.

    Raises:
        BadOption: a setting is out of range.
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
        self.model = model
        pooled = _pooled(model, pooling) if embeddings or not causal else None
        self._flow = DecodeFlow(model, self.settings, memory_for(model, self.settings, kv_type), pooled)

    # Decoding

    def decode(self, batch: Batch, *, abort: Callable[[], bool] = never) -> Decoded:
        """Decode a batch, or encode it where there is no memory. `abort` is called during the run; true stops it."""
        return self._flow.decode(batch, abort=abort)

    def register(self, sequence: int, sampler: BackendSampler | None) -> bool:
        """Sample a sequence inside the run by this sampler, or no longer; False where it cannot run there (SR-1)."""
        return self._flow.router.register(sequence, sampler)

    # Outputs

    @property
    def outputs(self) -> Outputs:
        """Everything that the last decode published, with reasons for what is absent."""
        return self._flow.outputs

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
        found = None if self._flow.pooled is None else self._flow.pooled.get(sequence)
        return None if found is None else torch.from_numpy(found)

    @property
    def counters(self) -> Mapping[str, int]:
        """How often graphs were reserved, built and reused, and ubatches rolled back."""
        graphs = self._flow.graphs
        return {
            "reserved": graphs.n_reserved,
            "built": graphs.n_built,
            "reused": graphs.n_reused,
            "rolled_back": self._flow.ubatches.n_roll_backs,
        }

    # Memory. Pending shifts and copies are carried out before saving and before loading (ST-10).

    @property
    def parts(self) -> MemoryParts:
        """The memory's caches and states with their tensors; read-only."""
        if not self.model.shape.causal:
            raise Unsupported(f"{self.model.shape.family} is an encoder: it has no memory")
        return self._flow.parts

    @property
    def memory(self) -> Coordinator:
        """The memory: `seq_rm`, `seq_cp`, `seq_keep`, `seq_add`, `seq_div`, `clear`, `pos_min`, `pos_max`."""
        return self.parts.memory

    def save_all(self, note: Mapping[str, Any] | None = None) -> bytes:
        """The whole memory as bytes (ST-1)."""
        self._flow.update()
        return state_file.save(self._saved_parts(), note=note)

    def load_all(self, data: bytes) -> None:
        """Replace the whole memory; BadFile where the bytes are damaged or of another model."""
        self._flow.update()
        state_file.load(self._saved_parts(), None, data)

    def save_sequence(self, sequence: int, note: Mapping[str, Any] | None = None) -> bytes:
        """One sequence as bytes."""
        self._flow.update()
        return state_file.save(self._saved_parts(), sequence, note=note)

    def load_sequence(self, sequence: int, data: bytes) -> None:
        """Replace one sequence by a saved one."""
        self._flow.update()
        state_file.load(self._saved_parts(), sequence, data)

    def _saved_parts(self) -> state_file.StateParts:
        parts = self.parts
        caches = tuple(SavedKV(*part) for part in (parts.full, parts.windowed) if part is not None)
        states = None if parts.recurrent is None else SavedStates(*parts.recurrent)
        return state_file.StateParts(self.model.shape.family, caches, states)


def _pooled(model: Model, name: str) -> Pooled:
    kind = pooling_named(name, ranks=model.ranking is not None)
    if kind is not Pooling.RANK:
        return Pooled(kind)

    def head(vector: Floats) -> Floats:
        scores: Floats = model.rank(torch.from_numpy(vector).to(model.device).unsqueeze(0))[0].cpu().numpy()
        return scores

    by = Pooling(model.shape.pooling) if model.shape.pooling in ("mean", "cls", "last") else Pooling.CLS
    return Pooled(kind, head=head, rank_by=by)
