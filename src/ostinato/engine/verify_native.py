"""Checks of the CPU's native loop that need nothing beside it, each to the bit.

The same sequences run once more by the plainest object there is for this machine, with other numbers of threads, each
alone, and with their prompts cut otherwise; all must give the same tokens and log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from ostinato.backends.base import PAGE_TOKENS, Settled
from ostinato.backends.compare import Difference, checksums, compare_weights
from ostinato.backends.native.backend import NativeRunner
from ostinato.backends.native.library import chosen_level, plainest_library
from ostinato.engine.checks import N_LOGPROBS, N_SLOTS, Case, Check, Compared, VerifyReport, cases_of, timed, unequal
from ostinato.engine.driver import LoopDriver

if TYPE_CHECKING:
    import ctypes

    from ostinato.loop.host import OutEntry
    from ostinato.models.blocks import LoadedModel

CUT: Final = 7  # rows of a chunk that no prompt is a multiple of
THREADS: Final = (1, 2, 3)
_COMPARED: Final = ("position", "token", "logprob", "top", "finish")

Run = Callable[[], "list[OutEntry]"]


@dataclass(frozen=True, slots=True)
class NativeVerifier:
    """A model in tiles, and how its loop is opened."""

    model: LoadedModel
    settled: Settled
    n_tokens: int  # ids that the tokenizer knows

    def verify(self, again: Callable[[], LoadedModel], tell: Callable[[str], None]) -> VerifyReport:
        """Run every check. `again` loads the same model once more from its file."""
        tell("reading the weights once more")
        checks = [timed("weights", "the file", "bits", lambda: Compared(*compare_weights(self.model, again())))]
        before = checksums(self.model)
        tell("the native loop, several times")
        entries = self.entries()
        checks += [self._same(against, entries, run) for against, run in self._others()]
        checks.append(timed("weights", "before the runs", "bits", lambda: self._unchanged(before)))
        return VerifyReport(tuple(checks), {})

    def verify_level(self) -> VerifyReport:
        """One sequence of the loop beside the plainest object that can be had of it, which may be the same."""
        level, library = plainest_library()
        one = self._cases()[:1]
        return VerifyReport(
            (self._same(level.words, self.entries(one), lambda: self.entries(one, library=library)),), {}
        )

    def _others(self) -> Iterator[tuple[str, Run]]:
        """What the loop is compared with."""
        level, library = plainest_library()
        if level != chosen_level():
            yield level.words, partial(self.entries, library=library)
        for threads in THREADS:
            if threads != self.settled.threads:
                yield f"{threads} thread{'s' if threads > 1 else ''}", partial(self.entries, threads=threads)
        yield "each sequence alone", lambda: [entry for case in self._cases() for entry in self.entries([case])]
        yield f"prompts cut at every {CUT} tokens", lambda: self.entries(chunk_rows=CUT)

    def _same(self, against: str, entries: Sequence[OutEntry], run: Run) -> Check:
        return timed("loop", against, "bits", lambda: same_answers(entries, run()))

    def entries(
        self,
        cases: Sequence[Case] | None = None,
        *,
        threads: int | None = None,
        library: ctypes.CDLL | None = None,
        chunk_rows: int | None = None,
    ) -> list[OutEntry]:
        """What the loop sends for these sequences, or for all of them, to their ends."""
        everyone = self._cases()
        longest = max(len(case.prompt) + case.most for case in everyone)
        page = PAGE_TOKENS["cpu"]
        settled = replace(
            self.settled,
            context=longest,
            n_slots=N_SLOTS,
            n_pages=sum(-(-(len(case.prompt) + case.most) // page) for case in everyone),
            n_tokens=self.n_tokens,
            threads=threads or self.settled.threads,
        )
        with closing(LoopDriver(NativeRunner(self.model, settled, library=library), chunk_rows=chunk_rows)) as driver:
            for case in cases or everyone:
                sampling = replace(case.sampling, logprobs=N_LOGPROBS)
                driver.admit(case.slot, case.prompt, most=case.most, sampling=sampling)
            driver.run()
            return driver.entries

    def _cases(self) -> list[Case]:
        return cases_of(self.model.shape, self.n_tokens, PAGE_TOKENS["cpu"])

    def _unchanged(self, before: dict[str, int]) -> Compared:
        changed = [name for name, now in checksums(self.model).items() if now != before[name]]
        wrong = Difference("a step", changed[0], (), "as it was loaded", "changed") if changed else None
        return Compared(len(before), wrong)


def same_answers(expected: Sequence[OutEntry], found: Sequence[OutEntry]) -> Compared:
    """Compare what was sent for each slot, in its order; the order among slots may differ."""
    pairs: list[tuple[str, tuple[int, ...], object, object]] = [
        (f"outbox.{name}", (slot, number), getattr(one, name), getattr(two, name))
        for slot in sorted({entry.slot for entry in expected})
        for number, (one, two) in enumerate(zip(_of(slot, expected), _of(slot, found), strict=False))
        for name in _COMPARED
    ]
    pairs.append(("outbox", (), f"{len(expected)} entries", f"{len(found)} entries"))
    return Compared(len(pairs), unequal("step boundary", pairs))


def _of(slot: int, entries: Sequence[OutEntry]) -> list[OutEntry]:
    return [entry for entry in entries if entry.slot == slot]
