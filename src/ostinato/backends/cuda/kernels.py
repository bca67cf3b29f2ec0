"""The table of kernels for a fused step and a prompt's chunk, with Triton's as its entries."""

from __future__ import annotations

from functools import partial

from ostinato.backends.machine import Chip
from ostinato.backends.torch.kernels import Kernels


def triton_kernels(chip: Chip) -> Kernels:
    """With tiles and stages that fit the chip. Imported only where they run."""
    from ostinato.backends.cuda.launch import compile_as
    from ostinato.backends.cuda.masks import bind_masks
    from ostinato.backends.cuda.triton.activation import bind_activate, bind_gated
    from ostinato.backends.cuda.triton.add_norm import bind_add_norm
    from ostinato.backends.cuda.triton.attend import attend_workspace, bind_attend
    from ostinato.backends.cuda.triton.attend_latent import (
        bind_attend_latent,
        bind_attend_latent_chunk,
        latent_workspace,
    )
    from ostinato.backends.cuda.triton.chunk_attention import bind_append_chunk, bind_chunk_attention
    from ostinato.backends.cuda.triton.delta import bind_delta_runs, bind_short_conv_runs
    from ostinato.backends.cuda.triton.embed import bind_embed
    from ostinato.backends.cuda.triton.experts import (
        bind_experts_down,
        bind_experts_gate_up,
        bind_route,
        experts_workspace,
    )
    from ostinato.backends.cuda.triton.gate_heads import bind_gate_heads
    from ostinato.backends.cuda.triton.gemm import bind_gemm
    from ostinato.backends.cuda.triton.join_parts import bind_join_parts
    from ostinato.backends.cuda.triton.latent import bind_heads_product, bind_latent_rows
    from ostinato.backends.cuda.triton.logprobs import bind_logprobs
    from ostinato.backends.cuda.triton.matmul import bind_matmul
    from ostinato.backends.cuda.triton.norm import bind_norm
    from ostinato.backends.cuda.triton.runs import bind_conv_runs, bind_gate_runs, bind_selected_runs
    from ostinato.backends.cuda.triton.sample import bind_sample, sample_workspace
    from ostinato.backends.cuda.triton.scans import bind_selective_runs, bind_ssd_runs

    compile_as(chip)
    return Kernels(
        embed=bind_embed,
        matmul=partial(bind_matmul, chip=chip),
        attend=partial(bind_attend, chip=chip),
        add_norm=bind_add_norm,
        route=bind_route,
        experts_gate_up=partial(bind_experts_gate_up, chip=chip),
        experts_down=partial(bind_experts_down, chip=chip),
        masks=partial(bind_masks, chip=chip),
        sample=bind_sample,
        attend_workspace=attend_workspace,
        sample_workspace=sample_workspace,
        experts_workspace=experts_workspace,
        norm=bind_norm,
        gemm=partial(bind_gemm, chip=chip),
        append_chunk=bind_append_chunk,
        attend_chunk=partial(bind_chunk_attention, chip=chip),
        activate=bind_activate,
        gated=bind_gated,
        logprobs=bind_logprobs,
        conv_runs=bind_conv_runs,
        ssd_runs=bind_ssd_runs,
        selected_runs=bind_selected_runs,
        selective_runs=bind_selective_runs,
        gate_runs=bind_gate_runs,
        delta_runs=bind_delta_runs,
        short_conv_runs=bind_short_conv_runs,
        gate_heads=bind_gate_heads,
        join_parts=bind_join_parts,
        latent_rows=bind_latent_rows,
        heads_product=partial(bind_heads_product, chip=chip),
        attend_latent=partial(bind_attend_latent, chip=chip),
        attend_latent_chunk=partial(bind_attend_latent_chunk, chip=chip),
        latent_workspace=latent_workspace,
    )
