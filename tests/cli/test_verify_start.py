"""A server compares its mode with the reference before its port opens: when, with what result, and what is kept."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.backends.base import Settled
from ostinato.backends.compare import Difference
from ostinato.cli import verify_start
from ostinato.cli.bare import Bare
from ostinato.cli.verify_start import Started, compare, has_passed, short_report, verified_start
from ostinato.engine import verified
from ostinato.engine.checks import Check, VerifyReport
from ostinato.engine.verified import VerifiedCard
from ostinato.engine.verify import Verifier
from ostinato.errors import BadInput, OstinatoError
from ostinato.options import LoadOptions
from ostinato.serve.settings import ServeOptions
from tests.cli.conftest import RunCli

CARD = VerifiedCard("A card", "8.9", "570.1")
SMALL = LoadOptions(device="cpu", context=256, slots=2)


@pytest.fixture
def path(tiny: Path) -> str:
    return str(tiny)


@pytest.mark.slow
def test_the_native_loop_is_compared_with_eager_in_a_process_of_its_own(path: str) -> None:
    """E-28."""
    found = verified_start(ServeOptions(path, load=SMALL), True)
    assert found == Started("loop agrees with eager", 0)


def test_without_torch_it_is_compared_with_the_plainest_object(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_start, "why_missing", lambda *_: "torch is not installed")
    said, code = compare(path, SMALL, always=True)
    assert code == 0
    assert said.startswith("loop agrees with ")
    assert "eager" not in said


def test_eager_itself_is_compared_with_the_twins_over_weights_read_again(path: str) -> None:
    assert compare(path, replace(SMALL, mode="eager"), always=True) == Started("eager agrees with the twins", 0)


def test_a_loop_that_computes_something_else_is_refused_with_the_first_difference(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Verifier.compare

    def wrong(self: Verifier, mode: str) -> Check:
        return replace(whole(self, mode), difference=Difference("sample", "token", (0, 5), "7", "8"))

    monkeypatch.setattr(Verifier, "compare", wrong)
    said, code = compare(path, SMALL, always=True)
    assert code == OstinatoError.exit_code
    assert f"loop of {path} differs from eager at " in said
    assert "--no-verify" in said


def test_on_a_cpu_nothing_is_compared_unless_asked(path: str) -> None:
    assert compare(path, SMALL, always=False) == Started("", 0)


@pytest.mark.usefixtures("home")
def test_a_card_is_compared_once_for_each_mode_and_the_result_is_kept(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-28. A stand-in for the card: what runs is the native loop."""
    monkeypatch.setattr(verify_start, "card_of", lambda settled, kind: CARD)
    assert compare(path, SMALL, always=False).said == "loop agrees with eager"
    assert verified.verified_modes(CARD, lambda _: None) == ("loop",)
    ran: list[object] = []

    def counted(bare: Bare) -> VerifyReport:
        ran.append(bare)
        return short_report(bare)

    monkeypatch.setattr(verify_start, "short_report", counted)
    assert compare(path, SMALL, always=False) == Started("", 0)
    assert ran == []
    assert compare(path, SMALL, always=True).said == "loop agrees with eager"
    assert compare(path, replace(SMALL, mode="eager"), always=False).said == "eager agrees with the twins"
    monkeypatch.setattr(verify_start, "card_of", lambda settled, kind: replace(CARD, driver="571.2"))
    assert compare(path, SMALL, always=False).said == "loop agrees with eager"
    assert len(ran) == 3


H200 = VerifiedCard("NVIDIA H200", "9.0", "570.1")
H100 = replace(H200, name="NVIDIA H100 80GB HBM3")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("card", [CARD, H100])
@pytest.mark.parametrize("mode", ["loop", "persistent"])
def test_a_card_has_passed_for_one_mode_and_one_family_at_a_time(card: VerifiedCard, mode: str) -> None:
    """Also a card of the same chip as the one that was tested."""
    other = {"loop": "persistent", "persistent": "loop"}[mode]
    llama = replace(card, kind="llama")
    assert not has_passed(settled(mode), llama)
    passed = Check(mode, "eager", "bits", 1, 0.1, None, {})
    verified.keep(llama, VerifyReport((passed,), {}), "m", print, modes=verified.RECORDED)
    assert has_passed(settled(mode), llama)
    assert not has_passed(settled(other), llama)
    assert not has_passed(settled(mode), replace(card, kind="qwen3"))
    wrong = replace(passed, difference=Difference("sample", "token", (), "7", "8"))
    verified.keep(llama, VerifyReport((wrong,), {}), "m", print, modes=verified.RECORDED)
    assert not has_passed(settled(mode), llama)


@pytest.mark.usefixtures("home")
def test_the_very_card_of_the_tests_has_passed_for_the_families_that_ran_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.cli.verify_start.NOT_RUN", frozenset({"new"}))
    kinds = ("llama", "deepseek2", "new", "new --kv-type q8_0")
    passed = [has_passed(settled("loop"), replace(H200, kind=one)) for one in kinds]
    assert passed == [True, True, False, False]
    passed = [has_passed(settled("persistent"), replace(H200, kind=one)) for one in ("llama", "granite", "olmo2")]
    assert passed == [True, True, False]


def settled(mode: str) -> Settled:
    backend = "tape" if mode == "persistent" else "cuda"
    return Settled("cuda:0", backend, mode, "bfloat16", "bf16", 256)


# The verb


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def started(monkeypatch: pytest.MonkeyPatch, found: Started) -> list[tuple[str, object]]:
    """What the verb does after a comparison that ends so."""
    acts: list[tuple[str, object]] = []

    class Stand:
        def __init__(self, options: ServeOptions, say: Callable[[str], None]) -> None:
            acts.append(("port", options.port))

        def run(self) -> int:
            return 0

    def compared(options: ServeOptions, verify: bool | None) -> Started:
        acts.append(("compared", verify))
        return found

    monkeypatch.setattr("ostinato.serve.supervisor.Supervisor", Stand)
    monkeypatch.setattr(verify_start, "verified_start", compared)
    return acts


def test_the_port_opens_after_the_comparison_and_not_at_all_where_it_fails(
    path: str, ostinato: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-28."""
    acts = started(monkeypatch, Started("loop agrees with eager", 0))
    assert ostinato("serve", path, "--port", "0", "--verify").code == 0
    assert acts == [("compared", True), ("port", 0)]
    acts = started(monkeypatch, Started("error: loop differs", 3))
    ran = ostinato("serve", path, "--port", "0", "--verify")
    assert (ran.code, acts) == (3, [("compared", True)])
    assert "error: loop differs" in ran.err


def test_the_comparison_is_left_out_without_a_gpu_and_with_no_verify(
    path: str, ostinato: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts = started(monkeypatch, Started("", 0))
    monkeypatch.setattr("ostinato.engine.machine.driver_version", lambda: None)
    ostinato("serve", path, "--port", "0")
    monkeypatch.setattr("ostinato.engine.machine.driver_version", lambda: "570.1")
    ostinato("serve", path, "--port", "0", "--no-verify")
    ostinato("serve", path, "--port", "0", "--device", "cpu")
    assert acts == [("port", 0)] * 3
    ostinato("serve", path, "--port", "0")
    assert acts[3:] == [("compared", None), ("port", 0)]


def test_a_port_in_use_is_told_before_the_comparison(
    path: str, listening: int, ostinato: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts = started(monkeypatch, Started("", 0))
    assert ostinato("serve", path, "--port", str(listening), "--verify").code == BadInput.exit_code
    assert acts == []


def test_replicas_are_not_verified_from_here(path: str, ostinato: RunCli) -> None:
    ran = ostinato("serve", path, "--replicas", "2", "--verify")
    assert ran.code == BadInput.exit_code
    assert "--verify is for this machine" in ran.err


def test_on_a_gpu_replicas_say_that_nothing_is_compared(
    path: str, ostinato: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.cli.serve.check_extra", lambda *_: None)
    monkeypatch.setattr("ostinato.scale.replicas.run_replicas", lambda *_, **__: 0)
    monkeypatch.setattr("ostinato.engine.machine.driver_version", lambda: "570.1")
    said = ostinato("serve", path, "--replicas", "2").err
    assert said == f"note: replicas are not compared with the reference: run `ostinato verify {path}` where they run\n"
    assert ostinato("serve", path, "--replicas", "2", "--no-verify").err == ""
    assert ostinato("serve", path, "--replicas", "2", "--device", "cpu").err == ""
    monkeypatch.setattr("ostinato.engine.machine.driver_version", lambda: None)
    assert ostinato("serve", path, "--replicas", "2").err == ""
