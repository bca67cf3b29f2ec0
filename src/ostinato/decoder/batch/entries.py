"""The pairs (token, sequence id) of a batch, as arrays, on which every rule about sequences is computed.

An entry is one id of one token; entries are in batch order, ids as listed. `tokens` holds the same entries gathered by
sequence, so that the previous token of a sequence is the element before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.cache.sequences import MAX_SEQ, Ints

WORD_BITS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Sequence ids of a batch, flat and gathered; ids are in range."""

    ids: Ints  # [entries] in batch order, as listed
    start: Ints  # [n + 1] token i has ids[start[i] : start[i + 1]]
    order: Ints  # [entries] the entries gathered by ascending id, in batch order within one
    tokens: Ints  # [entries] the token of each gathered entry
    unique: Ints  # [sequences] ids that occur, ascending
    first: Ints  # [sequences] where each sequence begins among the gathered entries
    size: Ints  # [sequences] how many entries it has

    @staticmethod
    def of(ids: Ints, counts: Ints) -> Entries:
        start = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=start[1:])
        # Numpy sorts 8-bit keys by counting them, in linear time; MAX_SEQ ids fit.
        order = np.argsort(ids.astype(np.uint8), kind="stable")
        tokens = order if len(ids) == len(counts) else np.repeat(np.arange(len(counts)), counts)[order]
        per_id = np.bincount(ids, minlength=MAX_SEQ)
        unique = np.flatnonzero(per_id)
        size = per_id[unique]
        return Entries(ids, start, order, tokens, unique, np.cumsum(size) - size, size)

    @property
    def n_tokens(self) -> int:
        return len(self.start) - 1

    @property
    def has_coupling(self) -> bool:
        return len(self.ids) > self.n_tokens

    def tokens_of(self, place: int) -> Ints:
        """The tokens of the sequence at `place` of `unique`, in batch order."""
        return self.tokens[self.first[place] : self.first[place] + self.size[place]]

    def ids_of(self, token: int) -> list[int]:
        """The ids of one token, as listed."""
        ids: list[int] = self.ids[self.start[token] : self.start[token + 1]].tolist()
        return ids

    def set_masks(self) -> NDArray[np.uint64]:
        """The set of each token as bits, [words, n]: bit k stands for the k-th of `unique`."""
        word, bit = np.divmod(self._ranks(), WORD_BITS)
        bits = np.zeros((-(-len(self.unique) // WORD_BITS), len(self.ids)), np.uint64)
        bits[word, np.arange(len(word))] = np.left_shift(np.uint64(1), bit.astype(np.uint64))
        masks: NDArray[np.uint64] = np.bitwise_or.reduceat(bits, self.start[:-1], axis=1)
        return masks

    def sets(self) -> Sets:
        """The sets of the tokens, numbered; without coupling the numbers ascend with the ids."""
        if not self.has_coupling:
            masks = tuple(1 << s for s in self.unique.tolist())
            return Sets(self._ranks(), masks, np.zeros((0, self.n_tokens), np.uint64))
        words = self.set_masks()
        _, example, number = np.unique(words[0], return_index=True, return_inverse=True)
        for word in words[1:]:
            values, places = np.unique(word, return_inverse=True)
            _, example, number = np.unique(number * len(values) + places, return_index=True, return_inverse=True)
        masks = tuple(sum(1 << s for s in self.ids_of(token)) for token in example.tolist())
        return Sets(number, masks, words)

    def _ranks(self) -> Ints:
        """The place of each entry's id in `unique`, [entries]."""
        rank = np.zeros(MAX_SEQ, np.int64)
        rank[self.unique] = np.arange(len(self.unique))
        return rank[self.ids]


@dataclass(frozen=True, slots=True, eq=False)
class Sets:
    """The sequence set of each token: equal sets have equal numbers."""

    of: Ints  # [n] the number of each token's set
    masks: tuple[int, ...]  # the sets by number, as bit masks of ids
    words: NDArray[np.uint64]  # [words, n] the sets as bits over the ids that occur; no words without coupling
