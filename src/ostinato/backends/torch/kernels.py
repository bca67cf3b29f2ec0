"""The kernels that a fused step and a prompt's chunk are made of, as a table; here with the twins as its entries.

Each entry takes the buffers of one launch, checks them once, and gives back the launch. Another backend fills the
same table with kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ostinato.backends.torch.ops.activation import activate_rows_torch, gated_rows_torch
from ostinato.backends.torch.ops.add_norm import add_norm_torch
from ostinato.backends.torch.ops.attend import attend_torch, gate_heads_torch
from ostinato.backends.torch.ops.chunk_attention import append_chunk_torch, chunk_attention_torch
from ostinato.backends.torch.ops.embed import embed_torch
from ostinato.backends.torch.ops.gemm import gemm_torch
from ostinato.backends.torch.ops.join_parts import join_parts_torch
from ostinato.backends.torch.ops.latent import (
    attend_latent_chunk_torch,
    attend_latent_torch,
    heads_product_torch,
    latent_rows_torch,
)
from ostinato.backends.torch.ops.logprobs import logprobs_torch
from ostinato.backends.torch.ops.matmul import experts_down_torch, experts_gate_up_torch, matmul_torch, route_rows_torch
from ostinato.backends.torch.ops.norm import norm_rows_torch
from ostinato.backends.torch.ops.runs import (
    conv_runs_torch,
    delta_runs_torch,
    gate_runs_torch,
    selected_runs_torch,
    selective_runs_torch,
    short_conv_runs_torch,
    ssd_runs_torch,
)
from ostinato.backends.torch.ops.sample_step import sample_step_torch
from ostinato.loop.grammars import find_masks

Launch = Callable[[], object]  # its result is ignored
Bind = Callable[..., Launch]


def play(launches: Sequence[Launch]) -> None:
    """Launch one after the other."""
    for launch in launches:
        launch()


@dataclass(frozen=True, slots=True)
class Kernels:
    """Binders: arguments in, a launch without arguments out."""

    embed: Bind
    matmul: Bind
    attend: Bind
    add_norm: Bind
    route: Bind
    experts_gate_up: Bind
    experts_down: Bind
    masks: Bind
    sample: Callable[..., Sequence[tuple[str, Launch]]]  # several launches, by name
    attend_workspace: Callable[..., Any]
    sample_workspace: Callable[..., Any]
    experts_workspace: Callable[..., Any]
    # Of a prompt's chunk
    norm: Bind
    gemm: Bind
    append_chunk: Bind
    attend_chunk: Bind
    activate: Bind
    gated: Bind
    logprobs: Bind
    # Of recurrent blocks, in steps and chunks
    conv_runs: Bind
    ssd_runs: Bind
    selected_runs: Bind
    selective_runs: Bind
    gate_runs: Bind
    delta_runs: Bind
    short_conv_runs: Bind
    gate_heads: Bind
    join_parts: Bind
    # Of latent attention
    latent_rows: Bind
    heads_product: Bind
    attend_latent: Bind
    attend_latent_chunk: Bind
    latent_workspace: Callable[..., Any]


def twin_kernels() -> Kernels:
    """The definitions: what every kernel is tested against, bound the same way."""

    def attend(qkv: Any, seen: Any, kv: Any, rows: Any, heads: Any, workspace: Any) -> Launch:
        return partial(attend_torch, qkv, seen, kv, rows, heads)

    def attend_latent(query: Any, seen: Any, kv: Any, rows: Any, latent: Any, workspace: Any) -> Launch:
        return partial(attend_latent_torch, query, seen, kv, rows, latent)

    def heads_product(*given: Any, step: bool, **more: Any) -> Launch:
        return partial(heads_product_torch, *given, **more)

    def experts(twin: Callable[..., None], *given: Any, workspace: Any = None, **more: Any) -> Launch:
        return partial(twin, *given, **more)

    def sample(logits: Any, table: Any, workspace: Any, rows: Any, **more: Any) -> list[tuple[str, Launch]]:
        return [("choose", partial(sample_step_torch, logits, table, rows, **more))]

    return Kernels(
        embed=partial(partial, embed_torch),
        matmul=partial(partial, matmul_torch),
        attend=attend,
        add_norm=partial(partial, add_norm_torch),
        route=partial(partial, route_rows_torch),
        experts_gate_up=partial(experts, experts_gate_up_torch),
        experts_down=partial(experts, experts_down_torch),
        masks=partial(partial, find_masks),
        sample=sample,
        attend_workspace=lambda *_: None,
        sample_workspace=lambda *_: None,
        experts_workspace=lambda *_: None,
        norm=partial(partial, norm_rows_torch),
        gemm=partial(partial, gemm_torch),
        append_chunk=partial(partial, append_chunk_torch),
        attend_chunk=partial(partial, chunk_attention_torch),
        activate=partial(partial, activate_rows_torch),
        gated=partial(partial, gated_rows_torch),
        logprobs=partial(partial, logprobs_torch),
        conv_runs=partial(partial, conv_runs_torch),
        ssd_runs=partial(partial, ssd_runs_torch),
        selected_runs=partial(partial, selected_runs_torch),
        selective_runs=partial(partial, selective_runs_torch),
        gate_runs=partial(partial, gate_runs_torch),
        delta_runs=partial(partial, delta_runs_torch),
        short_conv_runs=partial(partial, short_conv_runs_torch),
        gate_heads=partial(partial, gate_heads_torch),
        join_parts=partial(partial, join_parts_torch),
        latent_rows=partial(partial, latent_rows_torch),
        heads_product=heads_product,
        attend_latent=attend_latent,
        attend_latent_chunk=partial(partial, attend_latent_chunk_torch),
        latent_workspace=lambda *_: None,
    )
