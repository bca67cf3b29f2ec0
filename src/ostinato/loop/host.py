"""The host's side of the rings: it stages admissions, publishes inbox entries and reads outbox entries.

Entries are written first and the index that publishes them last, with a fence between the two; each index has its own
64 bytes. The loop calls nothing here; docs/ring.md describes both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from ostinato.errors import BadInput
from ostinato.loop.fence import fence
from ostinato.loop.grammars import StagedGrammar
from ostinato.loop.layout import (
    GRANT_PAGES,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    Finish,
    InboxKind,
    InboxWord,
    OutboxWord,
    Tables,
    Word,
    bits_of,
)
from ostinato.options import SAMPLING_NUMBERS, Sampling

_FINISHES: Final = tuple(Finish)  # by number


class OutEntry(NamedTuple):
    """One message of the loop: a token of a slot, or (token None) the end of a cancelled one."""

    slot: int
    generation: int
    token: int | None
    position: int
    finish: Finish
    logprob: float
    time_ns: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence about to be admitted. `sampling` is complete."""

    generation: int
    prompt: Sequence[int]
    left: int
    page_tables: Sequence[Sequence[int]]  # one for each group of layers
    granted: int
    sampling: Sampling
    stop_ids: Sequence[int]
    mask: np.ndarray | None = None  # of the first token; each later one waits for its own, or comes from the grammar
    grammar: StagedGrammar | None = None
    rope_set: int = 0


class HostSide:
    """The host's operations on the rings. Only the engine's thread publishes and drains, because each ring has one
    writer and one reader."""

    def __init__(self, tables: Tables) -> None:
        self.on_publish: Callable[[], None] = _nothing  # wakes a loop that waits for the host
        self._layout = tables.layout
        # Views of its own: the inbox and what it admits are the only way in while decode mode is on (I-5).
        self._admissions = {name: tables.admissions.host(name).view() for name in tables.admissions.names}
        rings = tables.rings
        self._words = rings.host("words").view()
        self._inbox, outbox = rings.host("inbox").view(), rings.host("outbox").view()
        self._outbox = outbox.data
        self._logprobs = outbox.view(np.float32)[:, OutboxWord.LOGPROB].data
        self._times = outbox.view(np.int64)[:, OutboxWord.TIME // 2].data
        self._top_ids, self._top_logprobs = rings.host("outbox_top_ids"), rings.host("outbox_top_logprobs")
        self._n_top = [0] * tables.layout.n_slots

    def word(self, word: Word) -> int:
        """The current value of a control word."""
        return int(self._words[word, 0])

    def set_yield(self, on: bool) -> None:
        """Ask the loop to end at the next step boundary (`on`), or withdraw that request."""
        self._words[Word.YIELD, 0] = on
        self.on_publish()

    @property
    def all_taken(self) -> bool:
        """Whether the loop has taken every entry that was published."""
        return self.word(Word.INBOX_TAIL) == self.word(Word.INBOX_HEAD)

    # Inbox

    def check(self, sampling: Sampling, stop_ids: Sequence[int]) -> None:
        """Refuse more stop ids or logit biases than an admission has room for, and unknown token ids."""
        if len(stop_ids) > MAX_STOP_IDS:
            raise BadInput(f"{len(stop_ids)} token ids end this answer; at most {MAX_STOP_IDS} can (stop_token_ids)")
        if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
            raise BadInput(f"logit_bias has {len(sampling.logit_bias)} entries; at most {MAX_LOGIT_BIAS} can be given")
        sampling.check_ids(self._layout.vocab)

    def stage(self, slot: int, admission: Admission) -> None:
        """Write an admission. The slot must be free, and the loop must have taken its previous admission."""
        s, row = admission.sampling, self._admissions
        penalised = any(getattr(s, one.name) != one.neutral for one in SAMPLING_NUMBERS if one.penalises)
        numbers: dict[str, Any] = {
            **{one.field: getattr(s, one.name) for one in SAMPLING_NUMBERS},
            "generation": admission.generation,
            "position": len(admission.prompt),  # of its first generated token
            "left": admission.left,
            "granted": admission.granted,
            "min_tokens": s.min_tokens,
            "rope_set": admission.rope_set,
            "top_k": min(s.top_k or 0, self._layout.vocab),
            "n_logprobs": s.logprobs or 0,
            "n_stop": len(admission.stop_ids),
            "n_bias": len(s.logit_bias),
            "constrained": admission.mask is not None,
            "penalised": penalised,
            "seed": s.seed,
            **_grammar_numbers(admission.grammar),
        }
        for name, value in numbers.items():
            row[name][slot] = value
        row["stop_ids"][slot, : len(admission.stop_ids)] = list(admission.stop_ids)
        row["bias_ids"][slot, : len(s.logit_bias)] = list(s.logit_bias)
        row["bias_values"][slot, : len(s.logit_bias)] = list(s.logit_bias.values())
        for group, table in enumerate(admission.page_tables):
            row["pages"][slot, group, : len(table)] = list(table)
        if admission.mask is not None:
            row["mask_bits"][slot] = admission.mask
        if admission.grammar is not None:
            row["grammar_position"][slot] = admission.grammar.position
        if penalised:
            row["prompt_bits"][slot] = bits_of(admission.prompt, self._layout.mask_words)
        self._n_top[slot] = numbers["n_logprobs"]

    def admit(self, slot: int, generation: int) -> bool:
        """Ask the loop to admit the sequence staged for this slot; False, and nothing done, while the inbox is full."""
        return self._publish(InboxKind.ADMIT, slot, generation)

    def cancel(self, slot: int, generation: int) -> bool:
        """Ask the loop to end this sequence."""
        return self._publish(InboxKind.CANCEL, slot, generation)

    def stop(self) -> bool:
        """Ask the loop to end, even with live slots."""
        return self._publish(InboxKind.STOP, 0, 0)

    def grant(self, slot: int, generation: int, first: int, pages: Sequence[int]) -> int:
        """Append pages to the page table of the layers that see everything, from index `first` on; how many the inbox
        had room for."""
        done = 0
        while done < len(pages):
            some = pages[done : done + GRANT_PAGES]
            if not self._publish(InboxKind.GRANT, slot, generation, [len(some), first + done, *some]):
                break
            done += len(some)
        return done

    def mask(self, slot: int, generation: int, bits: np.ndarray) -> bool:
        """Send the mask of a constrained sequence's next token: int32 words, one bit per allowed token id."""
        self._admissions["mask_bits"][slot] = bits
        return self._publish(InboxKind.MASK, slot, generation)

    def _publish(self, kind: InboxKind, slot: int, generation: int, rest: Iterable[int] = ()) -> bool:
        head = self.word(Word.INBOX_HEAD)
        if head - self.word(Word.INBOX_TAIL) >= self._layout.inbox_entries:
            return False
        entry = self._inbox[head % self._layout.inbox_entries]
        entry[InboxWord.KIND], entry[InboxWord.SLOT], entry[InboxWord.GENERATION] = kind, slot, generation
        words = list(rest)
        entry[InboxWord.COUNT : InboxWord.COUNT + len(words)] = words
        # Stored last: the loop reads the head without a lock and takes every entry below it.
        fence()
        self._words[Word.INBOX_HEAD, 0] = head + 1
        self.on_publish()
        return True

    # Outbox

    @property
    def waiting(self) -> int:
        """Number of unread outbox entries."""
        return self.word(Word.OUTBOX_HEAD) - self.word(Word.OUTBOX_TAIL)

    def drain(self, most: int = 4096) -> list[OutEntry]:
        """Read up to `most` unread outbox entries, in order, and free their places in the ring."""
        tail = self.word(Word.OUTBOX_TAIL)
        n = min(self.word(Word.OUTBOX_HEAD) - tail, most)
        if n <= 0:
            return []
        fence()
        size = self._layout.outbox_entries
        entries = [self._entry(place % size) for place in range(tail, tail + n)]
        fence()
        self._words[Word.OUTBOX_TAIL, 0] = tail + n
        return entries

    def _entry(self, place: int) -> OutEntry:
        # By memoryview: tokens arrive one at a time, and indexing a single element is slower in numpy.
        words = self._outbox
        slot, token = words[place, OutboxWord.SLOT], words[place, OutboxWord.TOKEN]
        n_top = self._n_top[slot]
        top: tuple[tuple[int, float], ...] = ()
        if n_top and token >= 0:
            ids, values = self._top_ids[place, :n_top].tolist(), self._top_logprobs[place, :n_top].tolist()
            top = tuple(zip(ids, values, strict=True))
        return OutEntry(
            slot,
            words[place, OutboxWord.GENERATION],
            token if token >= 0 else None,
            words[place, OutboxWord.POSITION],
            _FINISHES[words[place, OutboxWord.FINISH]],
            self._logprobs[place],
            self._times[place],
            top,
        )


def _nothing() -> None:
    pass


def _grammar_numbers(grammar: StagedGrammar | None) -> dict[str, int]:
    if grammar is None:
        return dict.fromkeys(("grammar", "n_ends", "ends_from", "ends_ignored"), 0)
    return {
        "grammar": grammar.region,
        "n_ends": grammar.n_ends,
        "ends_from": grammar.min_tokens,
        "ends_ignored": grammar.ignores_ends,
    }
