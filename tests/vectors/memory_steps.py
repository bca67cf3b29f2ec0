"""The steps that vectors of any memory share: decode without a model, sequence operations, updates."""

from typing import Any

from ostinato.decoder.batch.sanitizer import sanitize
from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.cells.memory.coordinator import Coordinator
from ostinato.decoder.cells.memory.cursor import PreparedBatch
from ostinato.errors import InvalidBatch
from tests.vectors.sanitizer import N_VOCAB, batch_of

SEQUENCE_OPS = ("seq_rm", "seq_cp", "seq_keep", "seq_add", "seq_div", "clear")


def splitter_of(memory: Coordinator, batch: dict[str, Any], *, limit: int, output_all: bool = False) -> Splitter:
    """The batch, sanitized against what memory holds."""
    clean = sanitize(batch_of(batch), n_vocab=N_VOCAB, n_seq_limit=limit, output_all=output_all, memory=memory)
    return Splitter(clean)


def apply_all(cursor: PreparedBatch) -> None:
    """Put every ubatch of a prepared batch into memory."""
    more = bool(cursor.ubatches)
    while more:
        cursor.apply()
        more = cursor.advance()


def sequence_op(memory: Coordinator, name: str, *arguments: Any) -> Any:
    """One sequence operation, or "invalid"; the file's -1 for "any sequence" becomes None."""
    if name == "seq_rm":
        s, p0, p1 = arguments
        arguments = (None if s < 0 else s, p0, p1)
    try:
        return getattr(memory, name)(*arguments)
    except InvalidBatch:
        return "invalid"


def update(memory: Coordinator) -> str:
    """Carry out what is pending; the status word."""
    pending = memory.prepare_update(optimise=False)
    memory.apply_update()
    return pending.value


def seq_pos(memory: Coordinator, limit: int) -> dict[int, list[int | None]]:
    """The extremes of every sequence that memory holds."""
    return {s: [memory.pos_min(s), memory.pos_max(s)] for s in range(limit) if memory.pos_max(s) is not None}
