"""One measurement as a record, and the lines of docs/lab/data: enough to repeat a run, and enough to doubt it.

    python -m bench.cpu | python -m bench.note cpu-native    # append the note to docs/lab/data/cpu-native.jsonl

A figure of a line has an address, which `value` reads: `gpu-speed.jsonl:1/outcomes/first-token/value ~ ([\\d.]+) s`.
docs/lab/index.md says how a note is written.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from ostinato.backends.machine import cpu_name as cpu_name

DATA: Final = Path(__file__).parents[1] / "docs" / "lab" / "data"
FIELDS: Final = ("date", "question", "command", "commit", "device", "versions")


@dataclass(frozen=True, slots=True)
class Series:
    """What one engine reached at one task, run by run, in the order of the rounds."""

    engine: str
    task: str
    unit: str
    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)


def ratio(ours: Series, theirs: Series) -> tuple[float, float, float]:
    """Median, least and largest of ours / theirs, round by round: both sides of a ratio saw the same minute."""
    pairs = [a / b for a, b in zip(ours.runs, theirs.runs, strict=True)]
    return statistics.median(pairs), min(pairs), max(pairs)


def commit(tree: Path = Path()) -> str:
    """The commit of a tree, or "unknown" where there is no repository or no git."""
    git = ["git", "-C", str(tree)]
    try:
        asked = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return (asked.stdout.strip() or "unknown") + ("+changes" if changed.stdout.strip() else "")


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def command(module: str) -> str:
    """The command that runs this process; a file is named without its folder."""
    words = (Path(word).name if Path(word).exists() else word for word in sys.argv[1:])
    return shlex.join(["python", "-m", module, *words])


def as_json(
    question: str, command: str, versions: Mapping[str, str], device: str | None = None, **facts: object
) -> str:
    """The note of a run as one line of JSON; the device is this machine's CPU unless given."""
    head = {
        "date": date.today().isoformat(),
        "question": question,
        "command": command,
        "commit": commit(),
        "device": device or cpu_name(),
        "versions": dict(versions),
    }
    return json.dumps(head | facts, default=_plain)


def _plain(series: Series) -> dict[str, Any]:
    return asdict(series) | {"median": round(series.median, 3)}


def append(said: Iterable[str], name: str, folder: Path = DATA) -> str:
    """Append the last note among the lines to `name`.jsonl and return the address of its line."""
    found = [note for note in map(_note, said) if note is not None]
    if not found:
        raise SystemExit("no line is a JSON object: nothing was appended")
    missing = [field for field in FIELDS if field not in found[-1]]
    if missing:
        raise SystemExit(f"the note has no {' and no '.join(missing)}: nothing was appended")
    path = folder / f"{name}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found[-1]) + "\n")
    return f"{path.name}:{len(path.read_text(encoding='utf-8').splitlines())}"


def _note(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def value(address: str, folder: Path = DATA) -> float:
    """The figure at FILE:LINE/PATH or FILE:LINE/PATH ~ PATTERN.

    A word of the path is a key of an object, or texts and whole numbers (joined by `+`) among the values of one object
    of a list, as in `series/ostinato wide+decode_tok_s/runs`. A list of numbers gives its median. The pattern finds the
    figure in a text and has one group.
    """
    path, _, pattern = address.partition(" ~ ")
    place, *words = path.split("/")
    name, _, number = place.partition(":")
    found: Any = json.loads((folder / name).read_text(encoding="utf-8").splitlines()[int(number) - 1])
    for word in words:
        found = _item(found, word, address)
    if pattern:
        match = re.search(pattern, found)
        if match is None:
            raise LookupError(f"{address}: the pattern is not in {found!r}")
        return float(match[1].replace(",", ""))
    return float(statistics.median(found) if isinstance(found, list) else found)


def _item(found: Any, word: str, address: str) -> Any:
    if isinstance(found, dict) and word in found:
        return found[word]
    items = found if isinstance(found, list) else []
    matching = [item for item in items if all(part in _words(item) for part in word.split("+"))]
    if len(matching) != 1:
        raise LookupError(f"{address}: {len(matching)} items are called {word!r}")
    return matching[0]


def _words(item: Mapping[str, Any]) -> set[str]:
    """The texts and whole numbers among the values of an object."""
    return {str(one) for one in item.values() if isinstance(one, str | int)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the file of docs/lab/data to append to, without .jsonl")
    name = parser.parse_args().name
    said = []
    for line in sys.stdin:
        print(line, end="", flush=True)
        said.append(line)
    print(f"appended docs/lab/data/{append(said, name)}; the page is docs/lab/{name}.md", file=sys.stderr)


if __name__ == "__main__":
    main()
