"""The splits that memories use (SP-15), and the batches that a memory must refuse because no split fits (RM-5)."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.errors import InvalidBatch


def split_simple(splitter: Splitter, n_ubatch: int) -> list[Ubatch] | None:
    """In batch order; None when tokens are left over."""
    return _split(splitter, lambda: splitter.simple(n_ubatch))


def split_equal(splitter: Splitter, n_ubatch: int, *, sequential: bool, n_keep_tail: int = 0) -> list[Ubatch] | None:
    """By equal sets; InvalidBatch where tokens of several sequences can never be split this way (MC-6)."""
    if sequential:
        refuse_coupling(splitter)
    return _split(splitter, lambda: splitter.equal(n_ubatch, sequential=sequential, n_keep_tail=n_keep_tail))


def split_seq(splitter: Splitter, n_ubatch: int) -> list[Ubatch] | None:
    """One set at a time. A ubatch ends where its set shrinks: there the state that its sequences share must fork.

    The splitter would continue with the smaller set (SP-14), and a recurrent state would then carry tokens into
    sequences that do not have them (D-24). So the split is begun again with a lower limit for that ubatch.
    """
    limits: list[int] = []  # of the ubatches known so far
    while True:
        splitter.reset()
        ubatches = [ubatch for limit in limits if (ubatch := splitter.seq(limit)) is not None]
        while (ubatch := splitter.seq(n_ubatch)) is not None:
            n_whole = int((ubatch.n_seq_id == ubatch.n_seq_id[0]).sum())
            if n_whole < ubatch.n_tokens:
                limits = [before.n_tokens for before in ubatches] + [n_whole]
                break
            ubatches.append(ubatch)
        else:
            return ubatches if splitter.complete else None


def refuse_coupling(splitter: Splitter) -> None:
    """Refuse a batch in which a token belongs to several sequences, where each has memory of its own (RM-5)."""
    batch = splitter.batch
    if batch.has_coupling:
        index = int((batch.n_seq_id > 1).argmax())
        raise InvalidBatch(
            f"token {index}: belongs to sequences {batch.ids_of(index)}, and each sequence has memory of its own here; "
            "give every token one sequence",  # RM-5
            reason="coupled_unsupported",
            index=index,
        )


def _split(splitter: Splitter, take: Callable[[], Ubatch | None]) -> list[Ubatch] | None:
    """All ubatches of a new split; None when it could not take every token (SP-1, SP-2)."""
    splitter.reset()
    ubatches = [*iter(take, None)]
    return ubatches if splitter.complete else None
