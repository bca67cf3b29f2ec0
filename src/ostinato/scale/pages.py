"""Merges the pages of several replicas: metrics with a replica's label, health, and slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def merged_metrics(pages: Mapping[str, str]) -> bytes:
    """Prometheus pages by the name of their replica as one page, each sample with its replica's label.

    >>> print(merged_metrics({"a": "# TYPE n gauge\\nn 1.0\\n", "b": "# TYPE n gauge\\nn{x=\\"y\\"} 2.0\\n"}).decode())
    # TYPE n gauge
    n{replica="a"} 1.0
    n{replica="b",x="y"} 2.0
    <BLANKLINE>
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, replica))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "".join(line + "\n" for line in lines).encode()


def _labelled(sample: str, replica: str) -> str:
    name, _, value = sample.partition(" ") if "{" not in sample else sample.partition("{")
    if "{" in sample:
        return f'{name}{{replica="{replica}",{value}'
    return f'{name}{{replica="{replica}"}} {value}'


def merged_health(facts: Sequence[dict[str, Any]], *, draining: bool) -> dict[str, Any]:
    """The health of one replica that is ready, with that of all replicas under `replicas` and their slots added up."""
    ready = [one for one in facts if one["ready"]]
    first = dict((ready or facts or [{"model": None}])[0])
    for name in ("replica", "pid"):
        first.pop(name, None)
    summed = {name: sum(one.get(name, 0) for one in facts) for name in ("slots", "slots_busy", "waiting")}
    if draining:
        first |= {"status": "draining", "ready": False, "why": "the server is being stopped"}
    elif not ready:
        first |= {"status": "loading", "ready": False, "why": first.get("why") or "no replica is ready"}
    return {**first, **summed, "replicas": list(facts)}


def merged_slots(slots: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every slot with its replica's name; counts added up."""
    with_replica = [{**slot, "replica": one["replica"]} for one in slots for slot in one["slots"]]
    counts = {name: sum(one.get(name) or 0 for one in slots) for name in ("waiting", "tokens", "steps")}
    names = ("all", "used", "cached")
    pages = {name: sum((one.get("pages") or {}).get(name, 0) for one in slots) for name in names}
    gaps = next((one["gaps"] for one in slots if one.get("gaps")), None)
    return {"slots": with_replica, "gaps": gaps, "pages": pages, **counts}
