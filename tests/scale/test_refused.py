"""What cannot be: no Ray, no answer at the address, too few GPUs; told at once, with what to do."""

from __future__ import annotations

import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ostinato.errors import BadFile, BadInput, BadOption, EngineDead, HardwareCannot
from ostinato.options import LoadOptions
from ostinato.scale import cluster, replicas
from ostinato.scale.replicas import Signals
from ostinato.scale.settings import ScaleOptions, from_yaml
from ostinato.serve.settings import ServeOptions
from tests.cli.conftest import RunCli, home, ostinato  # noqa: F401  fixtures
from tests.scale.conftest import line, write_lines


def test_without_ray_it_is_said_what_to_install(
    ostinato: RunCli,  # noqa: F811
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = write_lines(tmp_path / "in", [line(1)])
    monkeypatch.setitem(sys.modules, "ray", None)
    for words in (("serve", tiny), ("batch", requests, tmp_path / "out", "--model", tiny)):
        ran = ostinato(*words, "--replicas", "2")
        assert ran.code == 4
        assert "needs ray, which is not installed; type: " in ran.err
        assert "[scale]'" in ran.err


@pytest.mark.parametrize("address", ["nowhere", "host:port", "127.0.0.1:99999", "ray://127.0.0.1:10001"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(BadInput, match="--ray-address"):
        cluster.check_address(address)


def test_an_address_that_gives_no_answer_is_refused_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(BadInput, match="no answer"):
        cluster.check_address(f"127.0.0.1:{port}")
    assert time.monotonic() - began < cluster.JOIN_S


@pytest.mark.slow
def test_an_address_of_something_else_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(cluster, "JOIN_S", 2.0)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(BadInput, match="no Ray cluster"):
        cluster.check_address(f"127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - began < 60


def served(**load: Any) -> ServeOptions:
    return ServeOptions("tiny", load=LoadOptions(**load))


def test_more_gpus_than_there_are_is_refused_and_one_each_is_taken() -> None:
    two = [{"CPU": 8, "GPU": 1}, {"CPU": 8, "GPU": 1}]
    assert cluster.placed(two, served(), 2).gpus == 1
    assert cluster.placed(two, served(), 1, 2).max_replicas == 2
    with pytest.raises(HardwareCannot, match="4 replicas need 4 GPUs, one each, and the cluster has 2 to give"):
        cluster.placed(two, served(device="cuda"), 4)
    with pytest.raises(HardwareCannot, match="the cluster has 0"):
        cluster.placed([{"CPU": 2}], served(device="cuda"), 1)
    with pytest.raises(BadInput, match="names one GPU"):
        cluster.placed(two, served(device="cuda:1"), 2)


def test_without_gpus_the_cores_are_shared_and_no_replica_is_on_two_machines() -> None:
    assert cluster.placed([{"CPU": 8}], served(), 3).cpus == 2
    assert cluster.placed([{"CPU": 2}], served(device="cpu"), 3).cpus == 0.66
    assert cluster.placed([{"CPU": 2, "GPU": 1}], served(device="cpu"), 2).gpus == 0
    four = [{"CPU": 4}] * 4
    assert cluster.placed(four, served(), 1).cpus == 4
    assert cluster.placed(four, served(), 5).cpus == 2
    assert cluster.placed([{"CPU": 4}, {"CPU": 0.5}], served(), 1, 2).cpus == 2
    for taken in ([], [{"CPU": 0.0}], [{"memory": 1.0}]):
        with pytest.raises(HardwareCannot, match="no core to give to 2 replicas"):
            cluster.placed(taken, served(), 2)


@given(st.lists(st.floats(0.5, 64), min_size=1, max_size=6), st.integers(1, 40))
@example([1.999999999999993], 1)
def test_a_share_of_the_cores_is_the_largest_that_fits(cores: list[float], wanted: int) -> None:
    def fits(share: float) -> bool:
        return sum(int((free + 1e-6) / share) for free in cores) >= wanted

    share = cluster.placed([{"CPU": free} for free in cores], served(), wanted).cpus
    assert fits(share)
    assert not fits(share + 1 if share >= 1 else share + 0.01)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("Traceback:\n  ostinato.errors.BadFile: x.gguf: cut off\n", BadFile, "x.gguf: cut off"),
        ("ostinato.errors.HardwareCannot: no room\nostinato.errors.EngineDead: it died", EngineDead, "it died"),
        ("Traceback:\nostinato.errors.NoSlot: none\n", EngineDead, "a replica failed: ostinato.errors.NoSlot: none"),
        ("Traceback:\nostinato.errors.sys: none\n", EngineDead, "a replica failed"),
        ("MemoryError\n\n", EngineDead, "a replica failed: MemoryError"),
        ("", EngineDead, "no reason was given"),
    ],
)
def test_an_error_of_another_process_is_told_as_it_would_be_here(text: str, kind: type, words: str) -> None:
    found = cluster.error_elsewhere(text)
    assert type(found) is kind
    assert words in str(found)


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
        ({"model": "x", "replicas": "two"}, "replicas is 'two'"),
        ({"model": "x", "replicas": 2.5}, "replicas is 2.5"),
        ({"model": "x", "imbalance": 0}, "imbalance is 0"),
        ({"model": "x", "gpus": "1"}, "gpus is '1'"),
        ({"model": "x", "keys": "a-secret-key"}, "args.keys must be a list"),
        ({"model": "x", "port": 8000}, "args.port is not known"),
    ],
)
def test_wrong_settings_of_a_yaml_file_are_told_by_name(words: dict[str, Any], match: str) -> None:
    with pytest.raises(BadOption, match=match):
        from_yaml(words)


def test_settings_of_a_yaml_file_are_those_of_the_command_line() -> None:
    serving, scaling = from_yaml({"model": "x", "keys": ["12345678"], "slots": 2, "gpus": 1, "max_replicas": 8})
    assert serving == ServeOptions("x", load=LoadOptions(slots=2), keys=("12345678",))
    assert scaling == ScaleOptions(gpus=1, max_replicas=8)


def test_a_second_signal_stops_at_once_where_ray_waits_and_a_first_does_not() -> None:
    with Signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.first.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with Signals() as signals:
        signals.starting = False
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals.second.is_set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def joined_ray(head: str, here: str = "10.0.0.1") -> Any:
    context = SimpleNamespace(gcs_address=f"{head}:6379")
    return SimpleNamespace(get_runtime_context=lambda: context, util=SimpleNamespace(get_node_ip_address=lambda: here))


def test_serve_listens_on_the_head_as_asked_or_as_it_does_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_listening", lambda: None)
    asked = ServeOptions("tiny", port=0)
    found = replicas.place_of(asked, joined_ray("10.0.0.1"))
    assert found.ours
    assert str(found) == f"127.0.0.1:{found.port}"
    with pytest.raises(BadInput, match="--port 0 takes a free port of this machine"):
        replicas.place_of(asked, joined_ray("10.0.0.9"))
    named = replicas.place_of(ServeOptions("tiny", port=8000), joined_ray("10.0.0.9"))
    assert str(named) == "127.0.0.1:8000 of the cluster's head, 10.0.0.9"

    monkeypatch.setattr(replicas, "_listening", lambda: ("127.0.0.1", 9000))
    monkeypatch.setattr(replicas, "_is_there", lambda: False)
    assert replicas.place_of(asked, joined_ray("10.0.0.1")) == ("127.0.0.1", 9000, False, None)
    for other in (ServeOptions("tiny", port=8000), ServeOptions("tiny", host="::1", port=9000)):
        with pytest.raises(BadInput, match=r"listens at 127.0.0.1:9000; give --host 127.0.0.1 --port 9000"):
            replicas.place_of(other, joined_ray("10.0.0.1"))
    monkeypatch.setattr(replicas, "_is_there", lambda: True)
    with pytest.raises(BadInput, match="has an application 'ostinato' already"):
        replicas.place_of(asked, joined_ray("10.0.0.1"))


def test_an_application_that_was_taken_away_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where it was missed once: Serve's controller may be restarted."""
    monkeypatch.setattr(replicas, "_LOOK_S", 0.001)
    seen = iter((True, False, True, False, False, False))
    monkeypatch.setattr(replicas, "_is_there", lambda: next(seen))
    with pytest.raises(HardwareCannot, match="the application is gone"):
        replicas._watch(Signals())
    assert list(seen) == []


def test_a_port_that_is_taken_and_an_unknown_model_are_refused_before_ray_starts(
    ostinato: RunCli,  # noqa: F811
    tiny: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = ostinato("serve", tiny, "--replicas", "2", "--port", taken.getsockname()[1])
    assert ran.code == 2
    assert "cannot listen at 127.0.0.1" in ran.err
    assert ostinato("serve", "no-such-model", "--replicas", "2").code == 2
    alone = ostinato("serve", tiny, "--routing", "round_robin")
    assert alone.code == 2
    assert "give --replicas too" in alone.err
    fewer = ostinato("serve", tiny, "--replicas", "3", "--max-replicas", "2")
    assert fewer.code == 2
    assert "--max-replicas is 2" in fewer.err
