"""Merges the pages of several engines, replicas or models: metrics with a label, health, and slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final


def merged_metrics(pages: Mapping[str, str], label: str = "replica") -> bytes:
    """Prometheus pages by the name of their engine as one page, each sample with this name as its label; without one
    where the name is empty.

    >>> print(merged_metrics({"a": "# TYPE n gauge\\nn 1.0\\n", "b": "# TYPE n gauge\\nn{x=\\"y\\"} 2.0\\n"}).decode())
    # TYPE n gauge
    n{replica="a"} 1.0
    n{replica="b",x="y"} 2.0
    <BLANKLINE>
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, page in pages.items():
        mark = f'{label}="{_escaped(name)}"' if name else ""
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, mark))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "".join(line + "\n" for line in lines).encode()


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _labelled(sample: str, mark: str) -> str:
    if not mark:
        return sample
    name, brace, value = sample.partition("{")
    if brace:
        return f"{name}{{{mark},{value}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{mark}}} {value}"


def merged_health(facts: Sequence[dict[str, Any]], *, draining: bool, name: str = "replicas") -> dict[str, Any]:
    """The health of one engine that is ready, with that of all under `name` and their slots added up."""
    ready = [one for one in facts if one["ready"]]
    hoped = [one for one in facts if one.get("status") != "failed"]
    first = dict((ready or hoped or facts or [{"model": None}])[0])
    for own in _OWN:
        first.pop(own, None)
    summed = {count: sum(one.get(count, 0) for one in facts) for count in ("slots", "slots_busy", "waiting")}
    if draining:
        first |= {"status": "draining", "ready": False, "why": "the server is being stopped"}
    elif not ready:
        why = first.get("why") or "no engine is ready yet"
        first |= {"status": "loading" if hoped or not facts else "failed", "ready": False, "why": why}
    return {**first, **summed, name: list(facts)}


# Of one engine, and not of the whole server.
_OWN: Final = (
    "replica",
    "pid",
    "id",
    "state",
    "requests",
    "requests_waiting",
    "loads",
    "unloads",
    "unloaded_for",
    "bytes",
)


def merged_slots(slots: Sequence[dict[str, Any]], name: str = "replica") -> dict[str, Any]:
    """Every slot with its engine's name; counts added up."""
    with_name = [{**slot, name: one[name]} for one in slots for slot in one["slots"]]
    counts = {count: sum(one.get(count) or 0 for one in slots) for count in ("waiting", "tokens", "steps")}
    kinds = ("all", "used", "cached")
    pages = {kind: sum((one.get("pages") or {}).get(kind, 0) for one in slots) for kind in kinds}
    gaps = next((one["gaps"] for one in slots if one.get("gaps")), None)
    return {"slots": with_name, "gaps": gaps, "pages": pages, **counts}
