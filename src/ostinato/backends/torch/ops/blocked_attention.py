"""Attention of a prompt's chunk over its sequence, in blocks of the past: softmax(scale * q k^T, masked) v.

The past is walked in blocks of BLOCK positions that begin at multiples of it, with a running maximum and sum, so a
row's bits do not depend on where its chunk began, as long as every chunk has the same number of rows. A block that a
row may not see changes nothing of it. Scores and sums are float32. Bound by its two products. Each block is read when
its turn comes, so that what is needed beside keys and values does not grow with them (E-36).
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ostinato.models.shape import AttentionShape

BLOCK: Final = 256
Past = Callable[[int, int], tuple[Tensor, Tensor]]  # keys and values of positions [first, stop), [n, kv_heads, width]


def blocked_attention_torch(
    q: Tensor,
    past: Past,
    n_past: int,
    shape: AttentionShape,
    *,
    start: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [rows, heads, width], row i at position start + i, over the keys and values of `n_past` positions from 0 on.

    Gives [rows, heads, value width] in q.dtype. Rows beyond the last position are padding and come out as numbers
    without meaning. `sinks` [heads] are as in `attention_torch`.
    """
    rows, heads, width = q.shape
    group, kv_heads, window = shape.group, shape.n_kv_heads, shape.window
    # The heads of a group are rows of their key head: [kv_heads, rows * group, width].
    queries = q.view(rows, kv_heads, group, width).permute(1, 0, 2, 3).reshape(kv_heads, rows * group, width)
    at = torch.arange(start, start + rows, device=q.device).repeat_interleave(group).unsqueeze(-1)
    top = torch.full((kv_heads, rows * group, 1), float("-inf"), device=q.device)
    if sinks is not None:  # the first score of each row, which stands for no value
        top = sinks.float().view(kv_heads, 1, group).expand(-1, rows, -1).reshape(kv_heads, rows * group, 1)
    total = torch.zeros_like(top) if sinks is None else torch.ones_like(top)
    mixed = torch.zeros((kv_heads, rows * group, shape.value_width), device=q.device)
    for first in range(0, n_past, BLOCK):
        if window is not None and first + BLOCK <= start + 1 - window:
            continue  # out of every row's window
        keys, values = map(_whole, past(first, min(first + BLOCK, n_past)))
        scores = torch.bmm(queries, keys.transpose(1, 2)).float() * shape.query_scale
        if shape.softcap is not None:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        there = torch.arange(first, first + BLOCK, device=q.device)
        hidden = there > at if window is None else (there > at) | (at - there >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet has no maximum to measure from: 0 will do, its weights are all 0.
        base = higher.masked_fill(higher == float("-inf"), 0.0)
        shares, fade = (scores - base).exp(), (top - base).exp()
        total = total * fade + shares.sum(-1, keepdim=True)
        mixed = mixed * fade + torch.bmm(shares.to(q.dtype), values).float()
        top = higher
    out = (mixed / total).view(kv_heads, rows, group, -1)
    return out.permute(1, 0, 2, 3).reshape(rows, heads, -1).to(q.dtype)


def _whole(piece: Tensor) -> Tensor:
    """Positions of keys or values as [kv_heads, BLOCK, width]; zeros where there are none yet."""
    if len(piece) < BLOCK:
        piece = torch.cat((piece, piece.new_zeros(BLOCK - len(piece), *piece.shape[1:])))
    return piece.transpose(0, 1)
