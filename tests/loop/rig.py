"""A loop over a tiny random model, driven by hand: what an engine does, without its line, its threads or its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ostinato.loop.host import OutEntry, Seat
from ostinato.loop.layout import Word
from ostinato.loop.open import Loop, LoopOptions
from ostinato.models.blocks import Model
from ostinato.options import KVType, Sampling
from tests.random_model import MemoryKind, random_model

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0)
DEADLINE_S = 60.0


@dataclass
class Driver:
    """Seats sequences and collects their tokens, by slot. Pages are dealt in order and never given back."""

    loop: Loop
    next_page: int = 0
    generation: int = 0
    entries: list[OutEntry] = field(default_factory=list)

    def seat(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        most: int = 8,
        sampling: Sampling = GREEDY,
        stop_ids: Sequence[int] = (),
        granted: int | None = None,
        pages: Sequence[int] | None = None,
        admit: bool = True,
    ) -> int:
        """Run a prompt and ask for its admission; its generation. `granted`: positions at first, else all."""
        loop = self.loop
        self.generation += 1
        needed = -(-(len(prompt) + most) // loop.page_tokens)
        if pages is None:
            pages = range(self.next_page, self.next_page + needed)
            self.next_page += needed
        seat = Seat(
            generation=self.generation,
            prompt=prompt,
            left=most,
            pages=list(pages),
            granted=needed * loop.page_tokens if granted is None else granted,
            sampling=sampling,
            stop_ids=stop_ids,
        )
        rows = loop.prefill.rows_for(len(prompt))
        for start in range(0, len(prompt), rows):
            chunk = list(prompt[start : start + rows])

            def run(chunk: list[int] = chunk, start: int = start) -> None:
                loop.prefill.run(slot, chunk, start, list(pages), rows)

            loop.beside(run).result(DEADLINE_S)
        loop.host.stage(slot, seat)
        loop.beside(lambda: loop.prefill.first(slot)).result(DEADLINE_S)
        if admit:
            assert loop.host.admit(slot, self.generation)
        return self.generation

    def play(self) -> None:
        """Trigger until nobody lives, and collect."""
        if not self.loop.mode.on:
            self.loop.mode.enter()
        self.loop.mode.trigger()
        self.settle()

    def settle(self) -> None:
        """Wait for the loop's end, and collect."""
        assert self.loop.start.wait(DEADLINE_S), "the loop did not end"
        failure = self.loop.start.failure()
        if failure is not None:
            raise failure
        self.entries += self.loop.host.drain(1 << 20)

    def tokens(self, generation: int) -> list[int]:
        return [e.token for e in self.entries if e.generation == generation and e.token is not None]

    def word(self, word: Word) -> int:
        return self.loop.host.word(word)


def open_loop(
    kind: MemoryKind = "kv",
    *,
    model: Model | None = None,
    mode: str = "loop",
    n_slots: int = 4,
    context: int = 128,
    n_pages: int = 64,
    kv_type: KVType = "f32",
    outbox_entries: int | None = None,
) -> Driver:
    """A driver of a new loop; close it with `driver.loop.close()`."""
    model = model or random_model(kind)
    options = LoopOptions(mode, n_slots, context, n_pages, kv_type, model.shape.vocab)
    return Driver(Loop(model, options, outbox_entries=outbox_entries))
