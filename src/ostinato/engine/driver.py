"""A loop driven directly: sequences are admitted one by one, then the loop runs to its end, or step by step.

It does what an engine does, without queue, prefix cache and threads, for comparisons and measurements. Prompts are
token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from ostinato.backends.base import ChunkPart
from ostinato.backends.runner import Runner
from ostinato.cache.reserve import Reserve
from ostinato.decoder.paged import PagedSequence, PagedSequences, SequencePart
from ostinato.errors import EngineDead, InternalError, NoSlot, QueueFull, Unsupported
from ostinato.loop.host import Admission, OutEntry
from ostinato.loop.layout import Word
from ostinato.options import NEUTRAL, Sampling

GREEDY: Final = replace(NEUTRAL, seed=0)
DEADLINE_S: Final = 600.0  # for any single wait; a large model on a slow machine needs seconds


class LoopDriver:
    """Admits sequences and keeps what the loop sends, in order. Owns the loop: close it here."""

    def __init__(self, runner: Runner, *, chunk_rows: int | None = None) -> None:
        """`chunk_rows`: of a prompt that run at once; by default as many as the runner takes."""
        if not runner.model.shape.causal:
            runner.close()
            raise Unsupported(f"{runner.model.shape.family} is an encoder: it embeds text and generates none")
        self.runner, self._chunk_rows = runner, chunk_rows
        self.entries: list[OutEntry] = []
        self._generation = 0
        reserve = Reserve(runner.groups, runner.page_tokens, chunk_rows=runner.chunks.rows, share_prefixes=False)
        self._memory = PagedSequences(reserve, recurs=bool(runner.model.shape.recurrent))
        self._sequences: dict[int, PagedSequence] = {}  # by generation

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        most: int,
        sampling: Sampling = GREEDY,
        stop_ids: Sequence[int] = (),
        pages: Sequence[int] | None = None,
        granted: int | None = None,
        admit: bool = True,
    ) -> int:
        """Run a prompt and ask for its admission; returns its generation.

        By default it gets pages for all its `most` tokens, with all their positions granted; `pages`, the same in every
        layer, and `granted` change that. With `admit=False` it is only staged, and the caller asks for its admission.
        """
        self._generation += 1
        try:
            self._stage(slot, prompt, most, sampling, stop_ids, pages, granted)
            if admit and not self.runner.host.admit(slot, self._generation):
                raise QueueFull("the inbox is full: trigger, so that the loop takes its entries")
        except BaseException:
            if self._generation in self._sequences:
                self.release(self._generation)
            raise
        return self._generation

    def _stage(
        self,
        slot: int,
        prompt: Sequence[int],
        most: int,
        sampling: Sampling,
        stop_ids: Sequence[int],
        pages: Sequence[int] | None,
        granted: int | None,
    ) -> None:
        """Run a prompt, stage its admission and sample its first token."""
        runner, n_positions = self.runner, len(prompt) + most
        rope_set = runner.model.shape.rope_set(n_positions - 1)  # no step reads the last token
        if pages is None:
            tables = self._prefilled(slot, prompt, n_positions, rope_set)
        else:
            tables = self.tables(pages)
            self.prefill(slot, prompt, pages, rope_set=rope_set)
        granted = -(-n_positions // runner.page_tokens) * runner.page_tokens if granted is None else granted
        admission = Admission(
            self._generation, prompt, most, tables, granted, sampling, stop_ids=stop_ids, rope_set=rope_set
        )
        runner.host.stage(slot, admission)
        self._beside(lambda: runner.chunks.first(slot))

    def prefill(
        self, slot: int, prompt: Sequence[int], pages: Sequence[int], *, start: int = 0, rope_set: int = 0
    ) -> None:
        """Compute positions from `start` on of a prompt into these pages of every layer, to the end."""
        rows, tables = self._rows(len(prompt)), self.tables(pages)
        for first in range(start, len(prompt), rows):
            self._run_chunk(ChunkPart(list(prompt[first : first + rows]), first, tables, slot, rope_set=rope_set), rows)

    def tables(self, pages: Sequence[int]) -> list[list[int]]:
        """A page table for each group of layers, with these pages in all of them."""
        groups = self.runner.groups
        if max(pages) >= min(group.n_pages for group in groups):
            raise InternalError(f"pages up to {max(pages)}; there are {[group.n_pages for group in groups]}")
        return [list(pages)] * len(groups)

    def _prefilled(self, slot: int, prompt: Sequence[int], n_positions: int, rope_set: int) -> list[list[int]]:
        """Compute a prompt into pages of its own; the page tables with which the loop goes on."""
        sequence = self._memory.open(prompt, n_positions, slot=slot, shared=False, rope_set=rope_set)
        if sequence is None:
            reserve = self._memory.reserve
            raise NoSlot(
                f"keys and values of {n_positions} positions do not fit: {reserve.n_available} of {reserve.n_pages} "
                f"pages of {reserve.page_tokens} positions are free; wait until a sequence has ended, or ask for fewer "
                "tokens",
                reason="pages",
            )
        self._sequences[self._generation] = sequence
        rows = self._rows(len(prompt))
        while sequence.n_left:
            part = SequencePart(sequence, min(rows, sequence.n_left))
            self._run_chunk(self._memory.plan(part), rows)
            self._memory.apply(part)
        return self._memory.stage(sequence, n_positions)

    def _rows(self, n_tokens: int) -> int:
        return self._chunk_rows or self.runner.chunks.rows_for(n_tokens)

    def _run_chunk(self, part: ChunkPart, rows: int) -> None:
        def run() -> None:
            self.runner.chunks.run([part], rows)

        self._beside(run)

    def _beside(self, job: Callable[[], None]) -> None:
        """Run a job on the device to its end. A loop that runs `alone` yields for it and is triggered again."""
        runner = self.runner
        yields = runner.start.alone and runner.decode_mode.running
        if yields:
            runner.host.set_yield(True)
        try:
            runner.beside(job).result(DEADLINE_S)
            if yields and not runner.start.wait(DEADLINE_S):
                raise EngineDead(f"the loop did not yield within {DEADLINE_S:.0f} s")
        finally:
            if yields:
                runner.host.set_yield(False)
        if yields:
            runner.decode_mode.trigger()

    def run(self) -> None:
        """Trigger, wait until there are no live slots, and collect the entries."""
        self.begin()
        self.wait()

    def begin(self) -> None:
        """Enter decode mode where it is not on, and trigger."""
        decode_mode = self.runner.decode_mode
        if not decode_mode.on:
            decode_mode.enter()
        decode_mode.trigger()

    def wait(self) -> None:
        """Wait until the loop has ended, and collect the entries."""
        if not self.runner.start.wait(DEADLINE_S):
            raise EngineDead(f"mode {self.runner.settled.mode}: the loop did not end within {DEADLINE_S:.0f} s")
        self._collect()

    def step(self) -> bool:
        """Run one step paced by the host, outside decode mode; whether another one follows.

        The first step only admits: it has no rows yet.
        """
        decode_mode = self.runner.decode_mode
        if self.runner.start.executable == 0:
            decode_mode.enter()  # builds, and leaves plan hash and epoch where the step boundary looks for them
            decode_mode.exit()
        try:
            decode_mode.step()
        except Exception as error:  # any exception of a node
            raise EngineDead(f"mode {self.runner.settled.mode}: the step failed: {error}") from error
        self._collect()
        return bool(self.runner.host.word(Word.GO))

    def forget(self) -> None:
        """All sequences have ended: release their pages, and drop the entries."""
        for generation in list(self._sequences):
            self.release(generation)
        self.entries = []

    def release(self, generation: int) -> None:
        """A sequence has ended: release its pages."""
        self._memory.close(self._sequences.pop(generation))

    def synchronize(self) -> None:
        """Wait for the device, so that the loop's stream sees what torch wrote on its own stream."""
        self.runner.start.synchronize()

    def close(self) -> None:
        self.runner.close()

    def _collect(self) -> None:
        dead = self.runner.decode_mode.fault()
        if dead is not None:
            raise EngineDead(f"mode {self.runner.settled.mode}: {dead}") from self.runner.start.failure()
        self.entries += self.runner.host.drain(1 << 20)
