"""Under load: many streaming clients, some of whom leave early; and the load generator itself."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ostinato.serve.load import Lengths, Load, Outcome, Server, report, run
from tests.cli.conftest import RunCli
from tests.serve.running import Running, serving

COMPLETIONS = "/v1/completions"
N_REQUESTS, N_CLIENTS = 200, 32


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the load; who leaves early does so after that many tokens."""

    body: dict[str, Any]
    leaves_after: int | None


def asked(number: int) -> Asked:
    chance = random.Random(number)
    body = {
        "prompt": [chance.randrange(3, 300) for _ in range(chance.randint(1, 120))],
        "max_tokens": chance.randint(2, 60),
        "seed": number,
        "temperature": chance.choice([0.0, 0.7, 1.3]),
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    return Asked(body, chance.randint(1, 8) if number % 3 == 0 else None)


async def answer(server: Server, one: Asked) -> tuple[str, str]:
    """The text that came, and how it ended: `left`, a finish reason, or an error's code."""
    text, end, n = "", "", 0
    async with asyncio.timeout(120), aclosing(server.post(COMPLETIONS, one.body, None)) as lines:
        async for line in lines:
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            assert not end or not chunk.get("choices"), "nothing comes after the end"
            if "error" in chunk:
                return text, str(chunk["error"]["code"])
            for choice in chunk["choices"]:
                text += choice["text"]
                end = choice["finish_reason"] or end
                n += 1
            if one.leaves_after is not None and n >= one.leaves_after and not end:
                return text, "left"
    return text, end


async def together(server: Server, load: list[Asked]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = [("", "")] * len(load)
    left = iter(enumerate(load))

    async def client() -> None:
        for number, one in left:
            found[number] = await answer(server, one)

    await asyncio.gather(*(client() for _ in range(N_CLIENTS)))
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_200_requests_of_32_clients_a_third_of_whom_leave_early(tiny: Path) -> None:
    load = [asked(number) for number in range(N_REQUESTS)]
    with serving(tiny, llm={"context": 256, "slots": 8}) as running:
        server = Server.at(running.url)
        first = asyncio.run(together(server, load))
        settle(running)
        gc.collect()
        before = resident_bytes()
        found = asyncio.run(together(server, load))
        settle(running)
        gc.collect()
        grown = resident_bytes() - before
        alone = [asyncio.run(answer(server, Asked(one.body, None))) for one in load[:60]]
        settle(running)
        stats = running.llm.stats()
        log = list(running.log)
    assert [end for _, end in found if end not in ("left", "length")] == []
    n_left = sum(end == "left" for _, end in found)
    assert N_REQUESTS // 5 < n_left <= N_REQUESTS // 3 + 1
    # Every request ended once: by the engine's count, and by the log's.
    assert sum(stats.ended.values()) == stats.submitted == 2 * N_REQUESTS + len(alone)
    assert len(log) == len({line["id"] for line in log}) == stats.submitted
    assert {line["outcome"] for line in log} <= {"length", "cancelled"}
    # Everything is back.
    assert stats.live == stats.prefilling == stats.waiting == stats.pages_leased == 0
    assert running.service.boxes == set()
    assert running.service.n_running == 0
    assert grown < 24 * 2**20, f"{grown / 2**20:.1f} MiB more after the same load again"
    # And an answer is what it would have been alone, or its beginning.
    for (text, end), (whole, _), (before_, _) in zip(found, alone, first, strict=False):
        assert whole.startswith(text) if end == "left" else whole == text
        assert whole.startswith(before_)


def settle(running: Running) -> None:
    """Wait until no request is running any more."""
    end = time.monotonic() + 60
    while running.service.n_running or running.llm.stats().live:
        assert time.monotonic() < end
        time.sleep(0.01)


# The load generator


def test_a_load_is_counted_as_the_server_counts_it(server: Running) -> None:
    before = server.llm.stats()
    load = Load(server.url, model="tiny", n_requests=12, clients=3, prompt=Lengths(2, 9), answer=Lengths(3, 6))
    found = report(asyncio.run(run(load)))
    after = server.llm.stats()
    assert (found.answered, found.errors) == (12, {})
    assert found.tokens == after.tokens - before.tokens
    assert found.first_token_s is not None
    assert found.first_token_s.n == 12
    assert found.gap_s is not None
    assert found.gap_s.p50 <= found.gap_s.p99 <= found.gap_s.most
    assert found.tokens_s == pytest.approx(found.tokens / found.seconds)


@pytest.mark.slow
def test_arrivals_do_not_wait_for_answers(server: Running) -> None:
    load = Load(server.url, n_requests=10, clients=None, rate=200.0, answer=Lengths(100, 100), kind="completions")
    outcomes = asyncio.run(run(load))
    assert report(outcomes).answered == 10
    assert max(one.asked for one in outcomes) < max(one.ended for one in outcomes)


def test_errors_of_a_server_are_counted_and_nothing_else(server: Running) -> None:
    outcomes = asyncio.run(run(Load(server.url, model="gpt-4", n_requests=3)))
    assert "gpt-4" in outcomes[0].said
    found = report(outcomes)
    assert (found.answered, found.errors, found.tokens) == (0, {"HTTP 404": 3}, 0)
    found = report(asyncio.run(run(Load("http://127.0.0.1:9", n_requests=2))))
    assert found.errors == {"ConnectionRefusedError": 2}


def test_figures_of_a_load_are_those_of_its_requests() -> None:
    outcomes = [
        Outcome(asked=0.0, ended=2.0, first=0.5, gaps=[0.5, 1.0], n_tokens=3, n_prompt=4),
        Outcome(asked=1.0, ended=4.0, first=2.0, gaps=[1.0], n_tokens=2, n_prompt=1),
        Outcome(asked=0.0, ended=1.0, error="HTTP 429"),
    ]
    found = report(outcomes)
    assert (found.seconds, found.tokens, found.tokens_s, found.prompt_tokens) == (4.0, 5, 1.25, 5)
    assert found.first_token_s is not None
    assert (found.first_token_s.p50, found.first_token_s.most) == (0.5, 1.0)
    assert found.per_token_s is not None
    assert found.per_token_s.mean == 0.875
    assert found.errors == {"HTTP 429": 1}


@pytest.fixture
def ostinato(capsys: pytest.CaptureFixture[str]) -> RunCli:
    from ostinato.cli import call
    from tests.cli.conftest import Ran

    def run_verb(*arguments: str | Path) -> Ran:
        code = call([str(argument) for argument in arguments])
        written = capsys.readouterr()
        return Ran(code, written.out, written.err)

    return run_verb


@pytest.mark.slow
def test_bench_serve_prints_a_table_a_line_of_json_and_a_picture(
    server: Running, ostinato: RunCli, tmp_path: Path
) -> None:
    picture = tmp_path / "load.png"
    words = ("--requests", "6", "--concurrency", "2", "--prompt-words", "4-8", "--max-tokens", "5")
    ran = ostinato("bench", "serve", server.url, *words, "--api-key", "not-for-the-log", "--plot", picture)
    assert ran.code == 0, ran.err
    assert "first token" in ran.out
    told = json.loads(ran.out.splitlines()[-1])
    assert (told["answered"], told["tokens"]) == (6, 30)
    assert "not-for-the-log" not in ran.out
    assert picture.stat().st_size > 1000
    ran = ostinato("bench", "serve", server.url, *words, "--json", "--plot", tmp_path / "load.unknown")
    assert ran.code == 2
    assert json.loads(ran.out)["answered"] == 6  # what was measured is not lost with the picture
    whole = ostinato("bench", "serve", server.url, *words, "--no-stream", "--json")
    assert json.loads(whole.out)["whole_s"]["n"] == 6


def test_bench_serve_refuses_what_it_cannot_ask(ostinato: RunCli) -> None:
    assert ostinato("bench", "serve", "http://127.0.0.1:9").code == 2
    assert ostinato("bench", "serve", "ftp://x", "--warmup", "0").code == 2
    assert ostinato("bench", "serve", "--rate", "5", "--concurrency", "2").code == 2
    for option in ("--rate", "--timeout"):
        for value in ("nan", "inf", "0", "-1"):
            ran = ostinato("bench", "serve", option, value)
            assert ran.code == 2
            assert option in ran.err
    assert "16-128" in ostinato("bench", "serve", "--max-tokens", "many").err
