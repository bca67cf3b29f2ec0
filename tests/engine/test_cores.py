"""How many threads a CPU is good for: cores are counted once, and what the system allows is respected."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.backends import control_groups
from ostinato.backends.machine import Machine
from ostinato.engine import cores
from ostinato.engine.choose import LoadCase, decide
from ostinato.models.header import tensors_in
from ostinato.options import LoadOptions
from tests.random_model import random_model


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores of two hardware threads each, of which the process may use all; no control group."""
    processors = tmp_path / "cpu"
    for number in range(8):
        topology = processors / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "core_cpus_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(cores, "PROCESSORS", processors)
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "GROUP_OF_SELF", tmp_path / "self")
    monkeypatch.setattr(cores, "allowed_processors", lambda: set(range(8)))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv(cores.LIMIT, raising=False)
    return tmp_path


def grouped(machine: Path, line: str, **files: str) -> None:
    """Put the process into a control group with these files."""
    (machine / "self").write_text(line + "\n")
    for place, text in files.items():
        path = machine / "cgroup" / place.replace("__", "/").replace("cpu_", "cpu.", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_two_threads_of_one_core_are_one(machine: Path) -> None:
    assert cores.default_threads() == 4


def test_processors_that_the_process_may_not_use_do_not_count(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "allowed_processors", lambda: {1, 5, 2})
    assert cores.default_threads() == 2


def test_a_system_that_is_silent_has_a_core_for_each_processor(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "PROCESSORS", machine / "nowhere")
    assert cores.default_threads() == 8


def test_an_older_kernel_names_the_list_otherwise(machine: Path) -> None:
    for path in list(machine.glob("cpu/*/topology/core_cpus_list")):
        path.rename(path.with_name("thread_siblings_list"))
    assert cores.default_threads() == 4


@pytest.mark.parametrize(
    ("quota", "threads"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 4)]
)
def test_the_share_of_a_control_group_is_respected(machine: Path, quota: str, threads: int) -> None:
    grouped(machine, "0::/mine/deeper", mine__deeper__cpu_max="max 100000", mine__cpu_max=quota)
    assert cores.default_threads() == threads


def test_so_is_that_of_the_first_version(machine: Path) -> None:
    files = {"cpu,cpuacct__mine__cpu_cfs_quota_us": "300000", "cpu,cpuacct__mine__cpu_cfs_period_us": "100000"}
    (machine / "cgroup" / "cpu,cpuacct" / "mine").mkdir(parents=True)
    for place, text in files.items():
        (machine / "cgroup" / place.replace("__", "/").replace("cpu_cfs", "cpu.cfs")).write_text(text)
    (machine / "self").write_text("4:memory:/other\n3:cpu,cpuacct:/mine\n")
    assert cores.group_share() == 3
    assert cores.default_threads() == 3


def test_words_that_are_no_quota_are_no_limit(machine: Path) -> None:
    grouped(machine, "0::/", cpu_max="many few")
    assert cores.default_threads() == 4


@pytest.mark.parametrize(("limit", "threads"), [("3", 3), ("2,4", 2), ("99", 8), ("0", 4), ("all", 4), ("", 4)])
def test_the_limit_of_all_such_libraries_is_ours_too(
    machine: Path, limit: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cores.LIMIT, limit)
    assert cores.default_threads() == threads


def test_threads_asked_for_are_taken_and_a_gpu_needs_none(machine: Path) -> None:
    model = random_model("kv")

    def threads(device: str, **words: int) -> int | None:
        machine = Machine(device, 1 << 40, 1 << 40, driver_cuda=13_000)
        options = LoadOptions(**words)  # type: ignore[arg-type]
        return decide(LoadCase(model.shape, tensors_in(model), options, machine)).threads

    assert threads("cpu", threads=5) == 5
    assert threads("cpu") == 4
    assert threads("cuda:0") is None


def test_this_machine_has_a_core() -> None:
    assert cores.physical_cores() >= 1
    assert cores.default_threads() >= 1
