"""The pages of a front: those of its models' processes merged, and which models are in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ostinato import __version__
from ostinato.serve import merged
from ostinato.serve.ollama_models import listed_file
from ostinato.serve.served_models import ServedModel, ServedModels
from ostinato.serve.service import Service
from ostinato.serve.settings import aliases_of, name_in_answer
from ostinato.serve.status import ModelCard
from ostinato.serve.upstream import UpstreamGone, asked

_ANSWER_S: Final = 2.0  # for a worker to report


class FrontStatus:
    """The pages of a front. A worker that does not answer in time is left out of them."""

    def __init__(self, service: Service, models: ServedModels, restarts: dict[str, int]) -> None:
        """`restarts`: how often a front before this one ended, by reason."""
        self._service, self._models, self._restarts = service, models, restarts
        self._tags: dict[str, dict[str, Any]] = {}  # of models that were loaded once, by id
        service.metrics.register(ModelCounts(models))

    def cards(self) -> list[ModelCard]:
        return [self._card(model) for model in self._models.all]

    def card(self, name: str) -> ModelCard:
        model = self._models.find(name)
        return self._card(model)._replace(id=name_in_answer(name, model.names))

    def _card(self, model: ServedModel) -> ModelCard:
        return ModelCard(model.id, self._service.started, model.facts.get("context"), aliases_of(model.names))

    async def health(self) -> dict[str, Any]:
        service, models = self._service, self._models.all
        reports = await self._reports("/health")
        facts = [{**reports.get(model.id, {}), **_health_of(model)} for model in models]
        restarts: Counter[str] = Counter(self._restarts)
        for model in models:
            restarts.update(model.restarts)
        draining = service.state == "draining"
        made = merged.merged_health(facts, draining=draining, name="models")
        if not draining and self._models.wait_for_requests:
            made |= {
                "status": "ok",
                "ready": True,
                "why": "no model is in memory; a request loads the one that it names",
            }
        scripted = {"scripted": True} if service.options.script else {}
        return {"version": __version__, **made, "restarts": dict(restarts), **scripted}

    async def slots(self) -> dict[str, Any]:
        reports = await self._reports("/slots")
        made = merged.merged_slots([{"model": id, **page} for id, page in reports.items()], name="model")
        own = {id: {name: page.get(name) for name in ("waiting", "pages", "gaps")} for id, page in reports.items()}
        return {**made, "models": [{**model.report(), **own.get(model.id, {})} for model in self._models.all]}

    async def metrics(self) -> bytes:
        pages = {id: page.decode() for id, page in (await self._pages("/metrics")).items()}
        return merged.merged_metrics({**pages, "": self._service.metrics.page().decode()}, "model")

    async def tags(self) -> list[dict[str, Any]]:
        for id, page in (await self._reports("/api/tags")).items():
            self._tags[id] = page["models"][0]
        return [self._tags.get(model.id) or await self._of_file(model) for model in self._models.all]

    async def _of_file(self, model: ServedModel) -> dict[str, Any]:
        path = self._service.options.models[model.index]
        return await self._service.in_thread(listed_file, model.id, path, self._service.started)

    async def loaded(self) -> list[dict[str, Any]]:
        return [one for page in (await self._reports("/api/ps")).values() for one in page["models"]]

    async def _reports(self, path: str) -> dict[str, dict[str, Any]]:
        return {id: msgspec.json.decode(page) for id, page in (await self._pages(path)).items()}

    async def _pages(self, path: str) -> dict[str, bytes]:
        """A page of each model that is in memory, by the model's id."""
        ready = [model for model in self._models.all if model.state == "ready"]
        found = await asyncio.gather(*(_page(model, path) for model in ready))
        return {model.id: page for model, page in zip(ready, found, strict=True) if page is not None}


async def _page(model: ServedModel, path: str) -> bytes | None:
    try:
        async with asyncio.timeout(_ANSWER_S), asked(model.socket, "GET", path.encode()) as answer:
            return await answer.body() if answer.status == 200 else None
    except (UpstreamGone, TimeoutError):
        return None


def _health_of(model: ServedModel) -> dict[str, Any]:
    """What the front knows of a model."""
    ready = model.state == "ready"
    return {"model": model.id, **model.report(), "status": "ok" if ready else model.state, "ready": ready}


class ModelCounts(Collector):
    """What the front counts of its models, at the time of the scrape."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        models = self._models.all
        gauges: dict[str, tuple[str, list[int]]] = {
            "model_loaded": ("Whether the model is in memory.", [model.state == "ready" for model in models]),
            "model_requests": ("Requests that the model answers now.", [model.n_running for model in models]),
            "model_requests_waiting": ("Requests that wait until it is loaded.", [model.n_waiting for model in models]),
        }
        for name, (words, values) in gauges.items():
            gauge = GaugeMetricFamily(f"ostinato_{name}", words, labels=["model"])
            for model, value in zip(models, values, strict=True):
                gauge.add_metric([model.id], float(value))
            yield gauge
        counts: dict[str, tuple[str, list[int]]] = {
            "model_loads": ("How often the model was loaded.", [model.n_loads for model in models]),
            "model_unloads": ("How often it made room for another.", [model.n_unloads for model in models]),
            "model_failures": ("How often it could not be loaded.", [model.n_failures for model in models]),
        }
        for name, (words, values) in counts.items():
            count = CounterMetricFamily(f"ostinato_{name}", words, labels=["model"])
            for model, value in zip(models, values, strict=True):
                count.add_metric([model.id], float(value))
            yield count
        restarts = CounterMetricFamily(
            "ostinato_worker_restarts", "Workers that ended and were replaced, by reason.", labels=["model", "reason"]
        )
        for model in models:
            for reason, n in model.restarts.items():
                restarts.add_metric([model.id, reason], float(n))
        yield restarts
