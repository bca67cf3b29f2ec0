"""Saved sequences: from the engine's pages to bytes, and back. Tokens still in pages are not computed again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.cache.state_bytes import describe
from ostinato.decoder.paged_state import PagedState
from ostinato.engine.engine import Engine
from ostinato.engine.request import HeldSequence
from ostinato.engine.work import PageCopyJob, WorkSpec, WorkText
from ostinato.errors import BadFile


def save_sequence(engine: Engine, held: HeldSequence, note: Mapping[str, Any]) -> bytes:
    """The state of these tokens as bytes, with their ids and a note; BadInput where there are no tokens."""
    state, n = _state(engine, held.rope_set), len(held.tokens)
    _copied(engine, held, PageCopyJob(lambda pages, slot: state.read(pages, slot, n), computes=True))
    return state.save({**note, "ids": held.tokens})


def load_sequence(engine: Engine, data: bytes) -> HeldSequence:
    """Load a saved sequence into pages, for the next request with `resume` of the same rope set; returns it."""
    header = describe(data)
    ids = (header.note or {}).get("ids")
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise BadFile("this state does not say which tokens it holds; save it again")
    is_long = any(section.layout.get("rope_set") == 1 for section in header.sections)
    held = HeldSequence(ids, int(is_long and engine.runner.model.shape.n_rope_sets > 1))
    state = _state(engine, held.rope_set)
    state.load(data, len(ids))
    _copied(engine, held, PageCopyJob(state.write, computes=False))
    return held


def largest_state_bytes(engine: Engine) -> int:
    """An upper bound for the size of any saved state of this engine."""
    return _state(engine, 0).largest


def _state(engine: Engine, rope_set: int) -> PagedState:
    return PagedState(engine.runner.model.shape, engine.runner.sequence_copy(), engine.context, rope_set)


def _copied(engine: Engine, held: HeldSequence, job: PageCopyJob) -> None:
    n = len(held.tokens)
    for _ in engine.work(WorkSpec([WorkText(held.tokens, range(n, n), rope_set=held.rope_set)], copy=job)):
        pass
