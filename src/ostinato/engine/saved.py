"""Saved sequences: from the engine's pages to bytes, and back. Tokens still in pages are not computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.cache.state_bytes import describe
from ostinato.decoder.paged_state import PagedState
from ostinato.engine.engine import Engine
from ostinato.engine.work import PageCopyJob, WorkSpec, WorkText
from ostinato.errors import BadFile


def save_sequence(engine: Engine, ids: Sequence[int], note: Mapping[str, Any]) -> bytes:
    """The state of these tokens as bytes, with their ids and a note; BadInput where there are no tokens."""
    state = _state(engine)
    _copied(engine, ids, PageCopyJob(lambda pages, slot: state.read(pages, slot, len(ids)), computes=True))
    return state.save({**note, "ids": list(ids)})


def load_sequence(engine: Engine, data: bytes) -> list[int]:
    """Load a saved sequence into pages, for the next request with `resume`; returns its tokens."""
    ids = (describe(data).note or {}).get("ids")
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise BadFile("this state does not say which tokens it holds; save it again")
    state = _state(engine)
    state.load(data, len(ids))
    _copied(engine, ids, PageCopyJob(state.write, computes=False))
    return ids


def largest_state_bytes(engine: Engine) -> int:
    """An upper bound for the size of any saved state of this engine."""
    return _state(engine).largest


def _state(engine: Engine) -> PagedState:
    return PagedState(engine.runner.model.shape, engine.runner.sequence_copy(), engine.context)


def _copied(engine: Engine, ids: Sequence[int], job: PageCopyJob) -> None:
    n = len(ids)
    for _ in engine.work(WorkSpec([WorkText(ids, range(n, n))], copy=job)):
        pass
