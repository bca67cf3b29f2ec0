"""The one table of ops: which function computes each. Models call nothing else; the twins serve every device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ostinato.backends.torch.ops.activation import activate_torch, gated_torch
from ostinato.backends.torch.ops.attention import attention_torch
from ostinato.backends.torch.ops.causal_conv import causal_conv_torch
from ostinato.backends.torch.ops.delta_blocks import delta_blocks_torch
from ostinato.backends.torch.ops.experts import experts_torch, route_torch
from ostinato.backends.torch.ops.gated_norm import gated_norm_torch
from ostinato.backends.torch.ops.layer_norm import layer_norm_torch
from ostinato.backends.torch.ops.linear import linear_torch
from ostinato.backends.torch.ops.rms_norm import rms_norm_torch
from ostinato.backends.torch.ops.rope import rope_torch
from ostinato.backends.torch.ops.selective_scan import selective_scan_torch
from ostinato.backends.torch.ops.ssd_scan import ssd_scan_torch
from ostinato.backends.torch.weight import Weight


@dataclass(frozen=True, slots=True)
class Ops:
    """Every op a model or the sampler may call."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm_torch
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = layer_norm_torch
    linear: Callable[[Tensor, Weight, Tensor | None], Tensor] = linear_torch
    rope: Callable[..., Tensor] = rope_torch
    attention: Callable[..., Tensor] = attention_torch
    activate: Callable[..., Tensor] = activate_torch
    gated: Callable[..., Tensor] = gated_torch
    route: Callable[..., tuple[Tensor, Tensor]] = route_torch
    experts: Callable[..., Tensor] = experts_torch
    causal_conv: Callable[[Tensor, Tensor, Tensor, Tensor | None, int], tuple[Tensor, Tensor]] = causal_conv_torch
    selective_scan: Callable[..., tuple[Tensor, Tensor]] = selective_scan_torch
    ssd_scan: Callable[..., tuple[Tensor, Tensor]] = ssd_scan_torch
    delta_rule: Callable[..., tuple[Tensor, Tensor]] = delta_blocks_torch
    gated_norm: Callable[[Tensor, Tensor, Tensor, float, bool], Tensor] = gated_norm_torch


TWINS: Final = Ops()
