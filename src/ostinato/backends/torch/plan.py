"""The step of any model as torch runs it: the model's own blocks, one row at a time.

What `eager` decodes with on the CPU, and the twin of the native loop (`native/plan.py`). One row at a time, so that a
row's bits do not depend on the other rows of the step; a slot that is not live costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.sample_step import sample_step_torch
from ostinato.backends.torch.paged import PagedMemory, RowMemory
from ostinato.loop.layout import Tables, sampled
from ostinato.loop.memory import memory_in
from ostinato.loop.plan import Buffer, Node, Plan, without_repeats
from ostinato.models.blocks import AnyLayer


class TorchStep:
    """The nodes' code and what they share: rows' memories and angles, made when a step begins."""

    def __init__(self, model: Model, memory: PagedMemory, tables: Tables, n_tokens: int) -> None:
        self._model, self._memory, self._table = model, memory, tables.table
        self._n_tokens = n_tokens
        n_slots, device = tables.layout.n_slots, model.device
        wide = torch.float32 if model.shape.wide_residual else model.dtype
        self.x = zeros((n_slots, model.shape.hidden), wide, device)
        self.logits = zeros((n_slots, model.shape.vocab), torch.float32, device)
        self._rows: list[RowMemory] = []

    def embed(self) -> None:
        table, model = self._table, self._model
        n_rows = int(table["n_rows"])
        slots = table["row_slot"][:n_rows].tolist()
        positions, pages = table["position"].tolist(), table["pages"].cpu().numpy()
        self._rows = [RowMemory(self._memory, model, slot, positions[slot], pages[slot]) for slot in slots]
        self._angles = []
        for row, memory in enumerate(self._rows):
            position = torch.tensor([memory.position], device=model.device)
            token = table["token"][memory.slot : memory.slot + 1].long()
            self.x[row] = model.embed_inputs(model.embed(token), position)[0]
            self._angles.append(model.angles(position))

    def layer(self, layer: AnyLayer) -> None:
        for row, (memory, angles) in enumerate(zip(self._rows, self._angles, strict=True)):
            self.x[row] = self._model.through_layer(layer, self.x[row : row + 1], angles, memory)[0]

    def head(self) -> None:
        for row in range(len(self._rows)):
            self.logits[row] = self._model.logits(self._model.final_norm(self.x[row : row + 1]))[0]

    def sample(self) -> None:
        sample_step_torch(self.logits, self._table, n_tokens=self._n_tokens, **sampled(self._table))


def torch_plan(model: Model, memory: PagedMemory, tables: Tables, n_tokens: int) -> Plan:
    """The plan of a step over these tables; `n_tokens`: what the tokenizer knows, ids beyond it are never chosen."""
    step = TorchStep(model, memory, tables, n_tokens)
    weights = [Buffer.of(name, tensor) for name, tensor in tensors_of(model, "model")]
    kept = [Buffer.of(name, tensor) for name, tensor in memory_tensors(memory)]
    buffers = [
        Buffer.of("table", tables.table.memory),
        Buffer.of("admissions", tables.admissions.memory),
        Buffer.of("rings", tables.rings.memory),
        Buffer.of("x", step.x),
        Buffer.of("logits", step.logits),
        *kept,
        *without_repeats(weights),
    ]
    kept_names = tuple(buffer.name for buffer in kept)
    nodes = [Node("embed", "embed", step.embed, ("table",), ("x",))]
    for number, layer in enumerate(model.layers):
        own = tuple(name for name in kept_names if name.startswith(f"memory.{number}."))
        n_bytes = sum(t.numel() * t.element_size() for _, t in tensors_of(layer, ""))
        run = _bound(step, layer)
        nodes.append(Node(f"layer.{number}", "layer", run, ("x", "table", *own), ("x", *own), n_bytes))
    head_bytes = sum(t.numel() * t.element_size() for _, t in tensors_of(model.head, ""))
    nodes += [
        Node("head", "head", step.head, ("x",), ("logits",), head_bytes),
        Node("sample", "sample", step.sample, ("logits", "table"), ("table",)),
    ]
    constants = f"{model.shape}, {n_tokens} tokens"
    return Plan(str(model.device), tuple(buffers), tuple(nodes), memory.page_tokens, constants)


def _bound(step: TorchStep, layer: AnyLayer) -> Any:
    return lambda: step.layer(layer)


def tensors_of(part: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside blocks, lists and mappings, by its path; arrays as tensors over their memory."""
    for path, memory in memory_in(part, name):
        yield path, torch.as_tensor(memory)


def memory_tensors(memory: PagedMemory) -> Iterator[tuple[str, Tensor]]:
    """Keys, values and states of every layer, by name."""
    if memory.kv is not None:
        for what, halves in (("keys", memory.kv.keys), ("values", memory.kv.values)):
            for layer, half in halves.items():
                yield f"memory.{layer}.{what}", half.values
                if half.scales is not None:
                    yield f"memory.{layer}.{what}.scales", half.scales
    if memory.states is not None:
        for layer, states in memory.states.layers.items():
            for number, state in enumerate(states):
                yield f"memory.{layer}.state.{number}", state
