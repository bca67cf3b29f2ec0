"""From logits to a token: penalties and bias, then temperature, top-k, top-p and min-p, then one sample.

The order is: repetition, presence and frequency penalties, logit bias, banned ids; a row of temperature 0 takes
the largest (the lowest id of equals); any other row divides by its temperature, keeps its top-k, of these the
smallest set that reaches top-p, of these what reaches min-p times the largest, and samples by `philox.uniform_torch`.
Log-probabilities are the model's own: taken before any of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.backends.torch.ops.philox import uniform_torch


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The sampling settings of each row; [rows] unless said. Values are already settled, nothing is None."""

    temperature: Tensor
    top_k: Tensor  # int64; 0 keeps all
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seed: Tensor  # int64
    position: Tensor  # int64, of the token that is being chosen
    in_prompt: Tensor  # bool [rows, vocab]
    made: Tensor  # int32 [rows, vocab], how often each token was generated
    bias: Tensor  # float32 [rows, vocab]; -inf bans


def penalise_torch(logits: Tensor, rows: SampleRows) -> Tensor:
    """Repetition divides (or multiplies a negative logit) once for any token seen; the others subtract by count."""
    seen = rows.in_prompt | (rows.made > 0)
    factor = torch.where(seen, rows.repetition.unsqueeze(-1), torch.ones_like(logits))
    out = torch.where(logits > 0, logits / factor, logits * factor)
    out = out - rows.presence.unsqueeze(-1) * (rows.made > 0) - rows.frequency.unsqueeze(-1) * rows.made
    return out + rows.bias


def sample_filtered_torch(logits: Tensor, rows: SampleRows) -> Tensor:
    """One sample per row of logits [rows, vocab] from the ids that its filters keep; int64 [rows]."""
    safe_temperature = rows.temperature.clamp(min=1e-6).unsqueeze(-1)
    ranked, order = (logits / safe_temperature).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = torch.where(rows.top_k > 0, rows.top_k, logits.shape[-1]).unsqueeze(-1)
    # float64 from here: the running sum then gives the same sample on every device, whatever its order of adding.
    share = ranked.double().masked_fill(rank >= top_k, float("-inf")).softmax(-1)
    before = share.cumsum(-1) - share
    kept = (before < rows.top_p.unsqueeze(-1)) & (share >= rows.min_p.unsqueeze(-1) * share[:, :1]) & (share > 0)
    kept[:, 0] = True
    cumulative = (share * kept).cumsum(-1)
    target = uniform_torch(rows.seed, rows.position).double().unsqueeze(-1) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True)
    last_kept = (kept * rank).amax(-1, keepdim=True)
    return order.gather(-1, torch.minimum(place, last_kept)).squeeze(-1)
