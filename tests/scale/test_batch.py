"""`ostinato batch` in this process and as a program: the server's own answers, once for each line, whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM
from ostinato.cli.batch import Bar
from ostinato.errors import EngineDead
from ostinato.options import LoadOptions
from ostinato.scale.batch import Tally, answer_all, run_here
from ostinato.scale.batch_file import Requests, Results
from ostinato.serve.settings import ServeOptions
from tests.cli.conftest import RunCli, home, ostinato, start  # noqa: F401  fixtures
from tests.scale.conftest import line, read_lines, write_lines
from tests.scale.running import killed_at
from tests.serve.running import serving

N = 500


def run(tiny: Path, requests: Path, results: Path) -> tuple[Tally, list[Tally]]:
    options = ServeOptions(str(tiny), load=LoadOptions(device="cpu", context=256, slots=4))
    asked, on_progress = Requests(requests), []
    with Results(results, asked, "tiny") as written:
        loaded = run_here(
            options,
            lambda: LLM(tiny, device="cpu", context=256, slots=4),
            asked,
            written,
            on_progress=lambda tally: on_progress.append(
                Tally(**{n: getattr(tally, n) for n in Tally.__dataclass_fields__})
            ),
        )
        return asyncio.run(loaded), on_progress


def test_answers_and_digests_are_those_of_the_server(tiny: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "seed": 1}
    lines: list[Any] = [line(number) for number in range(1, 6)]
    lines.append({"custom_id": "chat", "url": "/v1/chat/completions", "body": chat})
    lines.append(line(8, max_tokens=-2))
    lines.append("{no json")
    tally, on_progress = run(tiny, write_lines(tmp_path / "in", lines), tmp_path / "out")
    found = {one["line"]: one for one in read_lines(tmp_path / "out")}
    with serving(tiny, llm={"context": 256, "slots": 4}) as server:
        for number, one in enumerate(lines[:7], 1):
            reply = server.post(one["url"], one["body"])
            response = found[number]["response"]
            assert found[number]["custom_id"] == one["custom_id"]
            assert response["status_code"] == reply.status_code
            if reply.status_code == 200:
                assert response["body"]["digest"] == reply.json()["digest"]
                assert response["body"]["choices"] == reply.json()["choices"]
            else:
                assert response["body"] == reply.json()
    assert found[8]["response"] is None
    assert found[8]["error"]["code"] == "invalid_json_line"
    assert (tally.answered, tally.refused, tally.invalid) == (6, 1, 1)
    assert tally.tokens == sum(
        found[number]["response"]["body"]["usage"]["completion_tokens"] for number in range(1, 7)
    )
    assert [one.done for one in on_progress] == list(range(9))


class Faulty:
    """Answers some lines, says that it is full now and then, and dies."""

    def __init__(self, dies_after: int) -> None:
        self._left, self.full = dies_after, True

    async def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        await asyncio.sleep(0)
        self.full = not self.full
        if self.full:
            return 429, b'{"error": {"message": "full"}}'
        self._left -= 1
        if self._left < 0:
            return 503, b'{"error": {"message": "the engine is being restarted"}}'
        return 200, b'{"usage": {"completion_tokens": 1}}'


def test_an_engine_that_dies_ends_the_run_and_the_next_one_goes_on(tmp_path: Path) -> None:
    requests = Requests(write_lines(tmp_path / "in", [line(number) for number in range(20)]))
    for dies_after in (7, 3, 100):
        with Results(tmp_path / "out", requests, "m") as results:
            answering = answer_all(requests, results, Faulty(dies_after).ask, at_once=4)
            if dies_after < 20:
                with pytest.raises(EngineDead, match="the engine is being restarted; the same command goes on"):
                    asyncio.run(answering)
            else:
                asyncio.run(answering)
    assert sorted(one["line"] for one in read_lines(tmp_path / "out")) == list(range(1, 21))


@pytest.mark.slow
def test_five_hundred_lines_killed_twice_have_one_result_each(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    requests = write_lines(tmp_path / "in", [line(n, max_tokens=5) if n % 50 else "{damaged" for n in range(1, N + 1)])
    out = tmp_path / "out"
    words = ["batch", requests, out, "--model", tiny, "--device", "cpu", "--context", "256", "--slots", "4", "--json"]
    words += ["--mode", "eager"]  # slow enough to be killed half way
    command = [sys.executable, "-m", "ostinato", *words]
    for killed_after in (random.Random(1).randrange(20, 100), 250):
        assert killed_at(killed_after, out, command) < N
    done = ostinato(*words)
    assert done.code == 0, done.err
    on_progress = json.loads(done.out)
    assert on_progress["already_done"] >= 250
    assert on_progress["already_done"] + on_progress["answered"] + on_progress["invalid"] == N
    results = read_lines(out)
    assert Counter(one["line"] for one in results) == Counter(range(1, N + 1))
    assert sum(one["error"] is not None for one in results) == N // 50
    again = ostinato(*words)
    assert again.code == 0
    assert "has a result for each of 500 lines already" in again.err
    assert json.loads(again.out)["already_done"] == N


def test_the_verb_says_what_it_did(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    requests = write_lines(tmp_path / "in", [line(1), line(2)])
    words = ("--model", tiny, "--device", "cpu", "--context", "256")
    ran = ostinato("batch", requests, tmp_path / "out", *words)
    assert ran.code == 0, ran.err
    assert "out: 2 answered, 0 refused, 0 invalid, 0 already done; 8 tokens in" in ran.err
    refused = ostinato("batch", write_lines(tmp_path / "other", [line(3)]), tmp_path / "out", *words)
    assert refused.code == 2
    assert "belongs to something else" in refused.err


def test_who_watches_sees_a_bar_with_the_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with os.fdopen(terminal, "w") as watched, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", watched)
        with Bar() as bar:
            for answered in range(4):
                bar(Tally(lines=10, already_done=2, answered=answered, tokens=8 * answered))
    shown = ""
    with os.fdopen(screen, "rb", buffering=0) as seen, suppress(OSError):  # its end, once the writer is closed
        while part := seen.read(100_000):
            shown += part.decode()
    assert "5/10" in shown
    assert "tokens/s" in shown
    assert re.search(r"\d:\d\d:\d\d|-:--:--", shown)


def test_a_log_gets_a_line_at_the_start_and_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bar() as bar:
        for answered in range(4):
            bar(Tally(lines=10, already_done=2, answered=answered, tokens=8 * answered))
        monkeypatch.setattr(sys.modules[Bar.__module__], "_LINE_EVERY_S", 0.0)
        bar(Tally(lines=10, already_done=2, answered=4, tokens=32))
    assert re.fullmatch(r"2 of 10 lines\n6 of 10 lines, \d+\.\d tokens/s\n", capsys.readouterr().err)


@pytest.mark.slow
def test_an_interrupted_batch_says_how_to_go_on(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    requests, out = write_lines(tmp_path / "in", [line(n, max_tokens=32) for n in range(40)]), tmp_path / "out"
    words = ("batch", requests, out, "--model", tiny, "--device", "cpu", "--context", "256", "--mode", "eager")
    with start(words) as program:
        assert program.stderr is not None
        while not (out.exists() and out.read_bytes()):
            time.sleep(0.02)
        program.send_signal(signal.SIGINT)
        said = program.stderr.read().decode()
        assert program.wait(30) == 130
    done = len(read_lines(out))
    assert 0 < done < 40
    assert said.splitlines()[-1] == (
        f"interrupted: {done} of 40 lines have a result in {out}; the same command answers the rest"
    )
    again = ostinato(*words)
    assert f"{40 - done} answered, 0 refused, 0 invalid, {done} already done; " in again.err
