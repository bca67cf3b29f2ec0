"""Causal convolution, each channel alone: y[i] = bias + weight[0] x[i - k + 1] + ... + weight[k - 1] x[i].

The inputs before the first row are the carried state, so a sequence may be cut anywhere.
"""

import torch
from torch import Tensor


def causal_conv_torch(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, n_planes: int
) -> tuple[Tensor, Tensor]:
    """x [seqs, t, channels] after state [seqs, channels, k - 1], by weight [channels, k] and bias [channels] or None.

    Gives y, shaped and typed as x, and the states after the last min(t, n_planes) rows, float32
    [seqs, planes, channels, k - 1], the newest first. State and sums are float32; the taps are added in order,
    so that a row's bits do not depend on where the sequence was cut.
    """
    t, kernel = x.shape[1], weight.shape[1]
    line = torch.cat((state.transpose(1, 2), x.float()), 1)  # [seqs, k - 1 + t, channels]
    y = torch.zeros_like(line[:, :t]) if bias is None else bias.float().expand(len(x), t, -1)
    for tap in range(kernel):
        y = torch.addcmul(y, line[:, tap : tap + t], weight[:, tap].float())
    ends = range(t, t - min(t, n_planes), -1)
    planes = torch.stack([line[:, end : end + kernel - 1].transpose(1, 2) for end in ends], 1)
    return y.to(x.dtype), planes
