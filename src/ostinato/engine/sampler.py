"""One request's side of sampling: its settled values as tensors, and the counts that its penalties need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.torch.model import Model
from ostinato.backends.torch.ops.sample import SampleRows
from ostinato.backends.torch.table import Ops
from ostinato.options import Sampling


class SampledToken(NamedTuple):
    """A chosen token, its log-probability under the model, and the most likely ones where they were asked for."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Sampler:
    """Chooses the tokens of one request, one after the other; mutable, because it counts what it chose."""

    ops: Ops
    sampling: Sampling
    rows: SampleRows
    banned_at_first: Tensor
    n_made: int = 0

    @classmethod
    def of(cls, sampling: Sampling, prompt: Sequence[int], ends: Iterable[int], model: Model, n_tokens: int) -> Sampler:
        """A sampler whose `sampling` is settled (nothing it draws with is None); `ends` wait for min_tokens.

        Ids from `n_tokens` on, which no tokenizer can show, are never chosen.
        """
        vocab, device = model.shape.vocab, model.device
        sampling.check_ids(vocab)

        def one(value: float | None, dtype: torch.dtype = torch.float32) -> Tensor:
            assert value is not None  # settled
            return torch.tensor([value], dtype=dtype, device=device)

        in_prompt = torch.zeros((1, vocab), dtype=torch.bool, device=device)
        in_prompt[0, torch.tensor(prompt, device=device)] = True
        bias = torch.zeros((1, vocab), device=device)
        bias[0, n_tokens:] = float("-inf")
        for token, value in sampling.logit_bias.items():
            bias[0, token] += value
        rows = SampleRows(
            temperature=one(sampling.temperature),
            top_k=one(sampling.top_k, torch.int64),
            top_p=one(sampling.top_p),
            min_p=one(sampling.min_p),
            repetition=one(sampling.repetition_penalty),
            presence=one(sampling.presence_penalty),
            frequency=one(sampling.frequency_penalty),
            seed=one(sampling.seed, torch.int64),
            position=one(len(prompt), torch.int64),
            in_prompt=in_prompt,
            made=torch.zeros((1, vocab), dtype=torch.int32, device=device),
            bias=bias,
        )
        waiting = sorted(token for token in ends if token < vocab)
        return cls(model.ops, sampling, rows, torch.tensor(waiting, dtype=torch.int64, device=device))

    def choose(self, logits: Tensor, allowed: np.ndarray | None = None) -> SampledToken:
        """The next token from logits [1, vocab]; `allowed` has a bit for each id that it may be, int32 words."""
        rows = self.rows
        if allowed is not None:
            bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: logits.shape[-1]]
            banned = torch.from_numpy(bits == 0).to(logits.device).unsqueeze(0)
            rows = replace(rows, bias=rows.bias.masked_fill(banned, float("-inf")))
        if self.n_made < self.sampling.min_tokens:
            rows = replace(rows, bias=rows.bias.index_fill(1, self.banned_at_first, float("-inf")))
        chosen = self.ops.sample(logits, rows)
        token = int(chosen.token)
        self.n_made += 1
        self.rows.made[0, token] += 1
        self.rows.position.add_(1)
        return SampledToken(token, float(chosen.logprob), self._top(logits))

    def _top(self, logits: Tensor) -> tuple[tuple[int, float], ...]:
        wanted = self.sampling.logprobs
        if not wanted:
            return ()
        values, ids = logits.log_softmax(-1)[0].topk(min(wanted, logits.shape[-1]))
        return tuple(zip(ids.tolist(), values.tolist(), strict=True))
