"""Latent attention as kernels: what happens to rows between its first products and its last, in steps and chunks.

A block is a list of stages over buffers that all layers share, as `mixers.py` has them: rotary positions, norm and
append; the absorbed product of each head; attention over pages; the expanding product of each head. The products of
whole rows before and behind them a step and a chunk bind each in its own way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ostinato.backends.cuda.mixers import KernelStage, columns
from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.kernels import Kernels, Launch
from ostinato.backends.torch.kv_store import ValuesInKeys
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.attend import StepRows
from ostinato.backends.torch.ops.chunk_attention import Chunk
from ostinato.backends.torch.ops.latent import LatentHeads, LatentKV
from ostinato.backends.torch.ops.matmul import n_stats
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.weight import Weight
from ostinato.errors import InternalError
from ostinato.models.blocks import LatentAttention
from ostinato.models.shape import AttentionShape, LatentShape, Shape


@dataclass(frozen=True, slots=True)
class LatentBuffers:
    """Between the stages of latent attention, [rows, ...], for the widest layer. Absorbed queries and what they have
    seen lie in the buffers of q, k and v and of other attention's output."""

    low: Tensor  # compressed queries
    low_stats: Tensor  # their partial sums (`n_stats`), float32
    heads: Tensor  # of each head the plain part, then the one to rotate
    row: Tensor  # the compressed row, then the part of its key to rotate
    expanded: Tensor  # what all heads give, for the last product

    @staticmethod
    def of(shape: Shape, rows: int, dtype: torch.dtype, device: torch.device) -> LatentBuffers | None:
        """None where no layer has latent attention."""
        own = [one for one in shape.attention.values() if one.latent is not None]
        if not own:
            return None

        def made(width: Callable[[AttentionShape], int]) -> Tensor:
            return zeros((rows, max(1, *map(width, own))), dtype, device)

        low = made(lambda one: latent_of(one).q_rank or 0)
        return LatentBuffers(
            low,
            zeros((rows, n_stats(low.shape[1]), 2), torch.float32, device),
            made(lambda one: one.n_heads * query_width(one)),
            made(lambda one: one.head_width),
            made(lambda one: one.n_heads * latent_of(one).value_width),
        )

    @property
    def named(self) -> dict[str, Tensor]:
        return {f"latent.{field.name}": getattr(self, field.name) for field in fields(self)}

    def for_layer(self, shape: AttentionShape, rows: int | None = None) -> LatentBuffers:
        """The first rows of each, as wide as a layer has them."""
        latent = latent_of(shape)
        low = columns(self.low, latent.q_rank or 1)
        stats = self.low_stats.view(-1)[: len(low) * n_stats(low.shape[1]) * 2].view(len(low), -1, 2)
        heads = columns(self.heads, shape.n_heads * query_width(shape))
        row = columns(self.row, shape.head_width)
        expanded = columns(self.expanded, shape.n_heads * latent.value_width)
        return LatentBuffers(*(each[:rows] for each in (low, stats, heads, row, expanded)))


def latent_of(shape: AttentionShape) -> LatentShape:
    assert shape.latent is not None
    return shape.latent


def query_width(shape: AttentionShape) -> int:
    """Of a head before it is absorbed."""
    return latent_of(shape).plain_width + shape.head_width - shape.value_width


def latent_heads_of(model: Model, attention: LatentAttention) -> LatentHeads:
    """How a layer attends."""
    s, rope = attention.shape, attention.shape.rope
    if rope is None or attention.sinks is not None:
        raise InternalError("a GPU's kernels were given latent attention without rotary positions, or with sinks")
    return LatentHeads(
        n_heads=s.n_heads,
        rank=s.value_width,
        rotated=s.head_width - s.value_width,
        plain=latent_of(s).plain_width,
        scale=s.query_scale,
        frequencies=model.frequencies[rope],
        norm=attention.kv_a_norm.weight,
        norm_eps=attention.kv_a_norm.eps,
        amplitude=rope.amplitude,
        pairing=rope.pairing,
    )


def latent_kv_of(memory: PagedMemory, number: int) -> LatentKV:
    """The keys of a layer, whose values are parts of them, as kernels take them."""
    assert memory.kv is not None
    keys = memory.kv.keys[number]
    assert isinstance(memory.kv.values[number], ValuesInKeys)
    return LatentKV(
        keys.values[0].flatten(1), memory.page_tokens, None if keys.scales is None else keys.scales[0].flatten(1)
    )


def latent_stages(
    attention: LatentAttention,
    latent: LatentHeads,
    buffers: LatentBuffers,
    query: Tensor,
    seen: Tensor,
    kv: LatentKV,
    rows: StepRows | Chunk,
    kernels: Kernels,
    attend: Launch,
) -> tuple[KernelStage, ...]:
    """From `buffers.heads` and `buffers.row` to `buffers.expanded`. `attend`: from query [rows, heads * key width] to
    seen [rows, heads * rank], as a step or a chunk binds it."""
    step = isinstance(rows, StepRows)
    n_rows = rows.n_rows if isinstance(rows, StepRows) else rows.n
    b, n_heads = buffers, latent.n_heads
    k_b, v_b = (heads_on_top(weight) for weight in (attention.k_b, attention.v_b))
    rotary = kernels.latent_rows(b.heads, b.row, query, kv, rows, latent)
    behind = query[:, latent.rotated :]  # where a head's absorbed part begins
    widths = {"n_heads": n_heads, "step": step}
    absorb = kernels.heads_product(
        b.heads, k_b, behind, n_rows, x_step=latent.query_width, out_step=latent.key_width, **widths
    )
    expanded = b.expanded.shape[1] // n_heads
    expand = kernels.heads_product(seen, v_b, b.expanded, n_rows, x_step=latent.rank, out_step=expanded, **widths)
    return (
        KernelStage("rows", rotary, (b.heads, b.row), (query,), (latent.norm, latent.frequencies), states=True),
        KernelStage("absorb", absorb, (b.heads,), (query,), k_b),
        KernelStage("attend", attend, (query,), (seen,), states=True),
        KernelStage("expand", expand, (seen,), (b.expanded,), v_b),
    )


def heads_on_top(weight: Weight) -> Weight:
    """The heads' matrices [heads, rows, cols] on top of each other; packed ones stand so already."""
    return weight.flatten(0, 1) if isinstance(weight, Tensor) and weight.dim() == 3 else weight
