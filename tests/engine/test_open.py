"""Opening a loop: which mode runs, what happens where one cannot be built, and what each family is decoded with."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from ostinato.backends.cuda import step
from ostinato.backends.cuda.chip import Chip
from ostinato.backends.cuda.static_plan import SPARE_STATES, WHY_NO_LOOP
from ostinato.backends.cuda.step import twin_kernels
from ostinato.backends.native.start import NativeLoop
from ostinato.backends.torch.chunks import TorchChunks
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.start import CpuEager
from ostinato.engine.open import MODES, NO_ROOM, TAKEN, LoopOptions, choose_mode, mode_below, why_not
from ostinato.errors import HardwareCannot
from tests.backends.tape.models import shape_of, small
from tests.engine.rig import open_loop
from tests.random_model import MemoryKind, random_model

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
    driver.loop.close()
    return driver.tokens(generation)


# A mode that cannot be built


def test_auto_falls_back_once_to_the_mode_below_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("kv")
    expected = tokens("eager", model)
    capture = Capture(monkeypatch, NativeLoop)
    before = our_threads()
    driver = open_loop(model=model, mode="auto")
    loop = driver.loop
    assert (loop.mode_name, loop.start.name, capture.tried) == ("eager", "eager", ["loop"])
    assert loop.fell_back == f"loop: {REASON} (tried once; eager runs instead)"
    assert loop.why_not[0] == loop.fell_back
    assert [reason.partition(":")[0] for reason in loop.why_not] == ["loop", "persistent"]
    generation = driver.admit(0, PROMPT, most=8)
    driver.run()
    assert driver.tokens(generation) == expected
    loop.close()
    assert capture.tried == ["loop"]
    assert our_threads() == before


def test_a_mode_that_was_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_takes_the_place_of_a_tape_has_a_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tape's one node is played by its kernel alone: no other start could run it."""
    monkeypatch.setattr("ostinato.engine.open.choose_mode", lambda *_: ("persistent", ()))
    monkeypatch.setattr("ostinato.engine.open.mode_below", lambda *_: "eager")
    build, plans = CpuEager.build, []

    def fails_once(start: CpuEager) -> None:
        plans.append(start._plan)
        if len(plans) == 1:
            raise HardwareCannot(REASON)
        build(start)

    monkeypatch.setattr(CpuEager, "build", fails_once)
    driver = open_loop(mode="auto")
    assert plans[0] is not plans[1]
    assert driver.loop.plan is plans[1]
    driver.loop.close()


def test_what_is_no_matter_of_hardware_is_no_reason_to_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Capture(monkeypatch, NativeLoop, error=ZeroDivisionError("a bug"))
    before = our_threads()
    with pytest.raises(ZeroDivisionError):
        open_loop(mode="auto")
    assert capture.tried == ["loop"]
    assert our_threads() == before


def test_a_loop_that_opens_has_nothing_to_say_and_is_built() -> None:
    driver = open_loop(mode="auto")
    assert driver.loop.fell_back is None
    assert driver.loop.start.executable
    assert driver.loop.start.n_instantiations == 1
    assert not driver.loop.mode.on
    driver.run()
    assert driver.loop.start.n_instantiations == 1
    driver.loop.close()


# Which mode, and with what


def elsewhere(model: Model) -> Model:
    """The model as it would say that it is not on the CPU."""
    embedding = torch.empty((model.shape.vocab, model.shape.hidden), device="meta")
    return replace(model, embedding=embedding, device=embedding.device)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_recurrent_families_run_eagerly_and_as_graphs_on_a_gpu(kind: MemoryKind) -> None:
    model = elsewhere(random_model(kind))
    assert [why_not(mode, model) for mode in MODES[:3]] == [None, None, WHY_NO_LOOP]
    mode, reasons = choose_mode("auto", model)
    assert mode == "graph"
    assert reasons[0] == f"loop: {WHY_NO_LOOP}"
    assert mode_below("graph", model) == "eager"
    assert mode_below("eager", model) is None
    with pytest.raises(HardwareCannot, match="mode 'loop' cannot run here: its torch ops allocate"):
        choose_mode("loop", model)


@pytest.fixture
def with_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver knows loops, as far as anybody asks it."""
    monkeypatch.setattr("ostinato.engine.open.why_no_while_graph", lambda: None)


@pytest.mark.usefixtures("with_packages")
def test_auto_takes_the_persistent_kernel_where_it_can_run_and_there_is_room() -> None:
    model = elsewhere(small(shape_of()))
    assert why_not("persistent", model) is None
    assert choose_mode("auto", model) == ("persistent", ())
    narrow = LoopOptions("auto", 1, 64, 8, "bf16", 203, room_for_tape=False)
    assert choose_mode("auto", model, narrow) == ("loop", (f"persistent: {NO_ROOM}",))
    assert choose_mode("persistent", model, narrow) == ("persistent", ())
    assert choose_mode("persistent", model) == ("persistent", ())
    assert choose_mode("loop", model) == ("loop", ("persistent: not asked for",))
    assert mode_below("persistent", model) == "loop"


@pytest.mark.usefixtures("with_packages")
def test_auto_gives_the_persistent_kernel_to_one_engine_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.backends.tape.start.is_taken", lambda device: True)
    model = elsewhere(small(shape_of()))
    assert choose_mode("auto", model) == ("loop", (f"persistent: {TAKEN}",))
    assert choose_mode("persistent", model) == ("persistent", ())


@pytest.mark.usefixtures("with_packages")
@pytest.mark.parametrize("needs", [{"prompts_on_tape": True}, {"activations": "int8"}])
def test_auto_with_what_only_the_persistent_kernel_can_do_takes_it_or_refuses(
    needs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.backends.tape.start.is_taken", lambda device: True)
    model, asked = elsewhere(small(shape_of())), LoopOptions("auto", 1, 64, 8, "bf16", 203, **needs)
    assert choose_mode("auto", model, asked)[0] == "persistent"
    with pytest.raises(HardwareCannot, match="mode 'persistent' cannot run here: the tape has up to 8 slots"):
        choose_mode("auto", model, replace(asked, n_slots=9))


@pytest.mark.usefixtures("with_packages")
def test_what_it_cannot_play_is_said_whoever_asks() -> None:
    model = elsewhere(small(shape_of()))
    nine = LoopOptions("auto", 9, 64, 8, "bf16", 203)
    reason = "the tape has up to 8 slots, and 9 are asked for"
    assert choose_mode("auto", model, nine) == ("loop", (f"persistent: {reason}",))
    with pytest.raises(HardwareCannot, match=f"mode 'persistent' cannot run here: {reason}"):
        choose_mode("persistent", model, nine)
    with pytest.raises(HardwareCannot, match="not q8_0"):
        choose_mode("persistent", model, replace(nine, n_slots=1, kv_type="q8_0"))


@pytest.mark.usefixtures("with_packages")
@pytest.mark.parametrize(("capability", "words"), [((8, 9), "this one has 8.9"), ((9, 0), None)])
def test_a_card_without_bulk_copies_is_told_so(
    capability: tuple[int, int], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Chip, "of", staticmethod(lambda device: Chip(capability, 132, 227 << 10, 0)))
    reason = why_not("persistent", elsewhere(small(shape_of())))
    assert (reason is None) == (words is None)
    assert reason is None or (words is not None and reason.endswith(words))


def test_on_the_cpu_it_is_refused_with_its_reason() -> None:
    reason = "the persistent kernel is CUDA's, and this model is on the CPU"
    with pytest.raises(HardwareCannot, match=f"mode 'persistent' cannot run here: {reason}"):
        open_loop(mode="persistent")
    driver = open_loop(mode="auto")
    assert driver.loop.why_not == (f"persistent: {reason}",)
    driver.loop.close()


def test_the_mode_below_is_one_that_can_run() -> None:
    assert mode_below("loop", random_model("kv")) == "eager"  # graphs are CUDA's


def test_a_model_that_no_mode_can_run_is_refused_with_the_reason() -> None:
    with pytest.raises(HardwareCannot, match="no mode can run this model here: heads of width 8"):
        choose_mode("auto", elsewhere(random_model("kv", hidden=32)))


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_gpu_is_given_the_static_plan_and_prompts_in_torch(kind: MemoryKind, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(kind)
    expected = tokens("eager", model)
    monkeypatch.setattr(step, "triton_kernels", twin_kernels)
    driver = open_loop(model=model, mode="eager")
    loop = driver.loop
    loop.memory = PagedMemory.of(
        model, n_slots=4 + SPARE_STATES, n_pages=64, kv_type="f32", page_tokens=loop.page_tokens
    )
    plan, start, prefill = loop._made_for_cuda()
    loop.mode.replace(plan, start)
    loop.plan, loop.start, loop.prefill = plan, start, prefill
    assert plan.constants.endswith("static")
    assert isinstance(prefill, TorchChunks)
    generation = driver.admit(2, PROMPT, most=8)
    driver.run()
    assert driver.tokens(generation) == expected
    loop.close()
