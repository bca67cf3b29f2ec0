"""Vectors of the ubatch executor (UX): a memory and a run that may fail, and what is left to see afterwards."""

from typing import Any

from ostinato.decoder.cells.compute_executor import ComputeExecutor
from ostinato.decoder.cells.ubatch_executor import UbatchExecutor
from ostinato.errors import DecodeError, InternalError
from tests.vectors.compute_executor import OK, Recorder
from tests.vectors.ubatches import ubatch_of


class Memory:
    """A cursor that counts, and fails where told."""

    n_kv = 256

    def __init__(self, *, fail_apply: bool = False, fail_roll_back: bool = False) -> None:
        self.n_applied = 0
        self.n_roll_backs = 0
        self._fail_apply = fail_apply
        self._fail_roll_back = fail_roll_back

    def apply(self) -> None:
        self.n_applied += 1
        if self._fail_apply:
            raise ValueError("the cells are gone")

    def roll_back(self) -> None:
        self.n_roll_backs += 1
        if self._fail_roll_back:
            raise ValueError("the cells are still gone")


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    if op != "execute":
        raise ValueError(f"{op!r} is no operation of the ubatch executor")
    memory = Memory(fail_apply=given.get("fail_memory_apply", False), fail_roll_back=given.get("rollback_fails", False))
    stages = Recorder(given.get("fail_stage"), None, reused=False)
    ubatch = ubatch_of([[0]] * given.get("produced", given["expected_outputs"]))
    computing = ComputeExecutor(batch=2, single=1)
    result: dict[str, Any] = {"code": OK}
    try:
        UbatchExecutor().execute(
            memory, lambda: computing.execute(ubatch, stages).rows, expected=given["expected_outputs"]
        )
    except DecodeError as error:
        result = {"code": error.code}
    except InternalError:
        result = {"fatal": True}
    return {**result, "rollback_attempts": memory.n_roll_backs, "compute_called": bool(stages.ran)}
