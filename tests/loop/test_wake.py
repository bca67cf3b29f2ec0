"""The wake event that native code sets: it is heard once, however often it was set, and setting it blocks no thread."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from ostinato.loop.wake import FileWakeEvent


def test_what_was_set_is_heard_until_it_is_cleared() -> None:
    wake = FileWakeEvent()
    assert not wake.wait(0)
    wake.set()
    wake.set()
    assert wake.wait(0)
    assert wake.wait()
    wake.clear()
    assert not wake.wait(0)
    wake.clear()


def test_a_write_to_its_file_wakes_a_waiting_thread() -> None:
    wake = FileWakeEvent()
    threading.Timer(0.05, lambda: os.write(wake.fd, (1).to_bytes(8, "little"))).start()
    began = time.monotonic()
    assert wake.wait(20)
    assert time.monotonic() - began < 10


def test_a_wait_ends_at_its_timeout_when_the_event_is_not_set() -> None:
    began = time.monotonic()
    assert not FileWakeEvent().wait(0.02)
    assert time.monotonic() - began >= 0.019


@pytest.mark.parametrize("pipe", [False, True])
def test_ringing_never_blocks_and_one_clear_is_enough(pipe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pipe:  # as on systems without event files
        monkeypatch.delattr(os, "eventfd", raising=False)
    wake = FileWakeEvent()
    for _ in range(20_000 if pipe else 100):
        wake.set()
    wake.clear()
    assert not wake.wait(0)


@pytest.mark.slow
def test_its_file_is_closed_when_the_event_has_no_reference_left() -> None:
    wake = FileWakeEvent()
    fd = wake.fd
    del wake
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
