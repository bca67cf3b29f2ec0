"""`ostinato verify`: agreement, a difference with its name and exit code, and machines that cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.backends.torch.plan import tensors_of
from ostinato.engine import load
from ostinato.engine.checks import Check
from ostinato.engine.cores import default_threads
from ostinato.options import LoadOptions
from tests.cli.conftest import RunCli
from tests.models import tiny_encoders

verify = import_module("ostinato.cli.verify")  # the room has the verb under this name


@pytest.mark.slow
def test_a_model_whose_modes_agree_is_said_to(ostinato: RunCli, tiny: Path) -> None:
    ran = ostinato("verify", "--model", tiny, "--device", "cpu")
    assert (ran.code, ran.err) == (0, "")
    assert f"{tiny} on cpu, float32, activations wide, KV f32" in ran.out
    assert ["loop", "eager", "within", "0.001", "near,"] in [line.split()[:5] for line in ran.out.splitlines()]
    assert "cannot run here" not in ran.out
    assert ran.out.endswith("all agree\n")


@pytest.mark.slow
def test_json_is_one_object_with_every_check(ostinato: RunCli, tiny: Path) -> None:
    ran = ostinato("verify", "--model", tiny, "--device", "cpu", "--json")
    found = json.loads(ran.out)
    assert found["passed"] is True
    assert [(check["check"], check["against"]) for check in found["checks"]] == [
        ("weights", "the file"),
        ("loop", "plain C++"),
        *(("loop", f"{n} thread{'s' if n > 1 else ''}") for n in (1, 2, 3) if n != default_threads()),
        ("loop", "each sequence alone"),
        ("loop", "prompts cut at every 7 tokens"),
        ("eager", "the twins"),
        ("loop", "eager"),
        ("weights", "before the runs"),
    ]
    assert all(check["difference"] is None and check["compared"] > 0 for check in found["checks"])
    (twins,) = (check for check in found["checks"] if check["against"] == "the twins")
    assert twins["figures"]["cosine"] > 0.999
    assert found["not_run"] == {}  # graphs and the persistent kernel are not a CPU's


def test_a_mode_of_another_device_is_refused(ostinato: RunCli, tiny: Path) -> None:
    ran = ostinato("verify", "--model", tiny, "--device", "cpu", "--mode", "persistent")
    assert ran.code == 4
    assert "mode 'persistent' cannot run here: the persistent kernel is CUDA's" in ran.err


@pytest.mark.slow
def test_one_mode_alone_can_be_asked_for(ostinato: RunCli, tiny: Path) -> None:
    found = json.loads(ostinato("verify", "--model", tiny, "--device", "cpu", "--mode", "loop", "--json").out)
    assert found["not_run"] == {}


@pytest.mark.slow
def test_a_difference_is_named_and_exits_with_3(ostinato: RunCli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = load.load_blocks
    built: list[object] = []

    def flipped(*given: Any, **words: Any) -> Any:
        """The first model that is loaded gets one wrong bit."""
        model = build(*given, **words)
        if not built:
            weights = dict(tensors_of(model, "model"))
            weights["model.layers.0.mlp.down.weight.planes.0"][50] ^= 1
        built.append(model)
        return model

    monkeypatch.setattr(load, "load_blocks", flipped)
    ran = ostinato("verify", "--model", tiny, "--device", "cpu")
    assert ran.code == 3
    assert "DIFFERS at load: model.layers.0.mlp.down.weight.planes.0[50] is" in ran.out
    assert "all agree" not in ran.out
    built.clear()
    found = json.loads(ostinato("verify", "--model", tiny, "--device", "cpu", "--json").out)
    assert found["passed"] is False
    assert found["checks"][0]["difference"]["buffer"] == "model.layers.0.mlp.down.weight.planes.0"


def test_a_device_that_is_not_here_exits_with_4(ostinato: RunCli, tiny: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ran = ostinato("verify", "--model", tiny, "--device", "cuda")
    assert ran.code == 4
    assert "use the device cpu" in ran.err


def test_a_file_that_is_no_model_is_refused(ostinato: RunCli, vocabulary: Path) -> None:
    ran = ostinato("verify", "--model", vocabulary)
    assert ran.code == 2


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_verifies(default_model: Path, ostinato: RunCli) -> None:
    ran = ostinato("verify", "--model", default_model, "--device", "cpu")
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "all agree")


def test_a_tie_is_said_where_there_are_no_logits_to_compare() -> None:
    check = Check("loop", "eager", "tolerance", 17, 0.1, None, {"ties": 1.0, "tolerance": 1e-3})
    assert verify._result(check) == "same tokens up to a tie, 17 compared"


def test_an_encoder_is_refused(ostinato: RunCli, tmp_path: Path) -> None:
    ran = ostinato("verify", "--model", tiny_encoders.gguf("bert", tmp_path), "--device", "cpu")
    assert ran.code == 2
    assert "bert is an encoder" in ran.err


@pytest.mark.parametrize("passes", [True, False])
def test_a_result_on_a_gpu_is_kept_for_auto_or_removed(
    passes: bool, ostinato: RunCli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stub in place of the GPU and of its comparison: what is kept follows from the report."""
    from ostinato.backends.compare import Difference
    from ostinato.engine import machine, verified
    from ostinato.engine import verify as of_engine
    from ostinato.engine.checks import VerifyReport

    card = verified.VerifiedCard("a card", "8.9", "570.1", kind="llama")
    earlier = Check("persistent", "eager", "tolerance", 1, 0.1, None, {})
    verified.keep(card, VerifyReport((earlier,), {}), "earlier.gguf", lambda _: None)

    def compare(*_: object, **__: object) -> VerifyReport:
        assert verified.verified_modes(card, lambda _: None) == ()  # a run that is killed has not passed
        wrong = None if passes else Difference("a step", "logits", (0,), "1", "2")
        return VerifyReport((Check("persistent", "eager", "tolerance", 1, 0.1, wrong, {}),), {})

    opened = verify.opened_bare

    @contextmanager
    def on_gpu(model: str, options: LoadOptions) -> Iterator[Any]:
        with opened(model, replace(options, mode="auto", device="cpu")) as bare:
            settled = replace(bare.settled, device="cuda:0", backend="tape", mode="persistent", weights="packed")
            yield SimpleNamespace(
                settled=settled, shape=bare.shape, checkpoint=bare.checkpoint, load=lambda *_, **__: None
            )

    monkeypatch.setattr(verify, "opened_bare", on_gpu)
    monkeypatch.setattr(machine, "verified_card", lambda device, kind: replace(card, kind=kind))
    monkeypatch.setattr(of_engine, "Verifier", lambda *_, **__: SimpleNamespace(verify=compare))
    ran = ostinato("verify", "--model", tiny, "--mode", "persistent")
    assert (ran.code, ran.err) == (0 if passes else 3, "")
    assert verified.verified_modes(card, lambda _: None) == (("persistent",) if passes else ())
    assert ("persistent is verified for this card, driver, version and family: auto may take it" in ran.out) == passes


@pytest.mark.slow
def test_what_to_install_is_told_once_below_the_table(
    ostinato: RunCli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.extras._is_installed", lambda module: module != "torch")
    for words, said in ((("verify", tiny), "cannot run here: needs torch\n"), (("doctor",), "cannot: needs torch\n")):
        ran = ostinato(*words)
        assert said in ran.out
        assert next(line for line in ran.out.splitlines() if "pip install" in line).startswith("to install torch: ")
        assert ran.out.count("to install torch") == 1
    ran = ostinato("bench", "decode", "--shape", "tiny", "--n-gen", "2", "--n-prompt", "0", "--repeats", "1")
    assert ran.err.startswith("not eager: needs torch\nto install torch: ")
