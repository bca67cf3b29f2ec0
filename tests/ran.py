"""What of bench/gpu_check.py has run on a card, by the data of the lab's notes."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from bench.note import DATA

# Checks whose outcomes have other names.
_SHAPES: Final = ("1b-bf16", "8b-bf16", "1b-q4_k_m", "8b-q4_k_m")
_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **{f"speed {shape}": (f"decode-{shape}",) for shape in _SHAPES},
        **{f"tape tape-speed-llama-{shape}": (f"tape-{shape}",) for shape in _SHAPES},
        **{f"tape tape-prompts-llama-{shape}": (f"tape-prompts-{shape}",) for shape in _SHAPES},
        "speed bandwidth": ("attention", "product"),
        "speed fusions": ("fusion",),
        "tape tape-sanitizer": ("sanitizer",),
        "lab lab-starts": ("lab-right", "lab-persistent"),
        "lab lab-programs": ("lab-program",),
    }
)
# Runs that left a line in a note, and no outcome of this name in its data: gpu-stress.md, gpu-families.md.
_NOTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{f"stress {name}-loop": "2026-11-15" for name in ("engines", "stopped", "busy-cores", "host-time")},
        "stress long-prompt": "2026-11-15",
        "lab session": "2026-11-18",
    }
)


class Ran(NamedTuple):
    """One outcome of a part."""

    part: str
    name: str
    verdict: str
    date: str
    facts: dict[str, Any]
    run: int = 0  # which line of data it is from: one line may have several outcomes of a name


@cache
def outcomes() -> tuple[Ran, ...]:
    """What ran as the card that it was on, the oldest note first."""
    return tuple(_outcomes())


def _outcomes() -> Iterator[Ran]:
    notes = [json.loads(line) for path in sorted(DATA.glob("*.jsonl")) for line in path.read_text("utf-8").splitlines()]
    for run, note in enumerate(sorted(notes, key=lambda one: one["date"])):
        _, found, rest = note["command"].partition("gpu_check --part ")
        if found and "as_if" not in note:
            for one in note.get("outcomes", ()):
                yield Ran(rest.split()[0], one["name"], one["verdict"], note["date"], one.get("facts", {}), run)


def last_run(check: str) -> str | None:
    """When a check (part and name) last ran on a card, and whether it failed; None where it has not run. It may have
    missed a figure."""
    part, name = check.split(" ")
    names = _NAMES.get(check, (name,))
    found = [one for one in outcomes() if one.part == part and _is_of(one.name, names) and one.verdict != "SKIP"]
    latest = {one.name: one.run for one in found}
    if failed := [one.date for one in found if one.verdict == "FAIL" and one.run == latest[one.name]]:
        return f"failed {max(failed)}"
    return max([*(one.date for one in found), *filter(None, [_NOTED.get(check)])], default=None)


def _is_of(outcome: str, names: tuple[str, ...]) -> bool:
    return any(outcome == name or outcome.startswith((f"{name}-", f"{name} ")) for name in names)
