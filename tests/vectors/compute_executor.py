"""Vectors of the compute executor (CX): stages that write down that they ran, one of which may fail."""

from typing import Any

from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.compute_executor import Abort, ComputeExecutor
from ostinato.decoder.cells.graphs import PreparedGraph
from ostinato.errors import Aborted, DecodeError
from tests.vectors.ubatches import ubatch_of

OK = 0
CLASSES: dict[str, type[DecodeError]] = {"aborted": Aborted}


class Recorder:
    """Stages over a graph that is only a name."""

    def __init__(self, fail_stage: str | None, fail_class: str | None, reused: bool) -> None:
        self.ran: list[str] = []
        self.n_threads: list[int] = []
        self.dropped = 0
        self._fail_stage = fail_stage
        self._fail_class = fail_class
        self._reused = reused

    def _do(self, stage: str) -> None:
        self.ran.append(stage)
        if stage == self._fail_stage and self._fail_class is None:
            raise ValueError(f"{stage} does not work today")
        if stage == self._fail_stage and self._fail_class is not None:
            raise CLASSES[self._fail_class](f"{stage} was stopped", reason=stage)

    def validate(self, ubatch: Ubatch) -> None:
        self._do("validate")

    def prepare(self, ubatch: Ubatch) -> PreparedGraph[str]:
        self._do("prepare")
        return PreparedGraph("graph", self._reused)

    def allocate(self, graph: str) -> None:
        self._do("alloc")

    def bind(self, graph: str, ubatch: Ubatch) -> None:
        self._do("bind")

    def run(self, graph: str, *, n_threads: int, abort: Abort) -> None:
        self.n_threads.append(n_threads)
        self._do("run")

    def extract(self, graph: str, ubatch: Ubatch) -> int:
        self._do("extract")
        return ubatch.n_outputs

    def drop(self) -> None:
        self.dropped += 1


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    if op != "execute":
        raise ValueError(f"{op!r} is no operation of the compute executor")
    stages = Recorder(given.get("fail_stage"), given.get("fail_class"), given.get("reused", False))
    try:
        ComputeExecutor(batch=2, single=1).execute(ubatch_of([[0]]), stages)
    except DecodeError as error:
        return {"code": error.code, "stages_run": stages.ran}
    return {"code": OK, "stages_run": stages.ran}
