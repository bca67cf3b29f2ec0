"""A loop driven directly: sequences are admitted one by one, then the loop runs to its end, or step by step.

It does what an engine does, without queue, cache and threads, for comparisons and measurements. Prompts are token ids;
pages are assigned in order from the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ostinato.backends.base import ChunkPart
from ostinato.backends.runner import Runner
from ostinato.errors import EngineDead, InternalError
from ostinato.loop.host import Admission, OutEntry
from ostinato.loop.layout import Word
from ostinato.options import Sampling

GREEDY: Final = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0)
DEADLINE_S: Final = 600.0  # for any single wait; a large model on a slow machine needs seconds


class LoopDriver:
    """Admits sequences and keeps what the loop sends, in order. Owns the loop: close it here."""

    def __init__(self, loop: Runner) -> None:
        self.loop = loop
        self.entries: list[OutEntry] = []
        self._generation = 0
        self._next_page = 0

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

        By default it gets pages for all its `most` tokens, with all their positions granted; `pages` and `granted`
        change that. With `admit=False` it is only staged, and the caller asks for its admission.
        """
        loop = self.loop
        self._generation += 1
        n_pages = -(-(len(prompt) + most) // loop.page_tokens)
        if pages is None:
            pages = range(self._next_page, self._next_page + n_pages)
            self._next_page += n_pages
        if max(pages) >= loop.settled.n_pages:
            raise InternalError(f"{loop.settled.n_pages} pages of keys and values do not hold these sequences")
        self.prefill(slot, prompt, pages)
        granted = n_pages * loop.page_tokens if granted is None else granted
        admission = Admission(self._generation, prompt, most, pages, granted, sampling, stop_ids=stop_ids)
        loop.host.stage(slot, admission)
        loop.beside(lambda: loop.prefill.first(slot)).result(DEADLINE_S)
        if admit and not loop.host.admit(slot, self._generation):
            raise InternalError("the inbox is full: more sequences than it holds were admitted before a step")
        return self._generation

    def prefill(self, slot: int, prompt: Sequence[int], pages: Sequence[int], *, start: int = 0) -> None:
        """Compute positions from `start` on of a prompt into its pages, to the end."""
        prefill = self.loop.prefill
        rows = prefill.rows_for(len(prompt))
        for first in range(start, len(prompt), rows):
            chunk = list(prompt[first : first + rows])

            def run(chunk: list[int] = chunk, first: int = first) -> None:
                prefill.run([ChunkPart(chunk, first, list(pages), slot)], rows)

            self.loop.beside(run).result(DEADLINE_S)

    def run(self) -> None:
        """Trigger, wait until there are no live slots, and collect the entries."""
        self.begin()
        self.wait()

    def begin(self) -> None:
        """Enter decode mode where it is not on, and trigger."""
        mode = self.loop.mode
        if not mode.on:
            mode.enter()
        mode.trigger()

    def wait(self) -> None:
        """Wait until the loop has ended, and collect the entries."""
        if not self.loop.start.wait(DEADLINE_S):
            raise EngineDead(f"mode {self.loop.mode_name}: the loop did not end within {DEADLINE_S:.0f} s")
        self._collect()

    def step(self) -> bool:
        """Run one step paced by the host, outside decode mode; whether another one follows.

        The first step only admits: it has no rows yet.
        """
        mode = self.loop.mode
        if self.loop.start.executable == 0:
            mode.enter()  # builds, and leaves plan hash and epoch where the step boundary looks for them
            mode.exit()
        try:
            mode.step()
        except Exception as error:  # any exception of a node
            raise EngineDead(f"mode {self.loop.mode_name}: the step failed: {error}") from error
        self._collect()
        return bool(self.loop.host.word(Word.GO))

    def forget(self) -> None:
        """All sequences have ended: assign pages from the first again, and drop the entries."""
        self._next_page = 0
        self.entries = []

    def synchronize(self) -> None:
        """Wait for the device, so that the loop's stream sees what torch wrote on its own stream."""
        self.loop.start.synchronize()

    def close(self) -> None:
        self.loop.close()

    def _collect(self) -> None:
        dead = self.loop.mode.fault()
        if dead is not None:
            raise EngineDead(f"mode {self.loop.mode_name}: {dead}") from self.loop.start.failure()
        self.entries += self.loop.host.drain(1 << 20)
