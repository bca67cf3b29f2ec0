"""The bell that native code rings: what was set is heard once, however often it was, and nobody is blocked by it."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from ostinato.loop.bell import FileBell


def test_what_was_set_is_heard_until_it_is_cleared() -> None:
    bell = FileBell()
    assert not bell.is_set()
    assert not bell.wait(0)
    bell.set()
    bell.set()
    assert bell.is_set()
    assert bell.wait()
    bell.clear()
    assert not bell.is_set()
    bell.clear()


def test_a_write_to_its_file_wakes_whoever_waits() -> None:
    bell = FileBell()
    threading.Timer(0.05, lambda: os.write(bell.fd, (1).to_bytes(8, "little"))).start()
    began = time.monotonic()
    assert bell.wait(20)
    assert time.monotonic() - began < 10


def test_a_wait_ends_when_nobody_rings() -> None:
    began = time.monotonic()
    assert not FileBell().wait(0.02)
    assert time.monotonic() - began >= 0.019


@pytest.mark.parametrize("pipe", [False, True])
def test_ringing_never_blocks_and_one_clear_is_enough(pipe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pipe:  # as on systems without event files
        monkeypatch.delattr(os, "eventfd", raising=False)
    bell = FileBell()
    for _ in range(20_000 if pipe else 100):
        bell.set()
    bell.clear()
    assert not bell.is_set()


def test_its_file_is_given_back_when_nobody_holds_it() -> None:
    bell = FileBell()
    fd = bell.fd
    del bell
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
