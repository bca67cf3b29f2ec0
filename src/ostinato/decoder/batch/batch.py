"""A batch as the caller gives it: lists or arrays, most of them optional.

Lists become numpy arrays here, once, and sequence ids in any of their three forms become flat ids with counts.
`sanitizer.py` checks the values.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ostinato.cache.sequences import Ints
from ostinato.errors import InvalidBatch
from ostinato.options import with_known_words


@dataclass(frozen=True, slots=True)
class SeqMasks:
    """Sequence sets as bit masks, one int per token: bit s stands for sequence s.

    Ids are listed ascending, so the lowest bit is the primary id unless `primary` names another of the mask (S-19).
    """

    masks: Sequence[int]
    primary: Sequence[int] | None = None


@with_known_words
@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tokens of any sequences; None stands for a field that is absent and will be generated.

    >>> batch = Batch(token=[1, 2, 3], seq_id=[[0], [0], [1]], output=[0, 1, 1])

    Attributes:
        token: ids [n]; `token` or `embd` is needed, or both.
        embd: rows [n, width] in place of embeddings of tokens.
        pos: [n], or [dimensions, n] (flat or not) for embedding batches of models with several position dimensions.
        seq_id: a list of ids per token, flat ids with their counts in `n_seq_id`, or bit masks.
        n_seq_id: how many ids of a flat `seq_id` each token has.
        output: flags [n]: which tokens have an output.
        segment: [n], for encoders: which of two texts a token belongs to.
        n_tokens: only where it is not the length of the input.
    """

    token: ArrayLike | None = None
    embd: ArrayLike | None = None
    pos: ArrayLike | None = None
    seq_id: Sequence[Sequence[int]] | ArrayLike | SeqMasks | None = None
    n_seq_id: ArrayLike | None = None
    output: ArrayLike | None = None
    segment: ArrayLike | None = None
    n_tokens: int | None = None


def misshapen(message: str) -> InvalidBatch:
    """The error for a field whose shape or type is wrong."""
    return InvalidBatch(message, reason="shape")  # S-5


def as_array(name: str, values: Any) -> NDArray[Any]:
    """A field of numbers as an array of any shape, without a copy where it is one already."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise misshapen(f"{name} is no array of numbers: {error}") from error
    if array.size and array.dtype.kind not in "iubf":
        raise misshapen(f"{name} must hold numbers, not {array.dtype}")
    return array


def length(name: str, values: Any) -> int:
    """The number of entries of a field."""
    try:
        return len(values)
    except TypeError as error:
        raise misshapen(f"{name} is no list: {error}") from error


def whole_numbers(name: str, values: ArrayLike) -> Ints:
    """A field of whole numbers as int64, in a copy of its own; any shape."""
    array = as_array(name, values)
    if array.size == 0:
        return np.zeros(array.shape, np.int64)
    if array.dtype.kind == "f":
        raise misshapen(f"{name} must hold whole numbers, not {array.dtype}")
    if array.dtype == np.uint64:  # too large values would turn negative; the maximum is out of range as well
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
    return array.astype(np.int64)


def listed_ids(seq_id: Any, counts: ArrayLike | None) -> tuple[Ints, Ints]:
    """Sequence ids in any form as (flat ids, counts per token); the ids themselves are not checked."""
    if isinstance(seq_id, SeqMasks):
        if counts is not None:
            raise misshapen("n_seq_id goes with flat ids, not with masks")
        return _flat([*_lists_of_masks(seq_id)])
    given = None if counts is None else whole_numbers("n_seq_id", counts)
    if _is_nested(seq_id):
        ids, lengths = _rows(seq_id) if isinstance(seq_id, np.ndarray) else _flat(seq_id)
        if given is not None and not np.array_equal(given, lengths):
            raise misshapen(f"n_seq_id {given.tolist()} are not the lengths of the lists in seq_id")
        return ids, lengths
    if given is None:
        raise misshapen("seq_id must be a list of ids per token; flat ids need their counts in n_seq_id")
    ids = whole_numbers("seq_id", seq_id)
    if ids.ndim != 1 or given.ndim != 1 or (given < 0).any() or given.sum() != len(ids):
        raise misshapen(f"n_seq_id asks for {given.sum()} ids, but seq_id holds {ids.size}")
    return ids, given


def _is_nested(seq_id: Any) -> bool:
    if isinstance(seq_id, np.ndarray):
        return seq_id.ndim == 2
    return length("seq_id", seq_id) == 0 or not isinstance(seq_id[0], int | np.integer)


def _rows(table: NDArray[Any]) -> tuple[Ints, Ints]:
    return whole_numbers("seq_id", table).ravel(), np.full(table.shape[0], table.shape[1], np.int64)


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    try:
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        return whole_numbers("seq_id", list(chain.from_iterable(lists))), counts
    except TypeError as error:
        raise misshapen(f"seq_id must be a list of ids per token: {error}") from error


def _lists_of_masks(given: SeqMasks) -> Iterable[list[int]]:
    if given.primary is not None and len(given.primary) != len(given.masks):
        raise misshapen(f"{len(given.primary)} primary ids for {len(given.masks)} masks")
    for index, mask in enumerate(given.masks):
        if mask < 0:
            raise InvalidBatch.of_token(index, f"{mask} is no mask of sequence ids", "shape")  # S-5
        ids = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
        if given.primary is not None:
            first = given.primary[index]
            if first not in ids:
                what = f"the primary id {first} is not one of its sequences {ids}"  # S-19
                raise InvalidBatch.of_token(index, what, "shape")
            ids = [first, *(s for s in ids if s != first)]
        yield ids
