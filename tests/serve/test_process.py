"""Events of a server's process: none is lost while its supervisor does not read, and none makes it wait."""

from __future__ import annotations

import json
import os

from ostinato.serve.process import EventPipe


def read_all(file: int) -> bytes:
    text = b""
    os.set_blocking(file, False)
    while True:
        try:
            text += os.read(file, 65_536)
        except BlockingIOError:
            return text


def test_while_the_supervisor_does_not_read_heartbeats_are_dropped_and_other_events_are_kept() -> None:
    reading, writing = os.pipe()
    tell = EventPipe(writing)
    for _ in range(10_000):
        tell({"event": "alive"})
    tell({"event": "ready", "facts": "x" * 6000})  # longer than a pipe takes at once
    tell({"event": "needs"})
    text = read_all(reading)
    for _ in range(3):
        tell({"event": "alive"})
        text += read_all(reading)
    names = [json.loads(line)["event"] for line in text.splitlines()]
    assert [name for name in names if name != "alive"] == ["ready", "needs"]
    assert 0 < names.count("alive") < 10_000
    os.close(reading)
    tell({"event": "alive"})  # the supervisor has gone: no error
    os.close(writing)
