"""Which modes `ostinato verify` has found right on the cards of this machine: a small file in the store.

A result holds for one kind of card, one driver, one version of Ostinato and one kind of kernel, such as a family.
`auto` takes `persistent` by itself on chips and for kinds with which it ran before a release (`known_cards.py`), and
otherwise only with such a result. A file that cannot be read counts as empty, with a sentence; `ostinato verify` then
writes a new one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ostinato import __version__
from ostinato.backends.machine import Chip
from ostinato.files import store
from ostinato.options import MODES, Talk

if TYPE_CHECKING:
    from ostinato.engine.checks import VerifyReport

NEED_VERIFICATION: Final = (
    "persistent",
)  # modes that `auto` takes only where they were verified, or ran before a release
RECORDED: Final = tuple(mode for mode in MODES if mode != "eager")  # modes whose results are written down
LOCK_S: Final = 10.0
MOST_RESULTS: Final = 64


@dataclass(frozen=True, slots=True)
class VerifiedCard:
    """What a result holds for."""

    name: str
    capability: str
    driver: str
    ostinato: str = __version__
    kind: str = ""  # of the model's kernel (`kind_of_kernel`)

    @staticmethod
    def of(chip: Chip, name: str, driver: str) -> VerifiedCard:
        major, minor = chip.capability
        return VerifiedCard(name, f"{major}.{minor}", driver)


def verified_modes(card: VerifiedCard, talk: Talk) -> tuple[str, ...]:
    """The modes that are verified on a card, from low to high; `talk` gets a sentence where the file is damaged."""
    return tuple(mode for mode, kinds in verified_kinds(card, talk).items() if card.kind in kinds)


def verified_kinds(card: VerifiedCard, talk: Talk) -> dict[str, tuple[str, ...]]:
    """By mode, from low to high, the kinds of kernel that are verified on a card, whatever its own is."""
    try:
        results = _read()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no home folder
        talk(
            f"the results of `ostinato verify` in {_said_path()} cannot be read ({_cause(error)}) and count as absent; "
            "remove the file, or verify again"
        )
        return {}
    here = [one for one in results if _is_of(one, replace(card, kind=one.get("kind", "")))]
    found = {mode: tuple(one.get("kind", "") for one in here if one["mode"] == mode) for mode in MODES}
    return {mode: kinds for mode, kinds in found.items() if kinds}


def forget(card: VerifiedCard, modes: Collection[str], talk: Talk) -> None:
    """Remove the results of these modes: before they are verified again, so that a run that is killed leaves none, and
    where they failed."""
    if modes and set(modes) & set(verified_modes(card, lambda _: None)):
        _replace(card, modes, (), talk)


def keep(
    card: VerifiedCard, report: VerifyReport, model: str, talk: Talk, *, modes: Collection[str] = NEED_VERIFICATION
) -> tuple[str, ...]:
    """Write down for each of these modes in a report that it passed, or remove its earlier result where it did not. The
    modes that passed and are written down."""
    compared = {check.name for check in report.checks} & set(modes)
    wrong = {check.name for check in report.checks if not check.passed}
    shared = wrong - set(MODES)  # such as `weights`, which every mode reads
    passed = set() if shared else compared - wrong
    forget(card, sorted(compared - passed), talk)
    if passed:
        _replace(card, sorted(passed), [{"mode": mode, "model": model} for mode in sorted(passed)], talk)
    return tuple(mode for mode in verified_modes(card, lambda _: None) if mode in passed)


def _replace(card: VerifiedCard, modes: Collection[str], new: Sequence[dict[str, str]], talk: Talk) -> None:
    """Put new results of these modes in place of the old ones."""
    date = datetime.now(UTC).date().isoformat()
    try:
        with _locked():
            try:
                kept = [one for one in _read() if not (_is_of(one, card) and one["mode"] in modes)]
            except ValueError:
                kept = []  # a damaged file is written anew
            kept += [{**asdict(card), **one, "date": date} for one in new]
            store.write_whole(_path(), json.dumps({"results": kept[-MOST_RESULTS:]}, indent=1).encode())
    except (OSError, RuntimeError) as error:
        said = f"{' and '.join(modes)} cannot be {'written to' if new else 'removed from'} {_said_path()}"
        otherwise = (
            "`auto` does not know of it; set OSTINATO_HOME to a folder that can be written"
            if new
            else "`auto` goes on to take it; remove that file"
        )
        talk(f"the result for {said} ({_cause(error)}), so {otherwise}")


@contextmanager
def _locked() -> Iterator[None]:
    """One writer at a time; a writer that is killed leaves no lock."""
    from filelock import FileLock, Timeout

    path = store.home() / "locks" / "verified.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=LOCK_S):
            yield
    except Timeout as error:
        raise RuntimeError(f"another process holds {path}") from error


def _read() -> list[dict[str, Any]]:
    """Every result; none where there is no file. Raises OSError or ValueError where there is one of another form."""
    try:
        known = json.loads(_path().read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    results = known.get("results") if isinstance(known, dict) else None
    if not isinstance(results, list) or not all(_is_result(result) for result in results):
        raise ValueError("it is no list of results")
    return results


def _is_result(value: object) -> bool:
    names = ("name", "capability", "driver", "ostinato", "mode")
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in names)


def _is_of(result: dict[str, Any], card: VerifiedCard) -> bool:
    return all(result.get(name, "") == value for name, value in asdict(card).items())


def _path() -> Path:
    return store.home() / "verified.json"


def _said_path() -> str:
    try:
        return str(_path())
    except RuntimeError:
        return "verified.json"


def _cause(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
