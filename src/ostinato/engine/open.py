"""Opens a runner of the chosen backend, or once of the mode below: the one place where an engine falls back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.engine.choose import backend_for, backend_of
from ostinato.errors import HardwareCannot

if TYPE_CHECKING:
    from ostinato.backends.base import Settled
    from ostinato.backends.runner import Runner
    from ostinato.models.blocks import LoadedModel


def open_runner(model: LoadedModel, settled: Settled, *, outbox_entries: int | None = None) -> Runner:
    """Open a model as it was settled. If `auto` chose a mode that cannot be built, the mode below it is opened instead,
    and the reason is recorded (E-57)."""
    try:
        return backend_of(settled).open(model, settled, outbox_entries=outbox_entries)
    except HardwareCannot as error:
        if settled.fallback is None:
            raise
        lower = backend_for(settled.fallback, settled.kind)
        instead = settled.instead(settled.fallback, lower.name, str(error))
    return lower.open(model, instead, outbox_entries=outbox_entries)
