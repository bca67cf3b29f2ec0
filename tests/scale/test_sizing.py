"""The sizing arithmetic against the simulation, and the files it reads."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import BadInput, BadOption
from ostinato.scale import simulate
from ostinato.scale.measured import Replica, from_decode, from_serve, read_measured
from ostinato.scale.sizing import Demand, _prompt_waits, capacity, crowd_of, size, smallest, working
from tests.cli.conftest import RunCli, home, ostinato  # noqa: F401  fixtures

FAST = Replica(prompt_tok_s=20_000, base_s=0.0025, each_s=0.00009, most_live=32, source="made up")
DEMAND = Demand(rps=200, prompt=800, output=200, p99_first_token_s=1.0)
REPLICAS = st.builds(
    Replica,
    prompt_tok_s=st.floats(4000, 50_000),
    base_s=st.floats(0.0005, 0.05),
    each_s=st.floats(0, 0.002),
    most_live=st.just(16),
    source=st.just("drawn"),
)


def decode_line(rates: dict[int, float], prompt: float = 20_000.0) -> str:
    figures = [{"kind": "pp", "n_tokens": 512, "depth": 0, "batch": 1, "mode": "loop", "tok_s": prompt}]
    figures += [
        {"kind": "tg", "n_tokens": 128, "depth": 500, "batch": batch, "mode": "loop", "tok_s": rate}
        for batch, rate in rates.items()
    ]
    return json.dumps({"figures": figures})


def drawn(n: int, low: float, high: float, seed: int) -> Iterator[tuple[Replica, Demand, int, float]]:
    """Replicas from slow to fast, requests from short to long, 4 to 64 slots; and a load."""
    chance = random.Random(seed)

    def between(least: float, most: float) -> float:
        return math.exp(chance.uniform(math.log(least), math.log(most)))

    for _ in range(n):
        each = chance.choice((0.0, between(1e-5, 2e-3)))
        replica = Replica(between(1e3, 1.2e5), between(5e-4, 5e-2), each, 32, "drawn")
        demand = Demand(1, round(between(30, 4000)), round(between(20, 800)), 1.0)
        yield replica, demand, chance.choice((4, 8, 16, 32, 64)), chance.uniform(low, high)


@pytest.mark.slow
@pytest.mark.parametrize(("low", "high", "near", "most"), [(0.1, 0.5, 1.2, 1.3), (0.5, 0.7, 1.35, 1.75)])
def test_the_formula_is_near_the_simulation(low: float, high: float, near: float, most: float) -> None:
    """`near`: nine of ten percentiles are; `most`: all are. What docs/scale.md says of it."""
    times: dict[str, list[float]] = {"p99_first_token_s": [], "p50_first_token_s": [], "gap_s": []}
    for replica, demand, slots, load in drawn(30, low, high, seed=7):
        rate = load * capacity(replica, demand, slots)
        by_formula = working(replica, demand, slots, rate)
        played = simulate.replica(replica, demand, slots, rate, n=8000)
        for name, found in times.items():
            ratio = getattr(by_formula, name) / getattr(played, name)
            found.append(max(ratio, 1 / ratio))
    for name, found in times.items():
        found.sort()
        assert found[26] < (near if name != "gap_s" else 1.4), name
        assert found[-1] < (most if name != "gap_s" else 2.0), name


@pytest.mark.slow
def test_a_replica_keeps_up_below_its_capacity_and_not_above() -> None:
    """Where it does not, the more requests come, the longer the last of them wait."""
    for replica, demand, slots, _ in drawn(6, 0, 1, seed=3):
        most = capacity(replica, demand, slots)
        for load, keeps_up in ((0.75, True), (1.4, False)):
            short, long = (simulate.replica(replica, demand, slots, load * most, n=n) for n in (4000, 16000))
            assert (long.p99_first_token_s < 2 * short.p99_first_token_s) == keeps_up
            assert math.isfinite(working(replica, demand, slots, load * most).p99_first_token_s) == keeps_up


@settings(max_examples=20, deadline=None)
@given(replica=REPLICAS, prompt=st.integers(1, 2000), output=st.integers(1, 400))
def test_more_load_is_never_better(replica: Replica, prompt: int, output: int) -> None:
    demand = Demand(1, prompt, output, 1.0)
    most = capacity(replica, demand, 16)
    waits = [working(replica, demand, 16, most * load / 10).p99_first_token_s for load in range(1, 12)]
    assert all(later >= 0.99 * earlier for earlier, later in pairwise(waits))  # the grid is not finer
    assert waits[-1] == math.inf


def test_a_plan_is_the_smallest_number_that_is_enough() -> None:
    answer = size(FAST, DEMAND, 32)
    assert working(FAST, DEMAND, 32, DEMAND.rps / answer.replicas).p99_first_token_s <= 1.0
    assert working(FAST, DEMAND, 32, DEMAND.rps / (answer.replicas - 1)).p99_first_token_s > 1.0
    assert answer.replicas >= DEMAND.rps / answer.capacity


def test_what_limits_a_plan_is_named() -> None:
    assert size(FAST, Demand(200, 8000, 10, 30.0), 32).limit == "prompts"
    assert size(FAST, Demand(200, 10, 2000, 300.0), 32).limit == "decoding"
    assert size(FAST, Demand(200, 800, 200, 0.09), 32).limit == "first token"


def test_a_target_that_no_number_meets_is_refused() -> None:
    with pytest.raises(BadInput, match="no number of replicas"):
        size(FAST, Demand(1, 8000, 10, 0.1), 32)


@given(st.integers(1, 5000), st.integers(1, 50))
def test_the_smallest_number_is_found(wanted: int, least: int) -> None:
    assert smallest(lambda n: n >= wanted, least) == max(wanted, least)


def erlang_c(servers: int, offered: float) -> float:
    """The share of those who come and find all servers taken, by the textbook."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1 - (offered / servers) * (1 - blocked))


@given(st.integers(1, 64), st.floats(0.05, 0.95))
def test_with_steps_that_take_no_longer_for_more_it_is_the_textbooks_queue(slots: int, load: float) -> None:
    """A step that grows with the live is one server for all; one that does not is a server for each."""
    alike = Replica(prompt_tok_s=1e12, base_s=0.01, each_s=0.0, most_live=slots, source="made up")
    demand = Demand(1, 1, 101, 1.0)  # the first of its tokens comes with the prompt
    crowd = crowd_of(alike, demand, slots, load * slots)
    assert crowd is not None
    assert crowd.no_slot == pytest.approx(erlang_c(slots, load * slots), rel=1e-6)
    assert crowd.live == pytest.approx(load * slots, rel=1e-6)
    together = Replica(prompt_tok_s=1e12, base_s=0.0, each_s=0.01, most_live=slots, source="made up")
    shared = crowd_of(together, demand, slots, load)
    assert shared is not None
    assert shared.no_slot == pytest.approx(load**slots, rel=1e-6)


@given(st.lists(st.floats(0.5, 1.5), min_size=1, max_size=20), st.floats(0.01, 0.95))
def test_the_wait_for_earlier_prompts_has_the_textbooks_mean(service: list[float], busy: float) -> None:
    """Pollaczek and Khinchine's."""
    grid, shares = _prompt_waits(np.array(service), busy)
    mean, square = float(np.mean(service)), float(np.mean(np.square(service)))
    wanted = busy * square / (2 * mean * (1 - busy))
    assert float(np.trapezoid(1 - shares, grid)) == pytest.approx(wanted, rel=0.03, abs=0.005 * mean)
    assert shares[0] >= 1 - busy - 1e-9
    assert shares[-1] == pytest.approx(1, abs=1e-3)


def test_a_decode_file_gives_steps_over_the_batch() -> None:
    replica = from_decode([json.loads(decode_line({1: 400.0, 8: 2500.0, 32: 6400.0}))], 800, 200, "x")
    assert replica.prompt_tok_s == 20_000
    assert replica.most_live == 32
    assert replica.step_s(8) == pytest.approx(8 / 2500, rel=0.15)


def test_a_serve_file_gives_back_the_replica_that_it_was_played_with() -> None:
    lines = []
    for clients in (1, 4, 16):
        n, prompt, output = 64, 100, 50
        steps = n * output / clients * FAST.step_s(clients)
        seconds = n * prompt / FAST.prompt_tok_s + steps
        first = {"mean": prompt / FAST.prompt_tok_s}
        lines.append(
            {
                "load": {"clients": clients},
                "seconds": seconds,
                "answered": n,
                "prompt_tokens": n * prompt,
                "tokens": n * output,
                "first_token_s": first,
            }
        )
    found = from_serve(lines, "x")
    assert found.prompt_tok_s == pytest.approx(FAST.prompt_tok_s)
    assert found.base_s == pytest.approx(FAST.base_s)
    assert found.each_s == pytest.approx(FAST.each_s)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "there is nothing in it"),
        ("loop 1 tg128\n", "no JSON"),
        ("[]", "no JSON object"),
        ("{}", "neither all of"),
        ('{"figures": [{"kind": "tg"}]}', "both a prompt"),
        ('{"figures": [{"kind": "pp"}, {"kind": "tg"}]}', "missing or wrong"),
        (decode_line({1: 0.0}), "missing or wrong"),
        ('{"first_token_s": null, "load": {"clients": null}}', "--concurrency"),
        ('{"first_token_s": null, "load": 3}', "missing or wrong"),
        (decode_line({1: 100.0}, prompt=math.inf), "missing or wrong"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "measured.json"
    path.write_text(content)
    with pytest.raises(BadInput, match=words):
        read_measured(path, 800, 200)


@pytest.mark.parametrize(
    "words",
    [{"rps": 0}, {"rps": math.nan}, {"prompt": 0}, {"prompt": 10**8}, {"p99_first_token_s": -1}, {"route_s": -1}],
)
def test_a_demand_out_of_range_is_refused(words: dict[str, float]) -> None:
    with pytest.raises(BadOption):
        Demand(**{"rps": 1, "prompt": 1, "output": 1, "p99_first_token_s": 1, **words})  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_verb_plans_and_draws(ostinato: RunCli, tmp_path: Path) -> None:  # noqa: F811
    measured = tmp_path / "measured.json"
    measured.write_text(decode_line({1: 400.0, 8: 2500.0, 32: 6400.0}))
    asked = ("scale", "plan", "--rps", "200", "--measured", measured, "--prompt", "800", "--output", "200")
    ran = ostinato(*asked, "--plot", tmp_path / "load.svg")
    assert ran.code == 0, ran.err
    on_progress = json.loads(ran.out.splitlines()[-1])
    assert on_progress["replicas"] >= on_progress["replicas_by_formula"] > 1
    assert on_progress["simulated"]["p99_first_token_s"] <= 1.0
    assert "replicas" in ran.out
    assert (tmp_path / "load.svg").read_text().lstrip().startswith("<?xml")
    assert ostinato(*asked, "--p99-first-token", "0.01").code == 2
    for words, reason in (
        (("--kv-memory", "10"), "--kv-memory needs --model"),
        (("--kv-memory", "nan"), "--kv-memory is nan"),
        (("--kv-type", "bf16"), "--kv-type needs --model"),
        (("--slots", "5000"), "--slots is 5000"),
        (("--rps", "1e300"), "more than 1000000 replicas"),
    ):
        refused = ostinato(*asked, *words)
        assert refused.code == 2
        assert reason in refused.err
    assert ostinato("scale", "plan", "--rps", "1", "--measured", tmp_path / "nowhere").code == 2


def test_memory_bounds_the_slots(ostinato: RunCli, tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    measured = tmp_path / "measured.json"
    measured.write_text(decode_line({1: 400.0, 32: 6400.0}))
    asked = ("scale", "plan", "--rps", "20", "--measured", measured, "--model", tiny, "--json")
    whole = json.loads(ostinato(*asked).out)
    assert whole["kv_bytes_per_replica"] == whole["kv_bytes_per_token"] * 1000 * 32
    room = whole["kv_bytes_per_token"] * 1000 * 8 / 1e9
    less = json.loads(ostinato(*asked, "--kv-memory", str(room)).out)
    assert less["slots"] == 8
    assert less["replicas"] >= whole["replicas"]
