"""What cannot be: no Ray, nobody at the address, too few GPUs; told at once, with what to do."""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import BadInput, BadOption, HardwareCannot
from ostinato.options import LoadOptions
from ostinato.scale import cluster
from ostinato.scale.settings import ScaleOptions, from_yaml
from ostinato.serve.settings import ServeOptions
from tests.cli.conftest import Run, home, ostinato  # noqa: F401  fixtures
from tests.scale.conftest import line, write_lines


@contextmanager
def no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else found(name, *rest))
        yield


def test_without_ray_it_is_said_what_to_install(
    ostinato: Run,  # noqa: F811
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = write_lines(tmp_path / "in", [line(1)])
    with no_ray(monkeypatch):
        for words in (("serve", tiny), ("batch", requests, tmp_path / "out", "--model", tiny)):
            ran = ostinato(*words, "--replicas", "2")
            assert ran.code == 2
            assert "pip install 'ostinato[scale]'" in ran.err


@pytest.mark.parametrize("address", ["nowhere", "host:port", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(BadInput, match="--ray-address"):
        cluster.check_address(address)


def test_an_address_that_nobody_answers_is_refused_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(BadInput, match="nobody answers there"):
        cluster.check_address(f"127.0.0.1:{port}")
    assert time.monotonic() - began < cluster.JOIN_S


@pytest.mark.slow
def test_an_address_of_something_else_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(cluster, "JOIN_S", 8.0)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(BadInput, match="no Ray cluster"):
        cluster.check_address(f"127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - began < 20


class Resources:
    """A cluster with these resources."""

    def __init__(self, **found: float) -> None:
        self._found = found

    def cluster_resources(self) -> dict[str, float]:
        return self._found


def served(**load: Any) -> ServeOptions:
    return ServeOptions("tiny", load=LoadOptions(**load))


def test_more_gpus_than_there_are_is_refused_and_one_each_is_taken() -> None:
    two = Resources(CPU=16, GPU=2)
    assert cluster.placed(two, served(), 2).gpus == 1
    assert cluster.placed(two, served(), 1, 2).max_replicas == 2
    with pytest.raises(HardwareCannot, match="4 replicas need 4 GPUs, one each, and the cluster has 2"):
        cluster.placed(two, served(device="cuda"), 4)
    with pytest.raises(HardwareCannot, match="the cluster has 0"):
        cluster.placed(Resources(CPU=2), served(device="cuda"), 1)
    with pytest.raises(BadInput, match="names one GPU"):
        cluster.placed(two, served(device="cuda:1"), 2)


def test_without_gpus_the_cores_are_shared() -> None:
    assert cluster.placed(Resources(CPU=8), served(), 3).cpus == 2
    assert cluster.placed(Resources(CPU=2), served(device="cpu"), 3).cpus == 0.66
    assert cluster.placed(Resources(CPU=2, GPU=1), served(device="cpu"), 2).gpus == 0


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({}, "args.model is missing"),
        ({"model": "x", "replcas": 2}, "args.replcas is not known; known: replicas"),
        ({"model": "x", "replicas": 0}, "replicas is 0"),
        ({"model": "x", "replicas": 3, "max_replicas": 2}, "max_replicas is 2"),
        ({"model": "x", "routing": "random"}, "routing is 'random'"),
        ({"model": "x", "cpus": -1}, "cpus is -1"),
        ({"model": "x", "slots": 0}, "slots is 0"),
    ],
)
def test_wrong_settings_of_a_yaml_file_are_told_by_name(words: dict[str, Any], match: str) -> None:
    with pytest.raises(BadOption, match=match):
        from_yaml(words)


def test_settings_of_a_yaml_file_are_those_of_the_command_line() -> None:
    serving, scaling = from_yaml({"model": "x", "keys": ["12345678"], "slots": 2, "gpus": 1, "max_replicas": 8})
    assert serving == ServeOptions("x", load=LoadOptions(slots=2), keys=("12345678",))
    assert scaling == ScaleOptions(gpus=1, max_replicas=8)


def test_a_port_that_is_taken_and_a_model_nobody_knows_are_refused_before_ray_starts(
    ostinato: Run,  # noqa: F811
    tiny: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = ostinato("serve", tiny, "--replicas", "2", "--port", taken.getsockname()[1])
    assert ran.code == 2
    assert "cannot listen at 127.0.0.1" in ran.err
    assert ostinato("serve", "no-such-model", "--replicas", "2").code == 2
    fewer = ostinato("serve", tiny, "--replicas", "3", "--max-replicas", "2")
    assert fewer.code == 2
    assert "--max-replicas is 2" in fewer.err
