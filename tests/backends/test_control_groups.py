"""What a container may still take: its limit less its use, but files that are only cached do not count as use."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.backends import control_groups, machine

MIB = 1 << 20
STAT = f"anon {100 * MIB}\nactive_file {30 * MIB}\ninactive_file {20 * MIB}\nshmem {9 * MIB}\n"
OLD_STAT = STAT + f"total_active_file {40 * MIB}\ntotal_inactive_file {20 * MIB}\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "GROUP_OF_SELF", tmp_path / "self")
    return tmp_path


def grouped(root: Path, line: str, folder: str, **files: str) -> None:
    """Put the process into a control group whose folder has these files, each beside `memory.`."""
    (root / "self").write_text(line + "\n")
    place = root / "cgroup" / folder
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / f"memory.{name}").write_text(text)


def test_without_a_control_group_there_is_no_limit(root: Path) -> None:
    assert control_groups.memory_left() is None
    grouped(root, "0::/mine", "mine", max="max\n", current="5\n", stat=STAT)
    assert control_groups.memory_left() is None
    assert machine.free_host_bytes() > 0


def test_cached_files_are_left_to_take(root: Path) -> None:
    grouped(root, "0::/mine", "mine", max=f"{400 * MIB}\n", current=f"{160 * MIB}\n", stat=STAT)
    assert control_groups.memory_left() == (400 - 160 + 50) * MIB
    assert machine.free_host_bytes() == (400 - 160 + 50) * MIB


def test_the_least_of_all_groups_above_counts(root: Path) -> None:
    grouped(root, "0::/all/mine", "all", max=str(200 * MIB), current=str(150 * MIB), stat=STAT)
    grouped(root, "0::/all/mine", "all/mine", max=str(190 * MIB), current=str(10 * MIB), stat="")
    assert control_groups.memory_left() == 100 * MIB


def test_the_first_version_counts_the_groups_below_too(root: Path) -> None:
    files = {"limit_in_bytes": str(500 * MIB), "usage_in_bytes": str(160 * MIB), "stat": OLD_STAT}
    grouped(root, "5:cpu:/other\n4:memory:/mine", "memory/mine", **files)
    assert control_groups.memory_left() == (500 - 160 + 60) * MIB


def test_a_group_that_is_full_has_nothing_left(root: Path) -> None:
    grouped(root, "0::/", "", max=str(MIB), current=str(2 * MIB), stat="anon 1\n")
    assert machine.free_host_bytes() == 0


def test_words_that_are_no_limit_are_none(root: Path) -> None:
    grouped(root, "0::/", "", max="much", current="little", stat="nothing at all\n")
    assert control_groups.memory_left() is None
