"""Reading what a loader laid out: piece by piece, on several threads, the large ones first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

Progress = Callable[[int, int], None]  # bytes read so far, and all of them


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """Some bytes of the file to be read and put where they belong; may run beside any other."""

    n_bytes: int
    read: Callable[[], None]


def read_all(pieces: Iterable[WeightPiece], n_threads: int, progress: Progress | None = None) -> None:
    """Read every piece; the first that fails stops the rest."""
    pieces = list(pieces)
    done, total = 0, sum(piece.n_bytes for piece in pieces)
    with ThreadPoolExecutor(max_workers=n_threads) as pool:
        reading = {pool.submit(piece.read): piece for piece in pieces}
        try:
            for ready in as_completed(reading):
                ready.result()
                done += reading[ready].n_bytes
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # the rest need not be read any more
            raise
