"""What a server says of itself: which models it has, whether they are ready, slots and metrics.

`ServerStatus` is what the application asks for its pages; here it is that of one engine's process, in
`front_status.py` that of a front with several.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from ostinato.serve.ollama_models import listed, running
from ostinato.serve.service import Service
from ostinato.serve.settings import aliases_of


class ModelCard(NamedTuple):
    """A model in a list. `context`: None as long as it has not been loaded."""

    id: str
    created: int
    context: int | None
    aliases: list[str]


class ServerStatus(Protocol):
    """The pages of a server."""

    def cards(self) -> list[ModelCard]:
        """Every model that is served."""

    def card(self, name: str) -> ModelCard:
        """The model of this name; refused if there is none."""

    async def health(self) -> dict[str, Any]:
        """What runs, and whether requests are taken, as `ready`."""

    async def slots(self) -> dict[str, Any]:
        """The requests in slots, KV pages, gaps between tokens."""

    async def metrics(self) -> bytes:
        """For Prometheus."""

    async def tags(self) -> list[dict[str, Any]]:
        """Every model that is served, as Ollama lists it."""

    async def loaded(self) -> list[dict[str, Any]]:
        """Every model that is in memory, as Ollama lists it."""


class EngineStatus:
    """The pages of one engine's process."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def cards(self) -> list[ModelCard]:
        return [self._card(self._service.model_id)]

    def card(self, name: str) -> ModelCard:
        self._service.check_name(name)
        return self._card(self._service.answers_as(name))

    def _card(self, id: str) -> ModelCard:
        llm = self._service.model
        aliases = aliases_of(self._service.model_names)
        return ModelCard(id, self._service.started, None if llm is None else llm.context, aliases)

    async def health(self) -> dict[str, Any]:
        return self._service.health()

    async def slots(self) -> dict[str, Any]:
        stats, llm = self._service.stats(), self._service.model
        if stats is None or llm is None:
            return {"slots": [], "waiting": 0, "gaps": None}
        return {
            "slots": llm.slots(),
            "waiting": stats.waiting,
            "gaps": stats.gaps,
            "pages": {"all": stats.pages, "used": stats.pages_leased, "cached": stats.pages_cached},
            "tokens": stats.tokens,
            "steps": stats.steps,
        }

    async def metrics(self) -> bytes:
        return self._service.metrics.page()

    async def tags(self) -> list[dict[str, Any]]:
        return [await self._service.in_thread(listed, self._service)]

    async def loaded(self) -> list[dict[str, Any]]:
        llm = self._service.model
        return [] if llm is None else [await self._service.in_thread(running, self._service, llm)]
