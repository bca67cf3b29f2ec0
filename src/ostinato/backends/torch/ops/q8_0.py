"""Q8_0 for the KV cache: blocks of 32 values share one float16 scale; each value is a signed byte."""

import torch
from torch import Tensor

BLOCK = 32


def quantize_q8_0_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., width], width a multiple of 32, to bytes int8 [..., width] and scales float16 [..., width / 32]."""
    blocks = x.float().view(*x.shape[:-1], -1, BLOCK)
    scale = (blocks.abs().amax(-1) / 127).half()
    divisor = torch.where(scale > 0, scale.float(), 1.0).unsqueeze(-1)
    return (blocks / divisor).round().clamp(-127, 127).to(torch.int8).flatten(-2), scale


def dequantize_q8_0_torch(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The other way: int8 [..., width] and float16 [..., width / 32] to [..., width] in dtype."""
    blocks = values.view(*scales.shape, BLOCK).float() * scales.float().unsqueeze(-1)
    return blocks.flatten(-2).to(dtype)
