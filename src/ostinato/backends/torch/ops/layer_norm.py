"""Layer norm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm_torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise each row of x [..., width], then scale and shift by weight and bias [width]; float32 inside."""
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps).to(x.dtype)
