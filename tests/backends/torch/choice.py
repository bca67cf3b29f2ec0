"""One token per row by `ops/sample.py` as a whole: what the step's sampler is compared with."""

from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.backends.torch.ops.sample import SampleRows, penalise_torch, sample_filtered_torch


class SampledTokens(NamedTuple):
    """The token of each row, int64 [rows], and its float32 log-probability under the model."""

    token: Tensor
    logprob: Tensor


def sample_torch(logits: Tensor, rows: SampleRows) -> SampledTokens:
    """Choose one token per row of logits [rows, vocab]."""
    logits = logits.float()
    shaped = penalise_torch(logits, rows)
    token = shaped.argmax(-1)
    if bool((rows.temperature > 0).any()):
        token = torch.where(rows.temperature > 0, sample_filtered_torch(shaped, rows), token)
    logprob = logits.log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return SampledTokens(token, logprob)
