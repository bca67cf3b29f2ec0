"""The sampler of a decode step, over the slot table: each row's token, its log-probability and the most likely ones.

token = sample(filter(shape(logits))) as `sample.py` defines it, with every setting read from the table's fields; the
twin of `triton/sample.py`. logits float32 [rows, vocab]; tokens int32, log-probabilities float32; sums that place a
sample are float64. Written in place: `chosen`, `chosen_logprob`, `top_ids`, `top_logprobs`, each for rows below n_rows.
On the CPU one pass over a row for its largest and one for its log-sum bound the speed; a sampled row adds a few.
Rows go one by one, so that no bit of a row depends on its neighbours.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from ostinato.backends.torch.ops.philox import uniform_torch
from ostinato.backends.torch.ops.sample import SampleRows, penalise_torch, sample_filtered_torch
from ostinato.loop.layout import SampledRows

# How far below the largest scaled logit sampling ranks ids, step by step, before it ranks the whole vocabulary.
_REACHES: Final = (6.0, 12.0, 24.0)


class SlotFields(Protocol):
    """The slot table or the admissions, by the names of `loop/layout.py`; a dict of tensors will do."""

    def __getitem__(self, name: str, /) -> Tensor: ...


def sample_step_torch(
    logits: Tensor,
    table: SlotFields,
    rows: SampledRows,
    *,
    n_tokens: int,
    first: bool = False,
) -> None:
    """Choose for each row r below n_rows by the settings of slot row_slot[r]; tensors of host memory.

    logits [rows, vocab] float32. Ids from `n_tokens` on are never chosen. `first` says that nothing was made yet:
    `made` and `counts` are then not read, so that `table` may be the admissions. Of `top_ids` and `top_logprobs`
    [rows, MAX_TOP] the first n_logprobs of a row are written. Where all is banned, id 0 is chosen.
    """
    for row in range(int(rows.n_rows)):
        slot = int(rows.row_slot[row])
        raw = logits[row]
        shaped = _shaped(raw, table, slot, n_tokens, first)
        if float(table["temperature"][slot]) > 0:
            token = _sampled_token(shaped, table, slot, int(rows.position[slot]) + rows.offset)
        else:
            token = _first_largest(shaped)
        # Not logsumexp: this one adds up in an order that does not know the number of threads.
        logprobs = raw.log_softmax(-1)
        rows.chosen[row] = token
        rows.chosen_logprob[row] = logprobs[token]
        if n_top := min(int(table["n_logprobs"][slot]), raw.shape[0]):
            ids = _ranked_top(raw, n_top)
            rows.top_ids[row, :n_top] = ids
            rows.top_logprobs[row, :n_top] = logprobs[ids]


def _shaped(raw: Tensor, table: SlotFields, slot: int, n_tokens: int, first: bool) -> Tensor:
    """The logits of ids below n_tokens after penalties, bias and bans: `raw`'s own memory where nothing applies."""
    made = 0 if first else int(table["made"][slot])
    penalised, n_bias = bool(table["penalised"][slot]), int(table["n_bias"][slot])
    waits, constrained = made < int(table["min_tokens"][slot]), bool(table["constrained"][slot])
    shaped = raw[:n_tokens]
    if not (penalised or n_bias or waits or constrained):
        return shaped
    shaped = shaped.clone()
    if penalised or n_bias:
        _penalise(shaped, table, slot, penalised, n_bias, first)
    if waits:
        stops = table["stop_ids"][slot, : int(table["n_stop"][slot])].long()
        shaped[stops[stops < n_tokens]] = float("-inf")
    if constrained:
        shaped.masked_fill_(~_bits(table["mask_bits"][slot], n_tokens), float("-inf"))
    return shaped


def _penalise(shaped: Tensor, table: SlotFields, slot: int, penalised: bool, n_bias: int, first: bool) -> None:
    """`penalise_torch` in place, over the ids that it can change: those seen and those with a bias."""
    n_tokens = shaped.shape[0]
    bias_ids = table["bias_ids"][slot, :n_bias].long()
    bias_values = table["bias_values"][slot, :n_bias]
    within = bias_ids < n_tokens
    bias_ids, bias_values = bias_ids[within], bias_values[within]
    counts = None if first or not penalised else table["counts"][slot, :n_tokens]
    in_prompt = _bits(table["prompt_bits"][slot], n_tokens) if penalised else None
    touched = torch.zeros(n_tokens, dtype=torch.bool)
    touched[bias_ids] = True
    if in_prompt is not None:
        touched |= in_prompt
    if counts is not None:
        touched |= counts > 0
    ids = _where(touched)
    bias = torch.zeros(n_tokens).index_add_(0, bias_ids, bias_values)[ids]
    made = counts[ids] if counts is not None else torch.zeros(ids.shape, dtype=torch.int32)
    seen = in_prompt[ids] if in_prompt is not None else torch.zeros(ids.shape, dtype=torch.bool)
    rows = _rows(table, slot, 0, penalised=penalised, in_prompt=seen, made=made, bias=bias)
    shaped[ids] = penalise_torch(shaped[ids].unsqueeze(0), rows)[0]


def _sampled_token(shaped: Tensor, table: SlotFields, slot: int, position: int) -> int:
    """`sample_filtered_torch`, ranking no more of the vocabulary than the sample can reach.

    What the filters keep is a run of the ranked ids from the first one on. So the ids within a reach of the largest,
    ranked, decide alone once one of them is not kept, or top-k has all it wants, or nothing is filtered and the sample
    falls among them. Sums are float64, where the order of adding does not change a sample.
    """
    nothing = torch.empty(0)
    rows = _rows(table, slot, position, penalised=False, in_prompt=nothing, made=nothing, bias=nothing)
    top_k, top_p, min_p = int(rows.top_k), float(rows.top_p), float(rows.min_p)
    scaled = shaped / rows.temperature.clamp(min=1e-6)
    largest = scaled.max()
    shares: Tensor | None = None
    for reach in _REACHES if bool(largest.isfinite()) else ():
        ids = _where(scaled >= largest - reach)
        if top_k and ids.shape[0] < top_k:
            continue
        if ids.shape[0] > shaped.shape[0] // 4:
            break  # ranking these is no cheaper than ranking all
        ranked, order = scaled[ids].sort(descending=True, stable=True)
        if top_k:
            share = ranked[:top_k].double().softmax(-1)
        else:
            shares = scaled.double().softmax(-1) if shares is None else shares
            share = shares[ids[order]]
        before = share.cumsum(-1) - share
        kept = (before < top_p) & (share >= min_p * share[0]) & (share > 0)
        kept[0] = True
        cumulative = (share * kept).cumsum(-1)
        all_known = bool(top_k) or not bool(kept.all())
        unfiltered = top_p >= 1 and min_p == 0
        total = cumulative[-1] if all_known else torch.ones((), dtype=torch.float64)
        target = uniform_torch(rows.seed, rows.position).double() * total
        if all_known or (unfiltered and bool(target < cumulative[-1])):
            place = min(int(torch.searchsorted(cumulative, target, right=True)), int(kept.sum()) - 1)
            return int(ids[order[place]])
    return int(sample_filtered_torch(shaped.unsqueeze(0), rows))


def _rows(
    table: SlotFields, slot: int, position: int, *, penalised: bool, in_prompt: Tensor, made: Tensor, bias: Tensor
) -> SampleRows:
    """The slot's settings as one row of `sample.py`; tensors over ids get the row's dimension here."""

    def one(name: str) -> Tensor:
        return table[name][slot : slot + 1]

    return SampleRows(
        temperature=one("temperature"),
        top_k=one("top_k").long(),
        top_p=one("top_p"),
        min_p=one("min_p"),
        repetition=one("repetition") if penalised else torch.ones(1),
        presence=one("presence") if penalised else torch.zeros(1),
        frequency=one("frequency") if penalised else torch.zeros(1),
        seed=one("seed"),
        position=torch.tensor([position]),
        in_prompt=in_prompt.unsqueeze(0),
        made=made.unsqueeze(0),
        bias=bias.unsqueeze(0),
    )


def _ranked_top(raw: Tensor, n_top: int) -> Tensor:
    """The ids of the n_top largest, largest first, the lowest id of equals first; int64."""
    least = raw.topk(n_top).values[-1]
    ids = _where(~(raw < least))  # NaN too; in id order, so that the stable sort settles ties
    return ids[raw[ids].sort(descending=True, stable=True).indices[:n_top]]


def _first_largest(values: Tensor) -> int:
    # numpy's, which gives the first of equals too: torch's takes ten times as long on one row.
    return int(values.numpy().argmax())


def _where(flags: Tensor) -> Tensor:
    """The places of True, ascending, int64."""
    return torch.from_numpy(np.flatnonzero(flags.numpy()))  # as above: torch's nonzero is several times slower


def _bits(words: Tensor, n: int) -> Tensor:
    """bool [n] from int32 words, the lowest bit of a word being the lowest id."""
    return torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), count=n, bitorder="little")).bool()
