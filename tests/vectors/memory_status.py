"""Vectors of memory statuses (MC): how two become one, and what the decoder makes of them (D-12)."""

from typing import Any

from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.batch.sanitizer import sanitize
from ostinato.decoder.batch.splitter import Splitter
from ostinato.decoder.cells.memory.coordinator import Coordinator, prepare_with_retry
from ostinato.decoder.cells.memory.cursor import PreparedBatch
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.status import Status, combine
from ostinato.errors import DecodeError
from tests.vectors.sanitizer import N_VOCAB


class Scripted(Coordinator):
    """A memory that answers as it was told to."""

    def __init__(self, prepare: list[str], optimise: str) -> None:
        super().__init__(KVCache(8, n_seq_max=1, unified=True))
        self._answers = iter(prepare)
        self._optimise = Status(optimise)
        self.prepare_calls = 0
        self.optimise_calls = 0

    def prepare_batch(self, splitter: Splitter, n_ubatch: int, all_outputs: bool) -> PreparedBatch:
        self.prepare_calls += 1
        return PreparedBatch((), status=Status(next(self._answers)))

    def prepare_update(self, optimise: bool) -> Status:
        self.optimise_calls += optimise
        return self._optimise


def classify(prepare: list[str], optimise: str) -> dict[str, Any]:
    """What a decode of two tokens comes to on a memory that gives these answers."""
    memory = Scripted(prepare, optimise)
    splitter = Splitter(sanitize(Batch(token=[1, 2]), n_vocab=N_VOCAB, n_seq_limit=1))
    code = 0
    try:
        prepare_with_retry(memory, splitter, 2, False)
    except DecodeError as error:
        code = error.code
    return {"code": code, "prepare_calls": memory.prepare_calls, "optimise_calls": memory.optimise_calls}


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    if op == "combine":
        status = combine(Status(given["a"]), Status(given["b"]))
        return {"status": status.value, "is_fail": status.is_failure}
    if op == "classify":
        return classify(given["prepare"], given["optimise"])
    raise ValueError(f"{op!r} is no operation on statuses")
