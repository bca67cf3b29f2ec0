"""Attention of rows over cells: softmax(scale * q k^T, masked) v, heads in groups that share a key and value head."""

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [rows, heads, width] over k [cells, kv_heads, width] and v [cells, kv_heads, value width] gives
    [rows, heads, value width] in q.dtype.

    mask [rows, cells] is true where a row may attend; None: every row attends to every cell. A soft cap bounds the
    scores to +-softcap by tanh before the mask. `sinks` [heads] are scores of no cell: they take a share of each row's
    softmax and give nothing. Bound by reading k and v at few rows.
    """
    queries, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    plain = softcap is None and sinks is None
    if plain and len(q) == 1:
        # The heads of a group become rows of their shared key head, so that it is read once and not for each.
        together = q.reshape(1, k.shape[1], -1, q.shape[-1])
        out = F.scaled_dot_product_attention(together, keys, values, attn_mask=mask, scale=scale)
        return out.view(1, q.shape[1], -1)
    if plain:
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    else:
        out = _by_scores(queries, keys, values, mask, scale, softcap, sinks)
    return out.squeeze(0).transpose(0, 1)


def _by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    beside = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, beside), -1).softmax(-1)[..., :-1].to(v.dtype) @ v
