"""Recurrent blocks as kernels: what happens to rows between a mixer's first product and its last, in steps and chunks.

A block is a list of stages over buffers that all layers share: products, which a step and a chunk bind each in its own
way, and kernels over runs of rows (`triton/runs.py`, `triton/scans.py`). A block joins by a case in `stages_of` and its
sizes in `MixerBuffers.of`; what it remembers lies in the states of its layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.kernels import Kernels, Launch
from ostinato.backends.torch.ops.runs import Runs
from ostinato.backends.torch.paged import PagedMemory
from ostinato.models.blocks import DeltaMixer, Linear, Mamba2Mixer, MambaMixer, Mixer, ShortConvMixer
from ostinato.models.shape import DeltaShape, Mamba2Shape, MambaShape, RecurrentShape, ShortConvShape


@dataclass(frozen=True, slots=True)
class MixerBuffers:
    """Between the stages of any recurrent block, float32 [rows, ...] but for the last."""

    into: Tensor  # of the first product
    convolved: Tensor
    selected: Tensor  # mamba's step, b and c
    low_steps: Tensor  # the first of them, as the next product takes it
    bc: Tensor
    steps: Tensor
    scanned: Tensor
    gated: Tensor  # what the last product takes in

    @staticmethod
    def of(shapes: Iterable[RecurrentShape], rows: int, dtype: torch.dtype, device: torch.device) -> MixerBuffers:
        """For the widest of the blocks; `dtype` of what the last product takes in."""
        widths = dict.fromkeys((field.name for field in fields(MixerBuffers)), 1)
        for shape in shapes:
            match shape:
                case MambaShape():
                    own = {"into": 2 * shape.inner, "convolved": shape.inner, "steps": shape.inner}
                    own |= {"selected": shape.dt_rank + 2 * shape.state, "low_steps": shape.dt_rank}
                    own |= {"bc": 2 * shape.state, "gated": shape.inner}
                case Mamba2Shape():
                    own = {"into": shape.inner + shape.conv_width + shape.n_heads, "convolved": shape.conv_width}
                    own |= {"scanned": shape.inner, "gated": shape.inner}
                case ShortConvShape():
                    own = {"into": 3 * shape.width, "gated": shape.width}
                case DeltaShape():
                    channels = sum(shape.conv_parts)
                    own = {"into": channels + shape.inner + 2 * shape.n_heads, "convolved": channels}
                    own |= {"scanned": shape.inner, "gated": shape.inner}
            widths |= {name: max(widths[name], width) for name, width in own.items()}

        def made(name: str) -> Tensor:
            return zeros((rows, widths[name]), dtype if name == "gated" else torch.float32, device)

        return MixerBuffers(**{name: made(name) for name in widths})

    @property
    def named(self) -> dict[str, Tensor]:
        return {f"mixer.{field.name}": getattr(self, field.name) for field in fields(self)}

    def first(self, rows: int) -> MixerBuffers:
        """The first rows of each."""
        return MixerBuffers(**{field.name: getattr(self, field.name)[:rows] for field in fields(self)})


@dataclass(frozen=True, slots=True)
class ProductStage:
    name: str
    given: Tensor
    linear: Linear
    out: Tensor


@dataclass(frozen=True, slots=True)
class KernelStage:
    """A launch with the buffers that it reads and writes; `states`: those of its layer too."""

    name: str
    launch: Launch
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    weights: object = None
    states: bool = False


@dataclass(frozen=True, slots=True)
class MixerStages:
    """A block's stages between `into`, which the first product fills, and `gated`, which the last one takes."""

    into: Tensor
    stages: tuple[ProductStage | KernelStage, ...]
    gated: Tensor


def columns(buffer: Tensor, width: int) -> Tensor:
    """Rows of this width, one after the other, in the memory of a buffer whose rows are as wide or wider."""
    return buffer if width == buffer.shape[1] else buffer.view(-1)[: len(buffer) * width].view(len(buffer), width)


def states_of(memory: PagedMemory, layer: int) -> list[Tensor]:
    """The states of a layer, each [slots, ...]."""
    assert memory.states is not None
    return [state[:, 0] for state in memory.states.layers[layer]]


def with_factor(linear: Linear, factor: float) -> Linear:
    """A product whose input has a factor, as one whose output has: (c x W^T + b) s = (x W^T + b / c) c s."""
    if factor == 1:
        return linear
    bias = None if linear.bias is None else linear.bias / factor
    return Linear(linear.weight, bias, factor if linear.scale is None else linear.scale * factor)


def stages_of(
    mixer: Mixer, buffers: MixerBuffers, states: Sequence[Tensor], runs: Runs, kernels: Kernels
) -> MixerStages:
    """The stages of a block over the rows of these buffers."""
    match mixer:
        case MambaMixer():
            return _mamba(mixer, buffers, states, runs, kernels)
        case Mamba2Mixer():
            return _mamba2(mixer, buffers, states, runs, kernels)
        case ShortConvMixer():
            return _short_conv(mixer, buffers, states, runs, kernels)
        case DeltaMixer():
            return _delta_net(mixer, buffers, states, runs, kernels)


def _mamba(mixer: MambaMixer, b: MixerBuffers, states: Sequence[Tensor], runs: Runs, kernels: Kernels) -> MixerStages:
    s, (inputs, scanned) = mixer.shape, states
    into, convolved, steps, gated = (
        columns(buffer, width)
        for buffer, width in ((b.into, 2 * s.inner), (b.convolved, s.inner), (b.steps, s.inner), (b.gated, s.inner))
    )
    selected, low, bc = (
        columns(buffer, width)
        for buffer, width in ((b.selected, s.dt_rank + 2 * s.state), (b.low_steps, s.dt_rank), (b.bc, 2 * s.state))
    )
    u, gate = into.split(s.inner, 1)
    conv = kernels.conv_runs(u, convolved, inputs, mixer.conv.weight, mixer.conv.bias, runs)
    parts = kernels.selected_runs(selected, low, bc, mixer.norms, runs)
    scan = kernels.selective_runs(convolved, steps, bc, gate, gated, scanned, mixer.decay, s, runs)
    return MixerStages(
        into,
        (
            KernelStage("conv", conv, (into,), (convolved,), mixer.conv, states=True),
            ProductStage("select", convolved, mixer.select, selected),
            KernelStage("selected", parts, (selected,), (low, bc), mixer.norms),
            ProductStage("step", low, mixer.step, steps),
            KernelStage("scan", scan, (into, convolved, steps, bc), (gated,), mixer.decay, states=True),
        ),
        gated,
    )


def _mamba2(mixer: Mamba2Mixer, b: MixerBuffers, states: Sequence[Tensor], runs: Runs, kernels: Kernels) -> MixerStages:
    s, (inputs, carried) = mixer.shape, states
    into = columns(b.into, s.inner + s.conv_width + s.n_heads)
    convolved, scanned, gated = (
        columns(buffer, width)
        for buffer, width in ((b.convolved, s.conv_width), (b.scanned, s.inner), (b.gated, s.inner))
    )
    gate, u, dt = into.split([s.inner, s.conv_width, s.n_heads], 1)
    conv = kernels.conv_runs(u, convolved, inputs, mixer.conv.weight, mixer.conv.bias, runs)
    scan = kernels.ssd_runs(convolved, dt, scanned, carried, mixer.decay, s, runs)
    opened = kernels.gate_runs(scanned, gate, gated, mixer.norm, mixer.norm_eps, s.norm_first, runs)
    return MixerStages(
        into,
        (
            KernelStage("conv", conv, (into,), (convolved,), mixer.conv, states=True),
            KernelStage("scan", scan, (into, convolved), (scanned,), mixer.decay, states=True),
            KernelStage("gate", opened, (into, scanned), (gated,), mixer.norm),
        ),
        gated,
    )


def _short_conv(
    mixer: ShortConvMixer, b: MixerBuffers, states: Sequence[Tensor], runs: Runs, kernels: Kernels
) -> MixerStages:
    width, (inputs,) = mixer.shape.width, states
    into, gated = columns(b.into, 3 * width), columns(b.gated, width)
    conv = kernels.short_conv_runs(into, gated, inputs, mixer.conv.weight, mixer.conv.bias, runs)
    return MixerStages(into, (KernelStage("conv", conv, (into,), (gated,), mixer.conv, states=True),), gated)


def _delta_net(
    mixer: DeltaMixer, b: MixerBuffers, states: Sequence[Tensor], runs: Runs, kernels: Kernels
) -> MixerStages:
    s, (inputs, carried) = mixer.shape, states
    channels = sum(s.conv_parts)
    into = columns(b.into, channels + s.inner + 2 * s.n_heads)
    convolved, scanned, gated = (
        columns(buffer, width) for buffer, width in ((b.convolved, channels), (b.scanned, s.inner), (b.gated, s.inner))
    )
    u, gate, beta_alpha = torch.split(into, [channels, s.inner, 2 * s.n_heads], 1)
    conv = kernels.conv_runs(u, convolved, inputs, mixer.conv.weight, mixer.conv.bias, runs)
    rule = kernels.delta_runs(convolved, beta_alpha, scanned, carried, mixer.decay, s, runs)
    opened = kernels.gate_runs(scanned, gate, gated, mixer.norm.weight[None], mixer.norm.eps, True, runs)
    return MixerStages(
        into,
        (
            KernelStage("conv", conv, (into,), (convolved,), mixer.conv, states=True),
            KernelStage("delta", rule, (into, convolved), (scanned,), mixer.decay, states=True),
            KernelStage("gate", opened, (into, scanned), (gated,), mixer.norm),
        ),
        gated,
    )
