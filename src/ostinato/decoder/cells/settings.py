"""The sizes a decoder works with, derived once from what was asked for (C-1..7); nothing changes them afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.cache.sequences import MAX_SEQ
from ostinato.cache.window import CELL_STEP, round_up
from ostinato.errors import BadOption, InvalidBatch


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes that fit together."""

    n_ctx: int  # cells of memory, all streams together
    capacity: int  # cells of one stream
    n_batch: int  # tokens of the largest batch
    n_ubatch: int  # tokens of the largest ubatch
    n_seq_max: int
    unified: bool  # one stream shared by all sequences, or one for each
    n_outputs_max: int
    n_outputs_max_per_seq: int
    n_rs_seq: int  # recurrent snapshots kept per sequence beside the newest state
    causal: bool

    @property
    def n_streams(self) -> int:
        return 1 if self.unified else self.n_seq_max

    @property
    def n_seq_limit(self) -> int:
        """Sequence ids of a batch are below it; a unified stream takes any id (C-4)."""
        return MAX_SEQ if self.unified else self.n_seq_max


def settle(
    *,
    n_ctx: int = 512,
    n_batch: int = 2048,
    n_ubatch: int = 512,
    n_seq_max: int = 1,
    unified: bool = False,
    n_outputs_max: int = 0,
    n_outputs_max_per_seq: int = 0,
    n_rs_seq: int = 0,
    causal: bool = True,
    has_encoder: bool = False,
) -> Settings:
    """Settings from what was asked for; 0 stands for "as many as make sense", where that has a meaning.

    BadOption where one is no whole number, InvalidBatch where one is out of range or they cannot go together.
    """
    asked = {
        "n_ctx": n_ctx,
        "n_batch": n_batch,
        "n_ubatch": n_ubatch,
        "n_seq_max": n_seq_max,
        "n_outputs_max": n_outputs_max,
        "n_outputs_max_per_seq": n_outputs_max_per_seq,
        "n_rs_seq": n_rs_seq,
    }
    _check_counts(asked)
    n_seqs = max(1, n_seq_max)
    batch = min(n_batch, n_ctx) if causal else n_batch  # limited to the n_ctx asked for, before that is rounded (C-5)
    ubatch = min(n_ubatch or batch, batch)
    outputs = batch if has_encoder or n_outputs_max == 0 else n_outputs_max
    if outputs < n_seqs:
        raise _refused("n_outputs_max", f"{outputs} outputs are fewer than {n_seqs} sequences")  # C-6
    if n_rs_seq > 0 and ubatch <= n_rs_seq + 1:
        raise _refused("n_rs_seq", f"{n_rs_seq} snapshots need ubatches of more than {n_rs_seq + 1} tokens")  # C-7
    cells, capacity = _cells(n_ctx, n_seqs, unified=unified)
    return Settings(
        n_ctx=cells,
        capacity=capacity,
        n_batch=batch,
        n_ubatch=ubatch,
        n_seq_max=n_seqs,
        unified=unified,
        n_outputs_max=outputs,
        n_outputs_max_per_seq=min(n_outputs_max_per_seq or outputs, outputs),
        n_rs_seq=n_rs_seq,
        causal=causal,
    )


def _check_counts(asked: dict[str, int]) -> None:
    for name, value in asked.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadOption(f"{name} is {value!r}; it must be a whole number")
        least = 1 if name in ("n_ctx", "n_batch") else 0
        if value < least:
            raise _refused(name, f"it is {value}, and must be at least {least}")
    if asked["n_seq_max"] > MAX_SEQ:
        raise _refused("n_seq_max", f"{asked['n_seq_max']} sequences are more than {MAX_SEQ}")  # C-2


def _cells(n_ctx: int, n_seqs: int, *, unified: bool) -> tuple[int, int]:
    """Cells in all, and of one stream; both in steps of 256 (C-3)."""
    cells = round_up(n_ctx, CELL_STEP)
    if unified:
        return cells, cells
    capacity = round_up(cells // n_seqs, CELL_STEP)
    return capacity * n_seqs, capacity


def _refused(name: str, why: str) -> InvalidBatch:
    return InvalidBatch(f"{name}: {why}", reason=name)
