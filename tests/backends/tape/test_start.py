"""How the host starts the tape: what is asked of the driver, in which order, on which stream. No card is needed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from ctypes import c_void_p
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.backends import cards
from ostinato.backends.cuda.chip import Chip
from ostinato.backends.tape.plan import Argument, TapeStep, tape_plan
from ostinato.backends.tape.program import TapeProgram
from ostinato.backends.tape.start import TapeLoop
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.tables import tensor_tables
from ostinato.cache.groups import one_group
from ostinato.errors import BadPointer, DecodeInvariantError, HardwareCannot
from ostinato.loop.guard import Guard
from ostinato.loop.layout import Layout
from tests.backends.cuda.stand_in import StandIn
from tests.backends.tape.models import shape_of, small

CPU = torch.device("cpu")
CHIP = Chip((9, 0), 3, 227 << 10)
FUNCTION = 77


class Launch:
    """One launch, as the driver was asked for it; the argument is copied, as the driver does."""

    def __init__(self, function: int, *words: Any) -> None:
        self.function, self.grid, self.threads = function, words[:3], words[3:6]
        self.shared_bytes, self.stream = words[6:8]
        self.argument = Argument.from_buffer_copy(Argument.from_address(c_void_p.from_address(words[8]).value or 0))


class Card(StandIn):
    """A driver that notes what it is asked; `answers` are errors by the name of a call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.launches: list[Launch] = []
        self.answers: dict[str, int] = {}
        self.blocks_each = 1
        self.shared_bytes = 0
        self.compiled_for: list[str] = []
        self.current_in: list[int] = []  # threads that were told which card is theirs
        attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
        driver = SimpleNamespace(
            CUkernel=int,
            CUstream=int,
            CUfunction_attribute=attribute,
            cuKernelSetAttribute=self._answering("attribute", self._set),
            cuKernelGetFunction=self._answering("function", lambda kernel: FUNCTION),
            cuOccupancyMaxActiveBlocksPerMultiprocessor=self._answering("occupancy", lambda *_: self.blocks_each),
            cuLaunchCooperativeKernel=self._answering("launch", self._launch),
        )
        module = SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=5 if name == "tape" else 0))
        core = SimpleNamespace(
            Device=lambda index: SimpleNamespace(set_current=self._set_current, device_id=index),
            ObjectCode=SimpleNamespace(from_cubin=self._load),
        )
        self.module = module
        self.n_loaded = 0
        monkeypatch.setattr("ostinato.backends.cuda.start._MODULES", {})
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
        monkeypatch.setitem(sys.modules, "cuda.core", core)
        monkeypatch.setattr("ostinato.backends.tape.start.cubin", self._cubin)
        monkeypatch.setattr("ostinato.backends.cuda.gpu.chip_of", lambda gpu: CHIP)

    def _answering(self, name: str, call: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def answer(*words: Any) -> tuple[Any, ...]:
            return (self.answers[name], None) if name in self.answers else (0, call(*words))

        return answer

    def _load(self, binary: bytes) -> Any:
        self.n_loaded += 1
        return self.module

    def _set_current(self) -> None:
        self.current_in.append(threading.get_ident())

    def _set(self, attribute: int, value: int, kernel: int, device: int) -> None:
        assert (attribute, kernel, device) == (8, 5, 0)
        self.shared_bytes = value

    def _launch(self, *words: Any) -> None:
        assert threading.get_ident() in self.current_in  # a driver's call needs its context in the very thread
        self.note("kernel")
        self.launches.append(Launch(*words))

    def _cubin(self, source: str, name: str, *, headers: dict[str, str], arch: str, **options: object) -> bytes:
        assert "KERNEL(tape, Tape" in source
        assert {"parts.h", "machine.h", "step_boundary.h", "layout.h", "shape.h"} <= set(headers)
        self.compiled_for.append(f"{name} {arch}")
        return b"cubin"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def start_on(card: Card) -> TapeLoop:
    model = small(shape_of())
    memory = PagedMemory.of(model, one_group(model.shape.attention, 6), n_slots=3, kv_type="f32", page_tokens=16)
    tables = tensor_tables(Layout(3, 4, model.shape.vocab), CPU)
    program = TapeProgram.of(model, tables.layout, 16, model.shape.vocab, CHIP, kv_type="f32", n_compute_warps=2)
    step = TapeStep(model, memory, tables, program)
    return TapeLoop(tape_plan(model, memory, tables, step), step, tables, Guard(), lambda: card.note("wake event"))


def test_a_trigger_is_one_cooperative_launch_with_one_struct(card: Card) -> None:
    start = start_on(card)
    start.build()
    sizes = start._step.sizes
    assert card.compiled_for == ["tape.cu sm_90a"]
    assert card.shared_bytes == sizes.shared_bytes
    assert (start.n_instantiations, start.n_launches, card.launches) == (1, 0, [])
    start.launch()
    assert card.noted == [("kernel", "default"), ("event on loop", "default")]
    (launch,) = card.launches
    assert (launch.function, launch.grid, launch.threads) == (FUNCTION, (3, 1, 1), (sizes.n_threads, 1, 1))
    assert (launch.shared_bytes, launch.stream) == (sizes.shared_bytes, start.stream.cuda_stream)
    assert bytes(launch.argument) == bytes(start._step.argument)
    assert (launch.argument.plan_hash, launch.argument.epoch) == (start._plan.hash, start.executable)
    assert start.n_launches == 1
    assert start.device_paced
    assert not start.running
    assert start.wait(1.0)
    start.close()


def spoil_null(start: TapeLoop, name: str) -> None:
    setattr(start._step.argument, name, None)


def spoil_foreign(start: TapeLoop, name: str) -> None:
    setattr(start._step.argument, name, torch.zeros(8).data_ptr())


def spoil_freed(start: TapeLoop, name: str) -> None:
    own: Any = start._step.buffers[name]
    own.set_(torch.zeros(0, dtype=own.dtype))


def spoil_moved(start: TapeLoop, name: str) -> None:
    own: Any = start._step.buffers[name]
    own.set_(torch.zeros_like(own))


@pytest.mark.parametrize("spoil", [spoil_null, spoil_foreign, spoil_freed, spoil_moved])
@pytest.mark.parametrize("name", ["tape", "caches", "x", "logits"])
def test_an_address_that_is_null_foreign_freed_or_moved_is_refused_by_name_before_the_launch(
    card: Card, spoil: Callable[[TapeLoop, str], None], name: str
) -> None:
    """E-1."""
    start = start_on(card)
    start.build()
    spoil(start, name)
    for launch in (start.launch, start.step):
        with pytest.raises(BadPointer, match=f"^{name} "):
            launch()
    assert card.launches == []
    other = start_on(card)
    other.build()
    other.launch()
    assert len(card.launches) == 1
    for one in (start, other):
        one.close()


def spoil_page(step: TapeStep) -> None:
    step._kept[3][0].set_(torch.zeros(0))  # type: ignore[call-overload]


def spoil_place(step: TapeStep) -> None:
    step.buffers["caches"][0] = 0


@pytest.mark.parametrize(
    ("spoil", "said"), [(spoil_page, "part 3 of keys and values"), (spoil_place, "the table of addresses")]
)
def test_freed_keys_or_a_written_table_of_their_addresses_are_refused_before_the_launch(
    card: Card, spoil: Callable[[TapeStep], None], said: str
) -> None:
    """E-1: the kernel takes the addresses of keys and values from a table of its own."""
    start = start_on(card)
    start.build()
    spoil(start._step)
    for launch in (start.launch, start.step):
        with pytest.raises(BadPointer, match=f"^{said} "):
            launch()
    assert card.launches == []
    start.close()


def test_the_tables_and_the_clock_pass_the_same_gate(card: Card) -> None:
    """E-1: a clock is null unless times are noted."""
    start = start_on(card)
    start.build()
    start._step.argument.clock = start._step.buffers["clock"].data_ptr()
    with pytest.raises(BadPointer, match=r"^clock "):
        start.launch()
    start.note_times()
    start.launch()
    start._step.argument.view.rings = 64
    with pytest.raises(BadPointer, match=r"^view\.rings "):
        start.launch()
    assert len(card.launches) == 1
    start.close()


def test_engines_of_one_model_load_its_kernel_once_and_keep_it(card: Card) -> None:
    """E-8."""
    for _ in range(3):
        start = start_on(card)
        start.build()
        start.close()
    assert card.n_loaded == 1


def test_a_card_is_held_until_its_start_is_closed(card: Card) -> None:
    assert not cards.is_held(str(CPU))
    start, other = start_on(card), start_on(card)
    start.close()
    start.close()
    assert cards.is_held(str(CPU))
    other.close()
    assert not cards.is_held(str(CPU))


def test_whichever_thread_launches_has_the_card_as_its_own(card: Card) -> None:
    start = start_on(card)
    start.build()
    other = threading.Thread(target=start.launch)
    other.start()
    other.join()
    assert len(card.launches) == 1
    start.close()


def test_only_a_step_of_the_hosts_is_single_and_it_is_waited_for(card: Card) -> None:
    start = start_on(card)
    start.build()
    start.launch()
    card.noted.clear()
    start.step()
    assert card.noted == [("kernel", "default"), ("event on loop", "default"), ("wake event", "default")]
    start.launch()
    assert [launch.argument.single for launch in card.launches] == [0, 1, 0]
    assert start._step.argument.single == 0
    assert start.n_launches == 2  # of decoding; a step is for comparisons
    start.close()


def test_every_build_is_an_executable_of_its_own(card: Card) -> None:
    start = start_on(card)
    start.build()
    first = start.executable
    start.build()
    assert first != start.executable == start._step.argument.epoch
    assert start.n_instantiations == 2
    start.close()


def test_decode_mode_refuses_to_build_to_step_to_close_and_to_launch_but_for_a_trigger(card: Card) -> None:
    """I-1, I-2, I-3."""
    start = start_on(card)
    start.build()
    before = start.executable
    start._guard.lock()
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("I-1", start.build),
        ("I-2", start.step),
        ("I-2", start.launch),
        ("I-3", start.close),
    )
    for invariant, call in calls:
        with pytest.raises(DecodeInvariantError) as refused:
            call()
        assert refused.value.invariant == invariant
    assert (start.executable, start.n_instantiations, card.launches) == (before, 1, [])
    with start._guard.launching():
        start.launch()
    assert len(card.launches) == 1
    start._guard.unlock()
    start.close()
    assert start._kernel is None


def test_a_grid_that_does_not_fit_is_refused(card: Card) -> None:
    """E-83: they wait for each other, and those that are not there would never come."""
    card.blocks_each = 0
    start = start_on(card)
    with pytest.raises(HardwareCannot, match="has 3 blocks that wait for each other, and 0 fit on this card at once"):
        start.build()
    assert start.n_instantiations == 0
    start.close()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("attribute", "could not give it its memory"),
        ("function", "could not load it"),
        ("occupancy", "could not ask how many blocks fit"),
        ("launch", "could not launch it"),
    ],
)
def test_an_error_of_the_driver_is_a_matter_of_hardware_with_a_way_out(card: Card, call: str, words: str) -> None:
    start = start_on(card)
    card.answers[call] = 701

    def built_and_launched() -> None:
        start.build()
        start.launch()

    with pytest.raises(HardwareCannot, match=rf"{words}: the persistent kernel ended with 701; use --mode loop"):
        built_and_launched()
    assert card.launches == []
    start.close()


def test_a_job_goes_behind_the_loop_on_its_own_stream(card: Card) -> None:
    """It fills the card: beside it a job would wait for ever, and on another stream its end would not be known."""
    start = start_on(card)
    assert start.alone
    start.build()
    start.launch()
    card.noted.clear()
    work = start.beside(lambda: card.note("prompt"))
    assert card.noted == [("prompt", "loop"), ("event on loop", "loop")]
    assert work.done()
    start.close()


def test_a_lost_device_is_reported_and_no_call_waits_for_it(card: Card) -> None:
    start = start_on(card)
    start.build()
    start.launch()
    card.sick = True
    assert not start.running
    assert "illegal memory access" in str(start.failure())
    start.close()
