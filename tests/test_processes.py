"""A file for messages: it loses what cannot be written, never raises, and says later what was lost."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from ostinato.processes import LossyFile


def text_over(raw: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(raw, encoding="utf-8", line_buffering=True)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_messages_to_a_full_disk_are_lost_and_counted_when_there_is_room_again(tmp_path: Path) -> None:
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    full, descriptor = os.open("/dev/full", os.O_WRONLY), os.dup(log)
    try:
        raw = LossyFile(descriptor)
        with text_over(raw) as text:
            text.write("first\n")
            assert raw.error is None
            os.dup2(full, descriptor)
            text.write("lost\n")
            text.write("lost too\n")
            assert raw.error is not None
            os.dup2(log, descriptor)
            text.write("second\n")
            assert raw.error is None
            text.write("third\n")
    finally:
        for each in (log, full, descriptor):
            os.close(each)
    note = "note: 2 messages before this one were lost: No space left on device"
    assert (tmp_path / "log").read_text() == f"first\n\n{note}\nsecond\nthird\n"


def test_messages_to_a_reader_that_has_left_are_lost() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        with text_over(LossyFile(writing)) as text:
            text.write("lost\n")
    finally:
        os.close(writing)
