"""A runner of the backend that was chosen, or once of the mode below it: the one place where an engine falls back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.engine.choose import backend_for, backend_of
from ostinato.errors import HardwareCannot

if TYPE_CHECKING:
    from ostinato.backends.base import Settled
    from ostinato.backends.runner import Runner
    from ostinato.backends.torch.model import Model


def open_runner(model: Model, settled: Settled, *, outbox_entries: int | None = None) -> Runner:
    """Open a model as it was settled. What `auto` chose and cannot be built is not tried again: the mode below it is,
    and says so (E-57)."""
    try:
        return backend_of(settled).open(model, settled, outbox_entries=outbox_entries)
    except HardwareCannot as error:
        if settled.fallback is None:
            raise
        lower = backend_for(settled.fallback, settled.kind)
        instead = settled.instead(settled.fallback, lower.name, str(error))
    return lower.open(model, instead, outbox_entries=outbox_entries)
