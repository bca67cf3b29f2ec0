"""The memory that a loop reads grammars from: one piece at a fixed address, in which compiled grammars come and go.

The vocabulary's trie lies in front. Behind it each grammar has a region: its automaton, then the masks that the loop
keeps of it. A region is written before the admission that names it is published, is shared by all requests with the
same rule, and stays after the last of them until the room is needed. Only the engine's thread calls this; what the loop
does with a region is in `grammar_step.h`, and the twin's part of it below.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ostinato.errors import InternalError
from ostinato.loop.memory import host_zeros, read_only
from ostinato.text.walk import MOST_KEPT

if TYPE_CHECKING:
    from ostinato.loop.layout import Arena, Tables
    from ostinato.text.automaton import Automaton, Trie

GRAMMAR_BYTES: Final = 64 << 20  # at most; on a CPU taken as grammars come, on a GPU at once
_HEAD_WORDS: Final = 64  # the first of which says where the vocabulary lies
_ALIGNMENT: Final = 16  # words


class CompiledGrammar(NamedTuple):
    """What an answer must follow, in the form that a loop reads.

    `key`: requests with equal keys share a region. While fewer than `min_tokens` tokens were made, stop ids are banned;
    with `ignores_ends`, end tokens always are. A ban is lifted where it would leave no token.
    """

    key: Hashable
    automaton: Automaton
    trie: Trie
    min_tokens: int = 0
    ignores_ends: bool = False

    def staged(self, region: int, n_ends: int) -> StagedGrammar:
        """What an admission says of it, where it was given a region."""
        from ostinato.text.automaton import first_position

        return StagedGrammar(region, first_position(self.automaton.words), n_ends, self.min_tokens, self.ignores_ends)


class StagedGrammar(NamedTuple):
    """What an admission says of its grammar: the word at which its region begins, the position before the first token,
    how many of the stop ids are end tokens, and when these are banned (`CompiledGrammar`)."""

    region: int
    position: np.ndarray
    n_ends: int
    min_tokens: int
    ignores_ends: bool


@dataclass(slots=True)
class _Region:
    first: int
    n_words: int
    n_leases: int = 0


class GrammarMemory:
    """Regions of compiled grammars, reference counted, in the host's memory; a GPU's are in a subclass."""

    def __init__(self, n_bytes: int, mask_words: int) -> None:
        """`mask_words`: int32 words of one mask."""
        self.plain_words: Any = self._memory(n_bytes // 4)  # for code of the device
        self._mask_words = mask_words
        self._regions: OrderedDict[Hashable, _Region] = OrderedDict()  # the one used least recently first
        self._vocabulary_end = 0

    @property
    def words(self) -> Any:
        """The memory, int32, for code that only looks at it (I-5)."""
        return read_only(self.plain_words)

    @property
    def n_leased(self) -> int:
        """How many leases there are."""
        return sum(region.n_leases for region in self._regions.values())

    @property
    def used_bytes(self) -> int:
        """Of the vocabulary and all regions."""
        return 4 * (self._vocabulary_end + sum(region.n_words for region in self._regions.values()))

    # Where the words lie

    def _memory(self, n_words: int) -> Any:
        made = host_zeros((n_words,), np.int32)
        self._own = made.view()  # stays writable while decode mode is on: grammars come with admissions
        return made

    def _write(self, first: int, words: np.ndarray) -> None:
        self._own[first : first + len(words)] = words

    def flush(self) -> None:
        """Bring what was written to the device, ahead of the work that is queued there next."""

    # Regions

    def lease(self, grammar: CompiledGrammar) -> int | None:
        """The word at which a grammar's region begins; None where there is no room for it, since grammars of running
        requests take it. To be released once."""
        region = self._regions.get(grammar.key)
        if region is None:
            region = self._placed(grammar)
            if region is None:
                return None
            self._regions[grammar.key] = region
        region.n_leases += 1
        self._regions.move_to_end(grammar.key)
        return region.first

    def release(self, first: int) -> None:
        """Give a lease back."""
        region = next((region for region in self._regions.values() if region.first == first), None)
        if region is None or region.n_leases == 0:
            raise InternalError(f"the grammar at word {first} is not leased")
        region.n_leases -= 1

    def _placed(self, grammar: CompiledGrammar) -> _Region | None:
        from ostinato.text.automaton import begin_kept, kept_words

        if not self._vocabulary_end and not self._place_vocabulary(grammar.trie):
            return None
        n_automaton = len(grammar.automaton.words)
        n_words = _aligned(n_automaton + kept_words(self._mask_words, MOST_KEPT))
        first = self._room(n_words)
        if first is None:
            return None
        no_masks = np.zeros(kept_words(self._mask_words, 0), np.int32)
        begin_kept(no_masks, self._mask_words, MOST_KEPT)
        self._write(first, np.concatenate([grammar.automaton.words, no_masks]))
        return _Region(first, n_words)

    def _place_vocabulary(self, trie: Trie) -> bool:
        end = _HEAD_WORDS + len(trie.words)
        if end > len(self.plain_words):
            return False
        head = np.zeros(_HEAD_WORDS, np.int32)
        head[0] = _HEAD_WORDS
        self._write(0, np.concatenate([head, trie.words]))
        self._vocabulary_end = _aligned(end)
        return True

    def _room(self, n_words: int) -> int | None:
        """The first word of a free piece; grammars that are not leased give way, the one used least recently first."""
        if n_words > len(self.plain_words) - self._vocabulary_end:
            return None
        while True:
            at = self._vocabulary_end
            for region in sorted(self._regions.values(), key=lambda region: region.first):
                if region.first - at >= n_words:
                    return at
                at = region.first + region.n_words
            if len(self.plain_words) - at >= n_words:
                return at
            idle = next((key for key, region in self._regions.items() if region.n_leases == 0), None)
            if idle is None:
                return None
            del self._regions[idle]

    # The twin of grammar_step.h and step_masks.h

    def follow(self, first: int, position: np.ndarray, token: int) -> bool:
        """Advance a position in the grammar of a region by a token; False where it is not allowed."""
        from ostinato.text.automaton import take_token

        words = self.plain_words
        return take_token(words[first:], words[words[0] :], position, token)

    def allowed(self, first: int, position: np.ndarray, bits: np.ndarray) -> bool:
        """Find the tokens that may come next, end tokens excepted, into `bits`; whether the text may end here."""
        from ostinato.text.automaton import AUTOMATON_WORDS, find_mask, may_end

        words = self.plain_words
        region = words[first:]
        kept = region[region[AUTOMATON_WORDS] :]
        find_mask(region, words[words[0] :], kept, position, bits)
        return may_end(region, position)


def find_masks(tables: Tables) -> None:
    """Find the tokens that may come next in every row of the step that follows a grammar: the twin of step_masks.h, a
    node of the step before it samples. Where no token is allowed the slot's `mask_ready` is 0."""
    table, grammars = tables.table, tables.grammars
    assert grammars is not None
    regions, masks = table.host("grammar"), table.host("mask_bits")
    for slot in table.host("row_slot")[: table.host("n_rows")[0]].tolist():
        if regions[slot]:
            bits = masks[slot]
            if grammars.allowed(int(regions[slot]), table.host("grammar_position")[slot], bits):
                bits |= _bits_of_stops(table, slot, int(table.host("n_ends")[slot]))
            _ban_ends(table, slot, bits)
            table.host("mask_ready")[slot] = bits.any()


def _ban_ends(table: Arena, slot: int, bits: np.ndarray) -> None:
    """While fewer than `ends_from` tokens were made, stop ids are banned; with `ends_ignored`, end tokens always are. A
    ban is lifted where it would leave no token."""
    is_short = table.host("made")[slot] < table.host("ends_from")[slot]
    n_unwanted = table.host("n_stop")[slot] if is_short else 0
    if not is_short and table.host("ends_ignored")[slot]:
        n_unwanted = table.host("n_ends")[slot]
    others = bits & ~_bits_of_stops(table, slot, int(n_unwanted))
    if others.any():
        bits[:] = others


def _bits_of_stops(table: Arena, slot: int, n: int) -> np.ndarray:
    """Of the first n stop ids of a slot."""
    from ostinato.loop.layout import bits_of

    n_words = table.host("mask_bits").shape[1]
    ids = table.host("stop_ids")[slot, :n].tolist()
    return bits_of((id for id in ids if 0 <= id < 32 * n_words), n_words)


def _aligned(n_words: int) -> int:
    return -(-n_words // _ALIGNMENT) * _ALIGNMENT
