"""Opening a loop: what happens where a mode cannot be built, and what recurrent models are decoded with."""

from __future__ import annotations

import threading

import pytest

from ostinato.backends.native.start import NativeLoop
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.start import CpuEager
from ostinato.errors import HardwareCannot, Unsupported
from tests.engine.rig import open_loop
from tests.random_model import random_model

PROMPT = [5, 9, 2, 77, 31]
REASON = "the driver could not begin the capture of the loop"


class Capture:
    """A build that fails, and counts how often it was tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *kinds: type, error: Exception | None = None) -> None:
        self.tried: list[str] = []
        for kind in kinds:
            monkeypatch.setattr(kind, "build", self._failing(error or HardwareCannot(REASON)))

    def _failing(self, error: Exception) -> object:
        def build(start: NativeLoop | CpuEager) -> None:
            self.tried.append(start.name)
            raise error

        return build


def our_threads() -> int:
    return sum(thread.name.startswith("ostinato-") for thread in threading.enumerate())


def tokens(mode: str, model: Model) -> list[int]:
    driver = open_loop(model=model, mode=mode)
    generation = driver.admit(0, PROMPT, most=8)
    driver.run()
    driver.runner.close()
    return driver.tokens(generation)


# A mode that cannot be built


def test_auto_falls_back_once_to_the_mode_below_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-51, E-57."""
    model = random_model("kv")
    expected = tokens("eager", model)
    capture = Capture(monkeypatch, NativeLoop)
    before = our_threads()
    driver = open_loop(model=model, mode="auto")
    runner = driver.runner
    assert (runner.settled.mode, runner.start.name, capture.tried) == ("eager", "eager", ["loop"])
    assert runner.settled.fell_back == f"loop: {REASON} (tried once; eager runs instead)"
    assert runner.why_not == (runner.settled.fell_back,)
    generation = driver.admit(0, PROMPT, most=8)
    driver.run()
    assert driver.tokens(generation) == expected
    runner.close()
    assert capture.tried == ["loop"]
    assert our_threads() == before


def test_a_mode_that_was_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-57."""
    capture = Capture(monkeypatch, NativeLoop)
    before = our_threads()
    with pytest.raises(HardwareCannot, match=REASON):
        open_loop(mode="loop")
    assert capture.tried == ["loop"]
    assert our_threads() == before


def test_auto_gives_up_where_the_mode_below_cannot_be_built_either(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Capture(monkeypatch, NativeLoop, CpuEager)
    before = our_threads()
    with pytest.raises(HardwareCannot, match=REASON):
        open_loop(mode="auto")
    assert capture.tried == ["loop", "eager"]
    assert our_threads() == before


def test_what_is_no_matter_of_hardware_is_no_reason_to_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Capture(monkeypatch, NativeLoop, error=ZeroDivisionError("a bug"))
    before = our_threads()
    with pytest.raises(ZeroDivisionError):
        open_loop(mode="auto")
    assert capture.tried == ["loop"]
    assert our_threads() == before


def test_a_loop_that_opens_has_nothing_to_say_and_is_built() -> None:
    driver = open_loop(mode="auto")
    assert driver.runner.settled.fell_back is None
    assert driver.runner.start.executable
    assert driver.runner.start.n_instantiations == 1
    assert not driver.runner.decode_mode.on
    driver.run()
    assert driver.runner.start.n_instantiations == 1
    driver.runner.close()


def test_an_encoder_is_refused_when_it_is_opened_to_generate() -> None:
    with pytest.raises(Unsupported, match="bert is an encoder: it embeds text and generates none"):
        open_loop("encoder", mode="eager")
