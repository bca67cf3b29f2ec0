"""For the scripts of coding agents: a folder of work, the documented settings, a run that reaches no other server.

It imports nothing of Ostinato. The settings are the ones that docs/clients.md shows, with the address and the model of
this server put in.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from checks import MODEL, check

PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
PROGRAMS = Path("node_modules") / ".bin"
LONGEST_S = 100.0
QUESTION = "Which flower does note.txt name? Look into the file."
FLOWER = os.environ["CLIENT_FLOWER"]  # only the file has it, so that an answer with it has read the file
SAID = os.environ["CLIENT_SAID"]


def documented(language: str, server: str) -> str:
    """The block of the page in a language, for this server and model."""
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    check("the page shows one file of settings", len(found) == 1)
    return found[0].replace("http://127.0.0.1:8000", server).replace('"MODEL"', f'"{MODEL}"')


def work_in(folder: Path) -> Path:
    """A folder with the file that the agent is to read."""
    work = folder / "work"
    work.mkdir()
    (work / "note.txt").write_text(f"{FLOWER}\n")
    return work


def events(program: str, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """What an agent prints, a line of JSON each; it must end with 0 and have asked for nothing elsewhere."""
    with elsewhere() as (proxy, asked):
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "HTTP_PROXY": proxy,
            "HTTPS_PROXY": proxy,
            "NO_PROXY": "127.0.0.1",
            **variables,
        }
        command = [str(PROGRAMS.absolute() / program), *words]
        code, printed = ended(command, environment, work_in(folder))
    check("it exits with 0", code == 0)
    check(f"it asks for nothing elsewhere ({', '.join(asked) or 'nothing'})", not asked)
    return [json.loads(line) for line in printed.splitlines()]


def ended(command: Sequence[str], environment: Mapping[str, str], work: Path) -> tuple[int, str]:
    """The exit code of a command and what it printed; after a while it is killed, with the processes it started."""
    running = subprocess.Popen(
        command,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, complaints = running.communicate(timeout=LONGEST_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    if running.returncode:
        print(printed, complaints, sep="\n")
    return running.returncode, printed


@contextmanager
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """The address of a proxy that refuses, and the requests that it got: what was meant for other machines."""
    asked: list[str] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                asked.append(connection.recv(4096).decode(errors="replace").partition("\r\n")[0])
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")

    threading.Thread(target=refuse, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
