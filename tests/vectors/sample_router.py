"""Vectors of the sample router (SR): raw logits per ubatch, rows per sequence, the limit of outputs."""

from typing import Any

from ostinato.decoder.cells.sample_router import SampleRouter
from ostinato.errors import InvalidBatch
from tests.decoder.cells.samplers import GreedySampler
from tests.vectors.sanitizer import batch_of, refused
from tests.vectors.ubatches import ubatches_of


def router_of(given: dict[str, Any]) -> SampleRouter:
    router = SampleRouter()
    for sequence in given["samplers"]:
        router.register(sequence, GreedySampler())
    return router


def raw(given: dict[str, Any]) -> dict[str, Any]:
    router = router_of(given)
    return {"raw": [router.wants_raw(ubatch) for ubatch in ubatches_of(given)]}


def rows(given: dict[str, Any]) -> dict[str, Any]:
    router = router_of(given)
    owned: dict[int, list[int]] = {}
    first_row = 0
    for ubatch in ubatches_of(given):
        for sequence, here in router.rows(ubatch, first_row).items():
            owned.setdefault(sequence, []).extend(here)
        first_row += ubatch.n_outputs
    return {"rows": owned}


def limit(given: dict[str, Any]) -> dict[str, Any]:
    try:
        router_of(given).check_limit(batch_of(given["batch"]), limit=given["limit"], output_all=given["output_all"])
    except InvalidBatch as error:
        return refused(error)
    return {"ok": True}


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    return {"raw": raw, "rows": rows, "limit": limit}[op](given)
