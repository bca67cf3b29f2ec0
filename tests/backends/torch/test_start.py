"""The CPU as a device: a main thread that waits runs its turns, and a key pressed meanwhile loses nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from ostinato.backends.torch.start import torch_device
from ostinato.loop.cpu_device import CpuDevice
from tests.engine.rig import DEADLINE_S


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = torch_device()
    yield made
    made.close()


def test_turns_are_done_by_who_helps_on_the_main_thread_while_they_are_lent(device: CpuDevice) -> None:
    who: list[threading.Thread] = []

    def loop() -> Iterator[None]:
        for _ in range(3):
            who.append(threading.current_thread())
            yield

    device.lend(DEADLINE_S)
    playing = device.submit(loop)
    while not playing.done():
        assert device.help()
    assert who == [threading.main_thread()] * 3
    assert not device.help(), "there is nothing left to do"


def test_turns_run_on_the_devices_own_thread_if_no_waiting_thread_helps(device: CpuDevice) -> None:
    who: list[threading.Thread] = []
    device.lend(0.01)
    device.submit(lambda: who.append(threading.current_thread())).result(DEADLINE_S)
    assert who != [threading.main_thread()]


def test_a_job_beside_a_loop_has_its_turn_after_a_step_and_before_the_next(device: CpuDevice) -> None:
    order: list[str] = []

    def loop() -> Iterator[None]:
        for _ in range(3):
            order.append("step")
            yield

    device.lend(DEADLINE_S)
    playing = device.submit(loop)
    assert device.help()
    for _ in range(2):
        device.beside(lambda: order.append("job"))
    while not playing.done():
        device.help()
    assert order == ["step", "job", "step", "job", "step"]


def test_an_interrupt_waits_for_the_end_of_the_turn(device: CpuDevice) -> None:
    ended: list[bool] = []

    def step() -> None:
        signal.raise_signal(signal.SIGINT)
        ended.append(True)

    device.lend(DEADLINE_S)
    job = device.submit(step)
    with pytest.raises(KeyboardInterrupt):
        device.help()
    assert ended == [True]
    assert job.result(DEADLINE_S) is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_that_is_not_the_main_one_does_no_turns(device: CpuDevice) -> None:
    helped: list[bool] = []
    thread = threading.Thread(target=lambda: helped.append(device.help()))
    thread.start()
    thread.join(DEADLINE_S)
    assert helped == [False]
