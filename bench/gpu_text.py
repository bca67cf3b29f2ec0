"""What a loop says of a text that is fed to it token by token, and how far apart two loops are by that.

The text is this project's own. Tokens are forced: whatever a step chose, the next one takes in the text's, so that
every loop sees the same, and its logits can be compared position by position.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bench.gpu_frame import ROOT, Record
from ostinato.engine.driver import LoopDriver
from ostinato.errors import InternalError
from ostinato.text.tokenizer import Tokenizer

N_PIECES, N_PREDICTED = 8, 128  # together 1,024 positions


def own_text() -> str:
    """README and documentation of this checkout, in order."""
    return "\n\n".join(path.read_text("utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))


def pieces_of(tokenizer: Tokenizer, n: int, length: int, text: str | None = None) -> list[list[int]]:
    """So many stretches of the text, one behind the other, of `length` tokens with the one that begins a text."""
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids, own = tokenizer.encode(own_text() if text is None else text, bos=False), length - len(first)
    if len(ids) < n * own:
        raise InternalError(f"the text has {len(ids)} tokens, too few for {n} pieces of {own}")
    return [[*first, *ids[at : at + own]] for at in range(0, n * own, own)]


def digest(pieces: Sequence[Sequence[int]]) -> str:
    """Figures over different texts are not comparable: this tells whether it was the same one."""
    return hashlib.sha256(repr([list(piece) for piece in pieces]).encode()).hexdigest()[:12]


def heard(driver: LoopDriver, pieces: Sequence[Sequence[int]], n_tokens: int) -> Tensor:
    """Feed a piece to each slot, the first token as a prompt and all others but the last step by step: what is said
    of each piece from its third token on, as float32 logits of the ids that the tokenizer knows, [steps, pieces, ids].
    """
    runner, n = driver.runner, len(pieces)
    lengths = {len(piece) for piece in pieces}
    if len(lengths) != 1 or min(lengths) < 3:
        raise InternalError(f"pieces of {sorted(lengths)} tokens cannot be fed together; they are of one length")
    token, n_steps = runner.tables.table["token"], lengths.pop() - 2
    generations = [driver.admit(slot, piece[:1], most=n_steps + 2) for slot, piece in enumerate(pieces)]
    driver.step()  # admits
    driver.synchronize()
    rows = runner.tables.table["row_slot"][:n].tolist()
    if rows != list(range(n)):
        raise InternalError(f"rows {rows} serve the slots, and not each its own")
    forced = torch.tensor(pieces, dtype=token.dtype)
    said = []
    for step in range(1, n_steps + 1):
        token[:n].copy_(forced[:, step])
        driver.synchronize()
        driver.step()
        said.append(runner.plan.buffer("logits").tensor[:n, :n_tokens].float().clone())
    driver.synchronize()  # the last of them is copied on torch's own stream, and the next step overwrites what it reads
    for slot, generation in enumerate(generations):
        runner.host.cancel(slot, generation)
    while driver.step():
        pass
    driver.forget()
    return torch.stack(said)


def divergences(expected: Tensor, found: Tensor) -> Tensor:
    """Kullback and Leibler's, of each row of logits from the one expected there, in nats; float64."""
    log_p, log_q = (rows.double().log_softmax(-1) for rows in (expected, found))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def surprise(logits: Tensor, tokens: Tensor) -> Tensor:
    """How unlikely each row's logits make its token: its negative log-likelihood, float64."""
    return -logits.double().log_softmax(-1).gather(-1, tokens[..., None].long())[..., 0]


def perplexity(logits: Tensor, pieces: Sequence[Sequence[int]]) -> float:
    """Of every piece from its third token on, by what was `heard`."""
    wanted = torch.tensor(pieces, device=logits.device).T[2:]
    lost = [surprise(rows, tokens).sum() for rows, tokens in zip(logits, wanted, strict=True)]
    return math.exp(min(700.0, float(torch.stack(lost).sum()) / wanted.numel()))


def apart(expected: Tensor, found: Tensor) -> Record:
    """How far a loop's logits are from another's: divergence, and how often their arg-max differs."""
    kl = torch.stack([divergences(one, other) for one, other in zip(expected, found, strict=True)])  # step by step
    differs = (expected.argmax(-1) != found.argmax(-1)).double().mean()
    return {"kl": float(kl.mean()), "kl_most": float(kl.max()), "differs": float(differs)}


def of_text(logits: Tensor, pieces: Sequence[Sequence[int]], expected: Tensor | None = None) -> Record:
    """A loop's figures over the text, beside those of the one it is compared with."""
    figures = {"perplexity": perplexity(logits, pieces)}
    return figures if expected is None else {**figures, **apart(expected, logits)}
