"""Which sequence is sampled inside the run, by which sampler, into which output row (SR-1..11).

A sequence with a backend sampler gets tokens, not logits; the others get raw logits. Samplers may carry state from
batch to batch, so a batch is a transaction: `begin`, then `commit` or `undo`. The rows belong to `output.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from ostinato.cache.sequences import MAX_SEQ, Ints
from ostinato.decoder.batch.batch import Batch, listed_ids
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.output import Outputs, Sampled
from ostinato.errors import InternalError, InvalidBatch


class BackendSampler(Protocol):
    """Chooses a token, or narrows the candidates, inside a run, for one sequence."""

    @property
    def supported(self) -> bool:
        """Whether it can run inside a run at all; an empty chain cannot."""

    def begin(self) -> None:
        """A new logical batch begins (D-14)."""

    def apply(self, logits: Tensor) -> Sampled:
        """The sampler's results for one row of logits [n_vocab]."""

    def snapshot(self) -> Any:
        """A copy of the state, for `restore`."""

    def restore(self, snapshot: Any) -> None:
        """Return to the state of the snapshot."""


class SampleRouter:
    """The registry of backend samplers; it passes a ubatch's output rows through them.

    `on_change` is called at every real change of the registry: a new worst-case reservation is due then (SR-2).
    """

    def __init__(self, *, n_seq_limit: int = MAX_SEQ, on_change: Callable[[], None] = lambda: None) -> None:
        self._n_seq_limit = n_seq_limit
        self._on_change = on_change
        self._samplers: dict[int, BackendSampler] = {}
        self._begun: list[tuple[BackendSampler, Any]] | None = None

    @property
    def samplers(self) -> frozenset[int]:
        """The sequence ids that have a sampler."""
        return frozenset(self._samplers)

    def register(self, sequence: int, sampler: BackendSampler | None) -> bool:
        """Sample a sequence by this sampler, or no longer (None).

        False, and no sampler for the sequence, when this one cannot run in a graph (SR-1).
        """
        if self._begun is not None:
            raise InternalError(f"a sampler for sequence {sequence} was registered while a batch was running")  # D-20
        if not 0 <= sequence < self._n_seq_limit:
            raise InvalidBatch(
                f"no sampler can serve sequence {sequence}: ids are 0 to {self._n_seq_limit - 1}",  # SR-1
                reason="seq_range",
            )
        wanted = sampler if sampler is not None and sampler.supported else None
        before = self._samplers.pop(sequence, None)
        if wanted is not None:
            self._samplers[sequence] = wanted
        if wanted is not before:
            self._on_change()
        return wanted is sampler

    # Before the run

    def check_limit(self, batch: Batch, *, limit: int, output_all: bool) -> None:
        """Refuse more than `limit` outputs of a sampled sequence (SR-4), in a batch that is not checked yet.

        All other faults of the batch are left to the sanitizer, which runs next.
        """
        if not self._samplers or (batch.output is None and not output_all):
            return
        ids, tokens = _output_entries(batch, output_all)
        exceeding = []
        for sequence in self._samplers:
            outputs = tokens[ids == sequence]
            if len(outputs) > limit:
                exceeding.append((int(outputs[limit]), sequence))
        if exceeding:
            index, sequence = min(exceeding)
            raise InvalidBatch(
                f"token {index}: sequence {sequence} has a backend sampler and more than {limit} outputs; "  # SR-4
                "send fewer of its outputs at once, or raise n_outputs_max_per_seq",
                reason="seq_output_limit",
                index=index,
            )

    def begin(self) -> None:
        """Begin a new logical batch: save every sampler's state (SR-11), then call its `begin` once (D-14)."""
        if self._begun is not None:
            raise InternalError("a batch began while another was running")  # D-20
        self._begun = []
        try:
            for sampler in {id(sampler): sampler for sampler in self._samplers.values()}.values():
                self._begun.append((sampler, sampler.snapshot()))
                sampler.begin()
        except BaseException:
            self.undo()
            raise

    def commit(self) -> None:
        """The whole batch ran: keep the samplers' new states."""
        self._begun = None

    def undo(self) -> None:
        """The batch failed: restore every sampler's state (SR-11). Does nothing outside a batch."""
        begun, self._begun = self._begun or [], None
        for sampler, snapshot in begun:
            sampler.restore(snapshot)

    # For each ubatch

    def wants_raw(self, ubatch: Ubatch) -> bool:
        """Whether some output token needs raw logits: one id has no sampler, or there are several ids (SR-7)."""
        if not self._samplers:
            return bool(ubatch.output.any())
        shared = bool((ubatch.n_seq_id[ubatch.output] > 1).any())
        return shared or not self._samplers.keys() >= set(ubatch.primary[ubatch.output].tolist())

    def rows(self, ubatch: Ubatch, first_row: int) -> dict[int, list[int]]:
        """The output rows of each primary id; `first_row` is the number of outputs of earlier ubatches (SR-5)."""
        owned: dict[int, list[int]] = {}
        for row, sequence in enumerate(ubatch.primary[ubatch.output].tolist(), start=first_row):
            owned.setdefault(sequence, []).append(row)
        return owned

    def run(self, ubatch: Ubatch, logits: Tensor, outputs: Outputs, *, first_row: int) -> None:
        """Sample the rows of logits [outputs, n_vocab] whose sequence has a sampler, into their output rows (SR-6)."""
        if not self._samplers:
            return
        owned = self.rows(ubatch, first_row)
        for sequence in sorted(self._samplers.keys() & owned):
            for row in owned[sequence]:
                outputs.write_sampled(row, self._samplers[sequence].apply(logits[row - first_row]))


def _output_entries(batch: Batch, output_all: bool) -> tuple[Ints, Ints]:
    """The ids of the tokens that will be outputs, and the token of each; ids may be out of range. Both are empty where
    the batch's fields do not fit together."""
    given, nothing = batch.token if batch.token is not None else batch.embd, np.zeros(0, np.int64)
    try:
        n_tokens = len(np.asarray(given)) if batch.n_tokens is None else batch.n_tokens
        flags = np.ones(n_tokens, bool) if output_all else np.asarray(batch.output).astype(bool)
        ids, counts = np.zeros(n_tokens, np.int64), np.ones(n_tokens, np.int64)  # S-8
        if batch.seq_id is not None:
            ids, counts = listed_ids(batch.seq_id, batch.n_seq_id)
    except (InvalidBatch, ValueError, TypeError):
        return nothing, nothing
    if flags.shape != (n_tokens,) or len(counts) != n_tokens:
        return nothing, nothing
    tokens = np.repeat(np.arange(n_tokens), counts)
    return ids[flags[tokens]], tokens[flags[tokens]]
