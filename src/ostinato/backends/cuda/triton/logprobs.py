"""Log-probabilities of rows of logits: of each row's target, and the most likely tokens beside it.

Shapes are the twin's (`torch/ops/`). A program has a row. It reads the row once for the sum, and once more for each of
the most likely: those that follow the last one found, by value and then by id. A row's bits do not depend on the
others. Bound by its reads, which come from the cache behind the product that made the logits.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.backends.cuda.launch import TritonLaunch, checked

_BLOCK: Final = 4096  # logits that a program reads at once


def bind_logprobs(
    logits: Tensor, targets: Tensor, logprobs: Tensor, top_ids: Tensor, top_logprobs: Tensor, *, n_tokens: int
) -> TritonLaunch:
    """Check everything once and return the launch over all rows."""
    (rows, vocab), device, top = logits.shape, logits.device, top_ids.shape[1]
    checked("logits", logits, dtype=torch.float32, shape=(rows, vocab), device=device)
    checked("targets", targets, dtype=torch.int32, shape=(rows,), device=device)
    checked("logprobs", logprobs, dtype=torch.float32, shape=(rows,), device=device)
    if top:
        checked("top_ids", top_ids, dtype=torch.int32, shape=(rows, top), device=device)
        checked("top_logprobs", top_logprobs, dtype=torch.float32, shape=(rows, top), device=device)
    tops = (top_ids, top_logprobs) if top else (targets, logprobs)
    args = (logits, targets, logprobs, *tops, vocab, n_tokens, top)
    return TritonLaunch(logprobs_kernel, (rows,), args, {"BLOCK": _BLOCK, "num_warps": 8})


@triton.jit(do_not_specialize=["n_tokens", "n_top"])
def logprobs_kernel(
    logits, targets, logprobs, top_ids, top_logprobs, vocab, n_tokens, n_top, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_at = logits + row * vocab
    lane = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(x_at + start + lane, mask=start + lane < vocab, other=float("-inf"))
        higher = tl.maximum(tops, x)
        # A lane that has seen nothing yet stays as it is: no infinity is subtracted from itself.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        totals = totals * tl.exp(tops - level) + tl.exp(x - level)
        tops = higher
    most = tl.max(tops, 0)
    log_total = tl.log(tl.sum(totals * tl.exp(tops - most), 0))
    tl.store(logprobs + row, tl.load(x_at + tl.load(targets + row)) - most - log_total)

    last = most
    last_id = -1
    for place in range(n_top):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        ids = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n_tokens, BLOCK):
            at = start + lane
            x = tl.load(x_at + at, mask=at < n_tokens, other=float("-inf"))
            follows = (x < last) | ((x == last) & (at > last_id))
            ids = tl.where(follows & (x > best), at, ids)
            best = tl.where(follows, tl.maximum(best, x), best)
        last = tl.max(best, 0)
        last_id = tl.min(tl.where(best == last, ids, n_tokens - 1), 0)
        tl.store(top_ids + row * n_top + place, last_id)
        tl.store(top_logprobs + row * n_top + place, last - most - log_total)
