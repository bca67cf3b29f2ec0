"""Memory as plainly as it can be had: one sequence, rows one after the other, everything kept in lists.

It stands in for the real memory where a test is about the model alone. An encoder's rows see each other and leave
nothing behind.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.attention import attention_torch
from ostinato.files.checkpoint import open_checkpoint
from ostinato.models.blocks import AnyAttention
from ostinato.models.registry import read_shape
from ostinato.models.shape import Shape
from tests.built import build_model


@dataclass(slots=True)
class PlainMemory:
    """What a model's layers remember of the one sequence."""

    shape: Shape
    n_planes: int = 1
    n_seqs: int = 1
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def attend(self, block: AnyAttention, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        layer, scale, softcap = block.kv_layer, block.shape.query_scale, block.shape.softcap
        if not self.shape.causal:
            assert k is not None
            assert v is not None
            apart = (torch.arange(len(q))[:, None] - torch.arange(len(q))).abs()
            near = None if block.shape.window is None else apart < block.shape.window
            return attention_torch(q, k, v, near, scale=scale, softcap=softcap)
        if k is None or v is None:
            k, v = self.keys[layer], self.values[layer]
        elif layer in self.keys:
            k, v = torch.cat((self.keys[layer], k)), torch.cat((self.values[layer], v))
        self.keys[layer], self.values[layer] = k, v
        ages = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        mask = (ages >= 0) & (ages < (block.shape.window or len(k)))
        return attention_torch(q, k, v, mask, scale=scale, softcap=softcap, sinks=block.sinks)

    def states(self, layer: int) -> tuple[Tensor, ...]:
        if layer not in self.kept:
            return tuple(torch.zeros(self.n_seqs, *size) for size in self.shape.recurrent[layer].states)
        return tuple(planes[:, 0] for planes in self.kept[layer])

    def keep(self, layer: int, states: tuple[Tensor, ...]) -> None:
        self.kept[layer] = states


def load(path: Path, *, context: int | None = None, dtype: torch.dtype = torch.float32) -> Model:
    """The model of a file or folder, on the CPU."""
    checkpoint = open_checkpoint(path)
    shape = read_shape(checkpoint)
    context = context or shape.default_context
    model = build_model(checkpoint, shape, dtype=dtype, device=torch.device("cpu"), context=context)
    return model.for_length(context)


def hidden(model: Model, ids: list[int], *, cuts: tuple[int, ...] = (), types: list[int] | None = None) -> Tensor:
    """The last hidden rows of one sequence [len(ids), hidden], run in pieces that end at `cuts`."""
    memory, rows = PlainMemory(model.shape), []
    for start, stop in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        kinds = None if types is None else torch.tensor(types[start:stop])
        with torch.inference_mode():
            rows.append(model.hidden(torch.tensor(ids[start:stop]), torch.arange(start, stop), memory, kinds))
    return torch.cat(rows)


def logits(model: Model, ids: list[int], *, cuts: tuple[int, ...] = ()) -> Tensor:
    """float32 [len(ids), vocab]."""
    with torch.inference_mode():
        return model.logits(hidden(model, ids, cuts=cuts))
