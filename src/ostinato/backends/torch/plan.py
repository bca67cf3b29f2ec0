"""The step of any model by its own blocks, as torch runs it on the CPU.

`TorchStep` is what `eager` decodes with there, and the twin of the native loop (`native/plan.py`). One row at a time,
so that a row's bits do not depend on the other rows of the step; a slot that is not live costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.arrays import as_tensor
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.sample_step import sample_step_torch
from ostinato.backends.torch.paged import PagedMemory, RowMemory
from ostinato.loop.grammars import find_masks
from ostinato.loop.layout import SampledRows, Tables
from ostinato.loop.memory import memory_in
from ostinato.loop.plan import Buffer, Node, Plan, without_repeats
from ostinato.models.blocks import AnyLayer


class TorchStep:
    """The buffers between the nodes of a step, by row, and the plan of them. Rows' memories and angles are made when a
    step begins. `n_tokens`: what the tokenizer knows, ids beyond it are never chosen."""

    def __init__(self, model: Model, memory: PagedMemory, tables: Tables, n_tokens: int) -> None:
        self._model, self._memory, self._tables, self._table = model, memory, tables, tables.table
        self._n_tokens, self._n_slots = n_tokens, tables.layout.n_slots
        wide = torch.float32 if model.shape.wide_residual else model.dtype
        self.x = zeros((self._n_slots, model.shape.hidden), wide, model.device)
        self.logits = zeros((self._n_slots, model.shape.vocab), torch.float32, model.device)

    def plan(self) -> Plan:
        """All nodes of the step, in order."""
        model, tables, kept = self._model, self._tables, dict(memory_tensors(self._memory))
        named = {"table": tables.table.memory, "admissions": tables.admissions.memory, "rings": tables.rings.memory}
        named |= {"x": self.x, "logits": self.logits, **kept}
        buffers = [Buffer.of(name, tensor) for name, tensor in named.items()]
        weights = [Buffer.of(name, tensor, is_weight=True) for name, tensor in tensors_of(model, "model")]
        nodes = [Node("embed", "embed", self.embed, ("table",), ("x",))]
        for number, layer in enumerate(model.layers):
            changed = ("x", *(name for name in kept if name.startswith(f"memory.{number}.")))
            run = partial(self.layer, layer)
            nodes.append(Node(f"layer.{number}", "layer", run, ("table", *changed), changed, bytes_in(layer)))
        nodes.append(Node("head", "head", self.head, ("x",), ("logits",), bytes_in(model.head)))
        if tables.grammars is not None:
            buffers.append(Buffer.of("grammars", as_tensor(tables.grammars.plain_words)))
            used = ("table", "grammars")
            nodes.append(Node("masks", "masks", partial(find_masks, tables), used, used))
        given = self.logits, self._table, SampledRows.of(self._table)
        sample = partial(sample_step_torch, *given, n_tokens=self._n_tokens)
        nodes.append(Node("sample", "sample", sample, ("logits", "table"), ("table",)))
        held = (*buffers, *without_repeats(weights))
        constants = f"{model.shape}, {self._n_tokens} tokens"
        return Plan(str(model.device), held, tuple(nodes), self._memory.page_tokens, constants)

    def embed(self) -> None:
        table, model = self._table, self._model
        n_rows = int(table["n_rows"])
        slots = table["row_slot"][:n_rows].tolist()
        positions, pages = table["position"].tolist(), table["pages"].cpu().numpy()
        rope_sets = table["rope_set"].tolist()
        self._rows = [RowMemory(self._memory, model, slot, positions[slot], 1, pages[slot]) for slot in slots]
        self._angles, self._per_layer = [], []
        for row, memory in enumerate(self._rows):
            position = torch.tensor([memory.start], device=model.device)
            token = table["token"][memory.slot : memory.slot + 1].long()
            x = model.embed(token)
            self._per_layer.append(model.per_layer_inputs(token, x))
            self.x[row] = model.embed_inputs(x, position)[0]
            self._angles.append(model.angles(position, rope_sets[memory.slot]))

    def layer(self, layer: AnyLayer) -> None:
        for row, given in enumerate(zip(self._angles, self._rows, self._per_layer, strict=True)):
            self.x[row] = self._model.through_layer(layer, self.x[row : row + 1], *given)[0]

    def head(self) -> None:
        for row in range(len(self._rows)):
            self.logits[row] = self._model.logits(self._model.final_norm(self.x[row : row + 1]))[0]


def bytes_in(part: Any) -> int:
    """Of every tensor inside."""
    return sum(tensor.nbytes for _, tensor in tensors_of(part, ""))


def tensors_of(part: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside blocks, lists and mappings, by its path; arrays as tensors over their memory."""
    for path, memory in memory_in(part, name):
        yield path, as_tensor(memory)


def memory_tensors(memory: PagedMemory) -> Iterator[tuple[str, Tensor]]:
    """Keys, values and states of every layer, by name."""
    if memory.kv is not None:
        for what, halves in (("keys", memory.kv.keys), ("values", memory.kv.values)):
            for layer, half in halves.items():
                for name, part in zip((what, f"{what}.scales"), half.parts, strict=False):
                    yield f"memory.{layer}.{name}", part
    if memory.states is not None:
        for layer, states in memory.states.layers.items():
            for number, state in enumerate(states):
                yield f"memory.{layer}.state.{number}", state
