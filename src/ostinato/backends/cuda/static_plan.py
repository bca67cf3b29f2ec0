"""The step of any causal model as torch runs it over all rows at once: what a GPU decodes recurrent families with.

The model's own blocks, always with as many rows as there are slots: no shape and no address depends on which slots are
live, and nothing synchronises with the device, so that the step can be captured as a graph, and a row's bits do not
depend on the other rows.
A row without a live slot is computed like any other and changes nothing: its token is 0, its states are read from a row
of zeros and written to a row that is not read, and its keys and values are not stored. Attention and sampling are those
of `backends/cuda/kernels.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.backends.cuda.backend import SPARE_STATES
from ostinato.backends.cuda.mixers import columns
from ostinato.backends.cuda.plan import paged_kv_of
from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.kernels import Kernels, Launch
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.attend import Heads, StepRows
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.plan import BlockStep, tensors_of
from ostinato.backends.torch.weight import rows_of
from ostinato.errors import InternalError
from ostinato.loop.layout import Arena, SampledRows, Tables
from ostinato.models.blocks import AnyAttention, AnyLayer


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Attention over pages by a kernel; QK norm and RoPE are already applied to q and k."""

    heads: Mapping[int, Heads]
    launches: Mapping[int, Launch]
    qkv: Tensor  # float32 [n_slots, (heads + 2 kv_heads) * width]
    attended: Tensor  # float32 [n_slots, heads * width]
    workspace: object

    @staticmethod
    def of(model: Model, memory: PagedMemory, table: Arena, kernels: Kernels) -> StepAttention:
        s, device = model.shape, model.device
        heads = {
            layer: Heads(one.n_heads, one.n_kv_heads, one.head_width, one.query_scale, one.softcap, one.window)
            for layer, one in s.attention.items()
        }
        rows = {layer: StepRows.of(table, group) for layer, group in memory.group_of.items()}
        n_slots = StepRows.of(table).n_slots
        qkv = zeros((n_slots, s.widest(lambda a: a.qkv_width)), torch.float32, device)
        attended = zeros((n_slots, s.widest(lambda a: a.out_width)), torch.float32, device)
        workspace = kernels.attend_workspace(n_slots, list(heads.values()), device)
        launches = {
            layer: kernels.attend(
                columns(qkv, how.n_columns),
                columns(attended, how.n_heads * how.head_width),
                paged_kv_of(memory, layer),
                rows[layer],
                how,
                workspace,
            )
            for layer, how in heads.items()
        }
        return StepAttention(heads, launches, qkv, attended, workspace)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """What every layer's launch uses and none keeps."""
        return {"qkv": self.qkv, "attended": self.attended, **_named("attend.workspace", self.workspace)}


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What all rows of a step see, each its own sequence: a `Memory` whose tensors stay where they are."""

    n_seqs: int
    from_row: Tensor  # int64 [n_slots]: where each row's states are
    to_row: Tensor  # where they are written: the same row for a live slot
    kept: Mapping[int, tuple[Tensor, ...]]  # by layer, each [n_slots + SPARE_STATES, 1, ...]
    attention: StepAttention | None
    n_planes: int = 1

    def attend(self, block: AnyAttention, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        attention = self.attention
        assert attention is not None
        assert k is not None
        assert v is not None
        heads = attention.heads[block.layer]
        columns(attention.qkv, heads.n_columns).copy_(torch.cat((q, k, v), 1).flatten(1))
        attention.launches[block.layer]()
        return columns(attention.attended, q[0].numel()).view(q.shape).to(q.dtype)

    def states(self, layer: int) -> tuple[Tensor, ...]:
        return tuple(state[:, 0].index_select(0, self.from_row) for state in self.kept[layer])

    def keep(self, layer: int, states: tuple[Tensor, ...]) -> None:
        # Only live slots' rows and the last row are written: any other slot may be in prefill.
        for kept, new in zip(self.kept[layer], states, strict=True):
            kept[:, 0].index_copy_(0, self.to_row, new[:, 0])


class StaticStep(BlockStep):
    """All rows at once. `memory` keeps SPARE_STATES more rows of states than there are slots."""

    kind = ", static"

    def __init__(self, model: Model, memory: PagedMemory, tables: Tables, n_tokens: int, kernels: Kernels) -> None:
        super().__init__(model, memory, tables, n_tokens)
        shape, device, n_slots, self._kernels = model.shape, model.device, self._n_slots, kernels
        self.from_row, self.to_row = (zeros((n_slots,), torch.int64, device) for _ in range(2))
        sizes = {rope: (n_slots, rope.width // 2) for rope in model.frequencies}
        self.cos_sin = {
            rope: (zeros(size, torch.float32, device), zeros(size, torch.float32, device))
            for rope, size in sizes.items()
        }
        self._row = torch.arange(n_slots, dtype=torch.int32, device=device)
        # On the device before any capture: a number that torch must carry there would end one.
        scale = shape.embedding_scale
        self._scale = None if scale is None else torch.tensor(scale, dtype=model.dtype, device=device)
        attention = None if memory.kv is None else StepAttention.of(model, memory, tables.table, kernels)
        self.memory = StepMemory(n_slots, self.from_row, self.to_row, _states_of(memory, n_slots), attention)
        self._workspace = kernels.sample_workspace(n_slots, shape.vocab, device)
        self.placed |= {"from_row": self.from_row, "to_row": self.to_row, **_named("turns", [*self.cos_sin.values()])}
        self.attending |= {} if attention is None else attention.buffers
        self.sampling |= _named("sample.workspace", self._workspace)

    @torch.inference_mode()
    def embed(self) -> None:
        table, model = self._table, self._model
        dead = self._row >= table["n_rows"]
        slot = table["row_slot"].long().masked_fill(dead, 0)
        self.from_row.copy_(slot.masked_fill(dead, self._n_slots))
        self.to_row.copy_(slot.masked_fill(dead, self._n_slots + 1))
        token = table["token"].index_select(0, slot).long().masked_fill(dead, 0)
        position = table["position"].index_select(0, slot).long().masked_fill(dead, 0)
        x = rows_of(model.embedding, token, model.dtype)
        self.x.copy_(model.embed_inputs(x if self._scale is None else x * self._scale, position))
        rope_set = table["rope_set"].index_select(0, slot).long() if model.shape.n_rope_sets > 1 else 0
        for rope, found in model.angles(position, rope_set).items():
            for kept, new in zip(self.cos_sin[rope], found, strict=True):
                kept.copy_(new)

    @torch.inference_mode()
    def layer(self, layer: AnyLayer) -> None:
        self.x.copy_(self._model.through_layer(layer, self.x, self.cos_sin, self.memory))

    @torch.inference_mode()
    def head(self) -> None:
        self.logits.copy_(self._model.logits(self._model.final_norm(self.x)))

    def samples(self) -> Sequence[tuple[str, Launch]]:
        given = self.logits, self._table, self._workspace, SampledRows.of(self._table)
        return [(f"sample.{name}", run) for name, run in self._kernels.sample(*given, n_tokens=self._n_tokens)]


def _states_of(memory: PagedMemory, n_slots: int) -> Mapping[int, tuple[Tensor, ...]]:
    """The states of every layer, with the spare rows for rows without a live slot."""
    if memory.states is None:
        return {}
    for states in memory.states.layers.values():
        for state in states:
            if len(state) != n_slots + SPARE_STATES:
                raise InternalError(
                    f"states of {len(state)} rows; a static step of {n_slots} slots needs {SPARE_STATES} more"
                )
    return memory.states.layers


def _named(name: str, part: object) -> dict[str, Tensor]:
    """Every tensor inside, by its path."""
    return dict(tensors_of(part, name))
