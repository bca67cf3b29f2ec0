"""From the last row of a prompt to its first token, in the table, by the step's own sampler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.kernels import Kernels, Launch, play
from ostinato.loop.layout import MAX_TOP, SampledRows, Tables


class FirstToken:
    """`head` computes logits float32 [1, vocab] from row [1, hidden]; both keep their memory."""

    def __init__(
        self,
        row: Tensor,
        logits: Tensor,
        head: Sequence[Launch],
        tables: Tables,
        n_tokens: int,
        kernels: Kernels,
    ) -> None:
        device = row.device
        self._row, self._table = row, tables.table
        self._slot = zeros((1,), torch.int32, device)
        self._made = {
            "token": zeros((1,), torch.int32, device),
            "logprob": zeros((1,), torch.float32, device),
            "top_ids": zeros((1, MAX_TOP), torch.int32, device),
            "top_logprobs": zeros((1, MAX_TOP), torch.float32, device),
        }
        # The admission is not in the table before the loop admits it: what it says is read where it was staged.
        given, one = tables.admissions, torch.ones(1, dtype=torch.int32, device=device)
        token, logprob, top_ids, top_logprobs = self._made.values()
        rows = SampledRows(one, self._slot, given["position"], token, logprob, top_ids, top_logprobs, offset=0)
        workspace = kernels.sample_workspace(1, logits.shape[1], device)
        sampling = kernels.sample(logits, given, workspace, rows, n_tokens=n_tokens, first=True)
        self.launches = (*head, *(launch for _, launch in sampling))

    def play(self) -> None:
        """Run the launches as they are: what warms them."""
        play(self.launches)

    def choose(self, slot: int, row: Tensor) -> None:
        """Choose for this slot from the hidden row [1, hidden]."""
        self._row.copy_(row)
        self._slot.fill_(slot)
        self.play()
        for name, made in self._made.items():
            self._table[f"first_{name}"][slot : slot + 1].copy_(made)
