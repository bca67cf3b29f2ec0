"""Checks a batch and fills in what the caller left out (rules S-1 to S-20); decoder and encoder both start here.

The checks run in the written order and the first failure is raised (G-7); those about positions are in
`continuity.py`. The caller's arrays are only read, and so is memory, through the two methods of `MemoryView`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ostinato.cache.sequences import MAX_SEQ, Ints
from ostinato.decoder.batch.batch import Batch, as_array, length, listed_ids, misshapen, whole_numbers
from ostinato.decoder.batch.clean import CleanBatch
from ostinato.decoder.batch.continuity import Remembered, Spans, check_coupling, check_jumps, check_steps, check_walk
from ostinato.decoder.batch.entries import Entries, Sets
from ostinato.errors import InvalidBatch

__all__ = ["CleanBatch", "MemoryView", "sanitize"]


class MemoryView(Protocol):
    """The sanitizer's view of memory: the first and last position of a sequence, None when it has none."""

    def pos_min(self, s: int, /) -> int | None: ...

    def pos_max(self, s: int, /) -> int | None: ...


def sanitize(
    batch: Batch,
    *,
    n_vocab: int,
    n_seq_limit: int,
    output_all: bool = False,
    n_pos_per_embd: int = 1,
    memory: MemoryView | None = None,
) -> CleanBatch:
    """The batch with every field present; InvalidBatch where a rule is broken.

    `n_seq_limit`: sequence ids are below it (C-4). `output_all`: every token is an output (S-20).
    `n_pos_per_embd`: position dimensions of the model. `memory`: the positions decoded before.
    """
    n_tokens = _count(batch)
    if n_seq_limit > MAX_SEQ:
        raise InvalidBatch(f"a limit of {n_seq_limit} sequences is above {MAX_SEQ}", reason="n_seq_max")  # S-3
    token = None if batch.token is None else _of_tokens("token", _tokens(batch.token, n_vocab), n_tokens)
    embd, listed = _rows(batch, n_tokens), _ids(batch, n_tokens)
    given = _positions(batch, n_tokens, 1 if token is not None else n_pos_per_embd)
    flags = None if batch.output is None else _of_tokens("output", as_array("output", batch.output), n_tokens)
    segment = None
    if batch.segment is not None:
        segment = _of_tokens("segment", whole_numbers("segment", batch.segment), n_tokens)
    if listed is not None:
        _check_ids(*listed, n_seq_limit)
    if given is not None:
        _check_not_negative(given[0])
    entries = Entries.of(*(listed or (np.zeros(n_tokens, np.int64), np.ones(n_tokens, np.int64))))  # S-8
    sets = entries.sets()
    remembered = _remembered(entries, memory)
    pos = _generated(entries, sets, remembered.next_pos)[None] if given is None else given
    spans = Spans.of(entries, pos[0])
    if n_pos_per_embd > 1:
        check_jumps(entries, spans, remembered, repeats=token is None)
    else:
        check_steps(entries, spans, remembered)
    check_coupling(entries, remembered)
    check_walk(entries, sets, spans)
    return CleanBatch(
        token=token,
        embd=embd,
        pos=pos[0] if n_pos_per_embd == 1 else np.broadcast_to(pos, (n_pos_per_embd, n_tokens)).copy(),
        seq_id=entries.ids,
        seq_start=entries.start,
        set_of=sets.of,
        sets=sets.masks,
        output=_outputs(flags, n_tokens, output_all),
        spans=spans.by_id(entries),
        segment=segment,
    )


def _of_tokens(name: str, values: NDArray[Any], n_tokens: int) -> NDArray[Any]:
    """S-5: one value for each token."""
    if values.shape != (n_tokens,):
        raise misshapen(f"{name} has the shape {values.shape}, not ({n_tokens},)")
    return values


def _count(batch: Batch) -> int:
    """S-2: how many tokens there are; at least one."""
    given = batch.token if batch.token is not None else batch.embd
    if given is None:
        raise InvalidBatch("the batch has neither tokens nor embeddings", reason="empty")  # S-2
    n_tokens = length("token" if batch.embd is None else "embd", given) if batch.n_tokens is None else batch.n_tokens
    if n_tokens < 1:
        raise InvalidBatch("the batch has no tokens", reason="empty")  # S-2
    return n_tokens


def _tokens(given: ArrayLike, n_vocab: int) -> Ints:
    """S-4: token ids of the vocabulary."""
    token = whole_numbers("token", given)
    if token.size and (token.min() < 0 or token.max() >= n_vocab):
        index = int(((token < 0) | (token >= n_vocab)).argmax())
        what = f"id {token.flat[index]} is outside the vocabulary of {n_vocab}"  # S-4
        raise InvalidBatch.of_token(index, what, "token_range")
    return token


def _rows(batch: Batch, n_tokens: int) -> NDArray[Any] | None:
    if batch.embd is None:
        return None
    embd = as_array("embd", batch.embd)
    if embd.ndim != 2 or len(embd) != n_tokens:
        raise misshapen(f"embd has the shape {embd.shape}, not ({n_tokens}, width)")
    return embd


def _ids(batch: Batch, n_tokens: int) -> tuple[Ints, Ints] | None:
    if batch.seq_id is None:
        if batch.n_seq_id is not None:
            raise misshapen("n_seq_id is given without seq_id")
        return None
    ids, counts = listed_ids(batch.seq_id, batch.n_seq_id)
    if len(counts) != n_tokens:
        raise misshapen(f"seq_id lists the sequences of {len(counts)} tokens, not of {n_tokens}")
    return ids, counts


def _positions(batch: Batch, n_tokens: int, n_dims: int) -> Ints | None:
    """Positions by dimension, [n_dims, n]; flat input is dimension-major."""
    if batch.pos is None:
        return None
    pos = whole_numbers("pos", batch.pos)
    if pos.shape not in ((n_dims * n_tokens,), (n_dims, n_tokens)):
        raise misshapen(f"pos has the shape {pos.shape}, not ({n_dims * n_tokens},)")
    return pos.reshape(n_dims, n_tokens)


def _check_ids(ids: Ints, counts: Ints, limit: int) -> None:
    """S-6: every token has ids, all in range, none twice; the first token that fails decides, by its first failure."""
    if counts.min() == counts.max() == 1 and ids.min() >= 0 and ids.max() < limit:
        return
    owner = np.repeat(np.arange(len(counts)), counts)
    legal = (ids >= 0) & (ids < limit)
    keys = np.sort((owner * MAX_SEQ + ids)[legal])
    # In the order of the rule, so that the earliest check wins where one token fails several.
    failures = (
        ("seq_empty", np.flatnonzero(counts == 0)),
        ("seq_range", owner[~legal]),
        ("seq_duplicate", keys[1:][keys[1:] == keys[:-1]] // MAX_SEQ),
    )
    found = [(int(tokens[0]), reason) for reason, tokens in failures if len(tokens)]
    if not found:
        return
    index, reason = min(found, key=lambda failure: failure[0])
    listed = ids[owner == index].tolist()
    told = {
        "seq_empty": "belongs to no sequence",
        "seq_range": f"sequence ids {listed} must be from 0 to {limit - 1}",
        "seq_duplicate": f"sequence ids {listed} repeat",
    }
    raise InvalidBatch.of_token(index, told[reason], reason)  # S-6


def _check_not_negative(pos: Ints) -> None:
    if pos.min() < 0:
        index = int((pos < 0).argmax())
        raise InvalidBatch.of_token(index, f"position {pos[index]} is negative", "pos_negative")  # S-7


def _remembered(entries: Entries, memory: MemoryView | None) -> Remembered:
    """The positions in memory of the batch's sequences; without a view, memory counts as empty."""
    return Remembered.of([None if memory is None else _extremes(memory, s) for s in entries.unique.tolist()])


def _extremes(memory: MemoryView, s: int) -> tuple[int, int] | None:
    # Without a last position the sequence counts as empty, even where a part of memory has a first one (HY-6).
    last = memory.pos_max(s)
    first = None if last is None else memory.pos_min(s)
    return None if last is None or first is None else (first, last)


def _generated(entries: Entries, sets: Sets, next_pos: Ints) -> Ints:
    """S-9: the positions of each sequence count up from `next_pos`, [sequences]."""
    if entries.has_coupling:
        return _walked(entries, sets, next_pos)
    pos = np.empty(entries.n_tokens, np.int64)
    pos[entries.tokens] = np.arange(len(pos)) + np.repeat(next_pos - entries.first, entries.size)
    return pos


def _walked(entries: Entries, sets: Sets, next_pos: Ints) -> Ints:
    """S-9 with shared tokens: a token gets the next position of its first id, and all its ids continue from there.

    A shared token can move a counter to any value, so each position depends on all tokens before it. The loop goes over
    runs of tokens with the same set, whose counters agree after the first token.
    """
    counter = dict(zip(entries.unique.tolist(), next_pos.tolist(), strict=True))
    begins = np.flatnonzero(np.diff(sets.of, prepend=-1))
    lengths = np.diff(begins, append=entries.n_tokens)
    bases: list[int] = []
    for token, n_run in zip(begins.tolist(), lengths.tolist(), strict=True):
        ids = entries.ids_of(token)
        bases.append(counter[ids[0]])
        counter.update(dict.fromkeys(ids, bases[-1] + n_run))
    return np.repeat(np.array(bases) - begins, lengths) + np.arange(entries.n_tokens)


def _outputs(flags: NDArray[Any] | None, n_tokens: int, output_all: bool) -> NDArray[np.bool_]:
    """S-10 and S-11: the flags that are not zero; without flags, only the last token of the whole batch; or all."""
    if output_all:
        return np.ones(n_tokens, bool)
    if flags is not None:
        return flags.astype(bool)
    last = np.zeros(n_tokens, bool)
    last[-1] = True
    return last
