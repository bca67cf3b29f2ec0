"""Prometheus metrics: counters and histograms of requests, and the engine's own counts, read at each scrape.

Names and meanings are listed in docs/serving.md. No label or value contains any part of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ostinato.engine.stats import Stats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAPS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class EngineCounts(Collector):
    """The engine's counts at the time of the scrape; none while there is no engine."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        busy = stats.live + stats.prefilling
        gauges = {
            "slots": ("Requests that can be decoded at once.", stats.n_slots),
            "slots_live": ("Slots that decode now.", stats.live),
            "slots_prefill": ("Slots whose prompt is being computed.", stats.prefilling),
            "slots_free": ("Slots that are free.", max(0, stats.n_slots - busy)),
            "requests_waiting": ("Requests in the queue.", stats.waiting),
            "kv_pages": ("Pages of the KV cache.", stats.pages),
            "kv_pages_used": ("Pages that requests hold.", stats.pages_leased),
            "kv_pages_cached": ("Pages that keep the beginning of an earlier prompt.", stats.pages_cached),
            "kv_use_ratio": ("Share of the KV cache's pages that requests hold.", stats.pages_leased / stats.pages),
        }
        if stats.resident_bytes is not None:
            gauges["resident_bytes"] = ("Memory that the worker uses now, mapped files included.", stats.resident_bytes)
        for name, (words, value) in gauges.items():
            yield GaugeMetricFamily(f"ostinato_{name}", words, value=float(value))
        counts = {
            "steps": ("Steps of the decode loop.", stats.steps),
            "prompt_tokens_computed": ("Tokens of prompts that were computed.", stats.prompt_tokens),
            "prompt_tokens_cached": ("Tokens of prompts that were found in memory.", stats.cached_tokens),
            "loop_triggers": ("Launches of the whole decode loop.", stats.triggers),
            "loop_launches": ("Launches of graphs and kernels by the host.", stats.launches),
            "loop_instantiations": ("Graphs made.", stats.instantiations),
        }
        for name, (words, value) in counts.items():
            yield CounterMetricFamily(f"ostinato_{name}", words, value=float(value))


class Metrics:
    """All metrics, in a registry of their own."""

    def __init__(self, stats: Callable[[], Stats | None] | None) -> None:
        """`stats`: None in a process without an engine, whose page has no tokens."""
        page = self._registry = CollectorRegistry(auto_describe=False)
        tokens_page = None if stats is None else page
        if stats is not None:
            page.register(EngineCounts(stats))

        def counter(name: str, words: str) -> Counter:
            return Counter(f"ostinato_{name}", words, registry=tokens_page)

        def histogram(name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"ostinato_{name}", words, registry=tokens_page, buckets=buckets)

        labels = ("path", "outcome")
        self.requests = Counter("ostinato_requests", "Requests by path and outcome.", labels, registry=page)
        whole = "From a request's first byte to its answer's last."
        self.duration = Histogram("ostinato_request_seconds", whole, registry=page, buckets=_SECONDS)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.tokens = counter("generated_tokens", "Tokens of answers.")
        self.host_seconds = counter("host_token_seconds", "The server's own time with tokens of answers.")
        self.wait = histogram("time_in_queue_seconds", "From the request to the start of its prompt.", _SECONDS)
        self.first_token = histogram("time_to_first_token_seconds", "From asking to the first token.", _SECONDS)
        self.gap = histogram("token_gap_seconds", "Between two tokens of an answer, by the device's clock.", _GAPS)

    def register(self, more: Collector) -> None:
        """Add further metrics to the page."""
        self._registry.register(more)

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
