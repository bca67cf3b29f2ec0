"""Log-probabilities against their twin: ties, infinities, ids that no tokenizer has, and rows that do not matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ostinato.backends.cuda.triton.logprobs import bind_logprobs
from ostinato.backends.torch.ops.logprobs import logprobs_torch
from tests.backends.cuda.triton.test_attend import compile_launch


def given(rows: int, vocab: int, top: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=g) * 5
    targets = torch.randint(vocab, (rows,), generator=g, dtype=torch.int32)
    return logits, targets, torch.zeros(rows), torch.zeros(rows, top, dtype=torch.int32), torch.zeros(rows, top)


@pytest.mark.parametrize(("vocab", "top", "n_tokens"), [(131, 5, 128), (4096, 0, 4096), (9001, 3, 8191)])
def test_it_equals_the_twin(vocab: int, top: int, n_tokens: int) -> None:
    logits, targets, *out = given(3, vocab, top)
    logits[0, 7:12] = logits.max() + 1  # equals, of which the first comes first
    logits[1, ::2] = float("-inf")
    logits[2, n_tokens - 1 :] = logits.max() + 2  # beyond the tokenizer's, but for the first of them
    twin = [torch.zeros_like(one) for one in out]
    bind_logprobs(logits, targets, *out, n_tokens=n_tokens)()
    logprobs_torch(logits, targets, *twin, n_tokens=n_tokens)
    torch.testing.assert_close(out[0], twin[0], rtol=0, atol=5e-6)
    assert torch.equal(out[1], twin[1])
    torch.testing.assert_close(out[2], twin[2], rtol=0, atol=5e-6)
    if top:
        assert out[1][0].tolist() == list(range(7, 7 + top))
        assert int(out[1][2, 0]) == n_tokens - 1


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    logits, targets, *out = given(4, 5000, 2)
    bind_logprobs(logits, targets, *out, n_tokens=5000)()
    for row in range(4):
        alone = [torch.zeros_like(one[:1]) for one in out]
        bind_logprobs(logits[row : row + 1], targets[row : row + 1], *alone, n_tokens=5000)()
        assert all(torch.equal(one, every[row : row + 1]) for one, every in zip(alone, out, strict=True))


def compile_all() -> None:
    logits, targets, *out = given(2, 128, 2)
    compile_launch(bind_logprobs(logits, targets, *out, n_tokens=100))
