"""Log-probabilities of rows of logits: of each row's target, and the most likely tokens beside it.

A log-probability is logit - log(sum of e^logit over the whole vocabulary), in float32. The most likely are looked for
among the first n_tokens ids, the first of equals first. `triton/logprobs.py` is the kernel, bound by its reads.
"""

from torch import Tensor


def logprobs_torch(
    logits: Tensor, targets: Tensor, logprobs: Tensor, top_ids: Tensor, top_logprobs: Tensor, *, n_tokens: int
) -> None:
    """logits float32 [rows, vocab], targets int32 [rows] to logprobs float32 [rows], and to top_ids int32 and
    top_logprobs float32 [rows, top]."""
    found = logits.log_softmax(-1)
    logprobs.copy_(found.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1))
    left = found[:, :n_tokens].clone() if top_ids.shape[1] else found
    for place in range(top_ids.shape[1]):
        best = left.argmax(-1, keepdim=True)  # the first of equals
        top_ids[:, place : place + 1].copy_(best)
        top_logprobs[:, place : place + 1].copy_(left.gather(-1, best))
        left.scatter_(-1, best, float("-inf"))
