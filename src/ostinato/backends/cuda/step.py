"""The kernels that a fused step is made of, as one table: Triton's for a GPU, or the twins.

Each entry takes the buffers of one launch, checks them once, and gives back the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ostinato.backends.allocate import zeros
from ostinato.backends.torch.ops.activation import activate_rows_torch, gated_rows_torch
from ostinato.backends.torch.ops.add_norm import add_norm_torch
from ostinato.backends.torch.ops.attend import attend_torch
from ostinato.backends.torch.ops.chunk_attention import append_chunk_torch, chunk_attention_torch
from ostinato.backends.torch.ops.embed import embed_torch
from ostinato.backends.torch.ops.gemm import gemm_torch
from ostinato.backends.torch.ops.logprobs import logprobs_torch
from ostinato.backends.torch.ops.matmul import experts_down_torch, experts_gate_up_torch, matmul_torch, route_rows_torch
from ostinato.backends.torch.ops.norm import norm_rows_torch
from ostinato.backends.torch.ops.sample_step import sample_step_torch

Launch = Callable[[], object]  # its result is ignored
Bind = Callable[..., Launch]


def play(launches: Sequence[Launch]) -> None:
    """Launch one after the other."""
    for launch in launches:
        launch()


@dataclass(frozen=True, slots=True)
class StepKernels:
    """Binders: arguments in, a launch without arguments out."""

    embed: Bind
    matmul: Bind
    attend: Bind
    add_norm: Bind
    route: Bind
    experts_gate_up: Bind
    experts_down: Bind
    sample: Callable[..., Sequence[tuple[str, Launch]]]  # several launches, by name
    attend_workspace: Callable[..., Any]
    sample_workspace: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PromptKernels:
    """Binders of what a prompt's chunk needs beyond the step's."""

    norm: Bind
    gemm: Bind
    append: Bind
    attend: Bind
    activate: Bind
    gated: Bind
    logprobs: Bind


def twin_kernels() -> StepKernels:
    """The definitions: what every kernel is tested against, bound the same way."""

    def attend(qkv: Any, seen: Any, kv: Any, rows: Any, heads: Any, workspace: Any) -> Launch:
        return partial(attend_torch, qkv, seen, kv, rows, heads)

    def sample(*given: Any, workspace: Any, **more: Any) -> list[tuple[str, Launch]]:
        return [("choose", partial(sample_step_torch, *given, **more))]

    def nothing(*_: Any) -> None:
        return None

    return StepKernels(
        embed=partial(partial, embed_torch),
        matmul=partial(partial, matmul_torch),
        attend=attend,
        add_norm=partial(partial, add_norm_torch),
        route=partial(partial, route_rows_torch),
        experts_gate_up=partial(partial, experts_gate_up_torch),
        experts_down=partial(partial, experts_down_torch),
        sample=sample,
        attend_workspace=nothing,
        sample_workspace=nothing,
    )


def triton_kernels() -> StepKernels:
    """Triton's."""
    from ostinato.backends.cuda.triton.add_norm import bind_add_norm
    from ostinato.backends.cuda.triton.attend import attend_workspace, bind_attend
    from ostinato.backends.cuda.triton.embed import bind_embed
    from ostinato.backends.cuda.triton.experts import bind_experts_down, bind_experts_gate_up, bind_route
    from ostinato.backends.cuda.triton.matmul import bind_matmul
    from ostinato.backends.cuda.triton.sample import bind_sample
    from ostinato.backends.cuda.triton.sample import sample_workspace as sizes

    def sample_workspace(n_slots: int, vocab: int, device: torch.device) -> dict[str, Tensor]:
        return {name: zeros(size, dtype, device) for name, (size, dtype) in sizes(n_slots, vocab).items()}

    return StepKernels(
        embed=bind_embed,
        matmul=bind_matmul,
        attend=bind_attend,
        add_norm=bind_add_norm,
        route=bind_route,
        experts_gate_up=bind_experts_gate_up,
        experts_down=bind_experts_down,
        sample=bind_sample,
        attend_workspace=attend_workspace,
        sample_workspace=sample_workspace,
    )


def twin_prompts() -> PromptKernels:
    """The definitions for a prompt's chunk."""
    return PromptKernels(
        norm=partial(partial, norm_rows_torch),
        gemm=partial(partial, gemm_torch),
        append=partial(partial, append_chunk_torch),
        attend=partial(partial, chunk_attention_torch),
        activate=partial(partial, activate_rows_torch),
        gated=partial(partial, gated_rows_torch),
        logprobs=partial(partial, logprobs_torch),
    )


def triton_prompts() -> PromptKernels:
    """Triton's."""
    from ostinato.backends.cuda.triton.activation import bind_activate, bind_gated
    from ostinato.backends.cuda.triton.chunk_attention import bind_append_chunk, bind_chunk_attention
    from ostinato.backends.cuda.triton.gemm import bind_gemm
    from ostinato.backends.cuda.triton.logprobs import bind_logprobs
    from ostinato.backends.cuda.triton.norm import bind_norm

    return PromptKernels(
        norm=bind_norm,
        gemm=bind_gemm,
        append=bind_append_chunk,
        attend=bind_chunk_attention,
        activate=bind_activate,
        gated=bind_gated,
        logprobs=bind_logprobs,
    )
