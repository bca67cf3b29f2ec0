"""How long does a step's sampler take on a GPU, and does it choose what its twin chooses?

    python -m bench.sampling

First the checks, at a vocabulary of 128,256: greedy rows equal the twin's, filtered draws are the twin's own and stay
within what it keeps, and 200,000 draws follow the exact probabilities (chi-squared). Then the times of the three
launches as replayed from a CUDA graph, for 1, 8 and 32 live rows of 32 slots. Ends non-zero where a check fails. Needs
torch, triton and numpy.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from bench.note import as_json, command, versions
from bench.replay import replays_us
from ostinato.backends.cuda.triton.sample import bind_sample, sample_workspace
from ostinato.backends.torch.ops.sample_step import sample_step_torch
from ostinato.backends.torch.tables import dtype_of
from ostinato.loop.layout import Arena, Layout, SampledRows, arena_bytes

VOCAB: Final = 128_256
N_TOKENS: Final = 128_000
ROWS: Final = (1, 8, 32)
STEPS_A_GRAPH: Final = 20
RUNS: Final = 15
GOALS_US: Final = {"greedy": 15.0, "top-k 40, top-p 0.95": 40.0}  # for up to 8 rows

Launches = Sequence[tuple[str, Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of every row, and whether logits are spread like a model's or flat."""

    name: str
    settings: dict[str, float] = field(default_factory=dict)
    flat: bool = False


CASES: Final = (
    Case("greedy"),
    Case("greedy, logprobs 20", {"n_logprobs": 20}),
    Case("greedy, penalties", {"penalised": 1, "repetition": 1.3, "presence": 0.4, "frequency": 0.2}),
    Case("greedy, 64 biases", {"n_bias": 64}),
    Case("greedy, masked", {"constrained": 1}),
    Case("temperature", {"temperature": 0.8}),
    Case("top-k 40, top-p 0.95", {"temperature": 0.8, "top_k": 40, "top_p": 0.95}),
    Case("top-p 0.9", {"temperature": 0.8, "top_p": 0.9}),
    Case("min-p 0.05", {"temperature": 0.8, "min_p": 0.05}),
    Case("all, logprobs 20", {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "n_logprobs": 20, "penalised": 1}),
    Case("top-p 0.95, flat: searched", {"temperature": 1.0, "top_p": 0.95}, flat=True),
)


def logits_like(case: Case, rows: int) -> Tensor:
    """Shares that fall with the rank to the power 1.5, in random places; or normal noise, of which top-p keeps most."""
    noise = torch.Generator().manual_seed(1)
    if case.flat:
        return torch.randn((rows, VOCAB), generator=noise)
    ranked = -1.5 * torch.arange(1, VOCAB + 1).float().log() + 20
    shuffled = torch.stack([ranked[torch.randperm(VOCAB, generator=noise)] for _ in range(rows)])
    return shuffled + 0.1 * torch.randn((rows, VOCAB), generator=noise)


class Bench:
    """A table of `n_slots` on the card with one case seated everywhere, and the launches over it."""

    def __init__(self, case: Case, n_slots: int, logits: Tensor) -> None:
        self.layout = Layout(n_slots=n_slots, max_pages=2, vocab=VOCAB)
        self.fields = self.layout.table_fields
        memory = torch.zeros(arena_bytes(self.fields), dtype=torch.uint8, device="cuda")
        self.table = Arena(self.fields, memory, dtype_of)
        self.logits = logits.cuda()
        self._admit(case)
        table = self.table
        given = self.logits, table, sample_workspace(n_slots, VOCAB, torch.device("cuda")), SampledRows.of(table)
        self.launches: Launches = bind_sample(*given, n_tokens=N_TOKENS)

    def _admit(self, case: Case) -> None:
        table, n = self.table, self.layout.n_slots
        for name, value in {"top_p": 1.0, "repetition": 1.0, **case.settings}.items():
            table[name].fill_(value)
        noise = torch.Generator().manual_seed(2)
        table["seed"].copy_(torch.randint(0, 2**62, (n,), generator=noise))
        table["position"].copy_(torch.arange(n) * 3)
        table["row_slot"].copy_(torch.arange(n - 1, -1, -1))
        table["n_rows"].fill_(n)
        table["bias_ids"].copy_(torch.randint(0, N_TOKENS, table["bias_ids"].shape, generator=noise))
        table["bias_values"].copy_(torch.rand(table["bias_values"].shape, generator=noise) * 8 - 4)
        table["mask_bits"].copy_(torch.randint(-(2**31), 2**31, table["mask_bits"].shape, generator=noise))
        table["prompt_bits"].copy_(1 << torch.randint(0, 31, table["prompt_bits"].shape, generator=noise))
        made = torch.randint(0, VOCAB, (n, 500), generator=noise).cuda()
        table["counts"].scatter_add_(1, made, torch.ones_like(made, dtype=torch.int32))

    def step(self) -> None:
        for _, launch in self.launches:
            launch()

    def twin(self) -> Arena:
        """The same step by the twin, in a copy of the table on the host."""
        table = Arena(self.fields, self.table.memory.cpu().clone(), dtype_of)
        sample_step_torch(self.logits.cpu(), table, SampledRows.of(table), n_tokens=N_TOKENS)
        return table


def check_tokens(case: Case) -> list[str]:
    """What differs from the twin over 16 rows and, for draws, a few positions; and over another order of rows."""
    bench = Bench(case, 16, logits_like(case, 16))
    wrong: list[str] = []
    unfiltered = case.settings.get("temperature", 0) > 0 and not {"top_k", "top_p", "min_p"} & set(case.settings)
    for _ in range(3 if case.settings.get("temperature", 0) else 1):
        bench.step()
        twin = bench.twin()
        mine = Arena(bench.fields, bench.table.memory.cpu().clone(), dtype_of)
        if not unfiltered and mine["chosen"].tolist() != twin["chosen"].tolist():
            wrong.append(f"tokens {mine['chosen'].tolist()} are not the twin's {twin['chosen'].tolist()}")
        rows = torch.arange(16)
        logprobs = bench.logits.cpu().log_softmax(-1)[rows, mine["chosen"].long()]
        # The twin sums 128,256 float32 one way, the kernel another.
        worst = float((logprobs - mine["chosen_logprob"]).abs().max())
        if worst > 1e-4:
            wrong.append(f"log-probabilities differ by {worst:.1e}, more than 1e-4")
        if mine["top_ids"].tolist() != twin["top_ids"].tolist():
            wrong.append("the most likely differ")
        worst = float((mine["top_logprobs"] - twin["top_logprobs"]).abs().max())
        if worst > 1e-4:
            wrong.append(f"log-probabilities of the most likely differ by {worst:.1e}, more than 1e-4")
        bench.table["position"].add_(1)
    tokens = bench.table["chosen"].clone()
    bench.table["position"].sub_(1)
    bench.logits.copy_(bench.logits.flip(0))
    bench.table["row_slot"].copy_(bench.table["row_slot"].flip(0))
    bench.step()
    if bench.table["chosen"].flip(0).tolist() != tokens.tolist():
        wrong.append("another order of rows gives other tokens")
    return [f"{case.name}: {text}" for text in wrong]


def exact_shares(case: Case, logits: Tensor) -> Tensor:
    """float64 [VOCAB] on the host: how likely each id is, 0 where the filters drop it."""
    words = case.settings
    ranked, order = (logits[:N_TOKENS] / words["temperature"]).sort(descending=True, stable=True)
    top_k = int(words.get("top_k", 0)) or N_TOKENS
    share = ranked[:top_k].double().softmax(-1)
    kept = (share.cumsum(-1) - share < torch.tensor(words.get("top_p", 1.0)).double()) & (
        share >= torch.tensor(words.get("min_p", 0.0)).double() * share[0]
    )
    share = share * kept
    return torch.zeros(VOCAB, dtype=torch.float64).index_put_((order[:top_k],), share / share.sum())


def check_draws(case: Case, n_draws: int = 200_000, rows: int = 512) -> list[str]:
    """Many draws from one row of logits: within the kept set, and as often as they are likely."""
    logits = logits_like(case, 1)
    bench = Bench(case, rows, logits.expand(rows, -1).contiguous())
    counts = torch.zeros(VOCAB, dtype=torch.int64, device="cuda")
    for _ in range(n_draws // rows):
        bench.step()
        counts += torch.bincount(bench.table["chosen"], minlength=VOCAB)
        bench.table["position"].add_(1)
    got, expected = counts.cpu().double(), exact_shares(case, logits[0])
    total = float(got.sum())
    wrong = []
    if float(got[expected == 0].sum()):
        wrong.append(f"{int(got[expected == 0].sum())} draws outside of what is kept")
    # Ids from the likeliest down, in groups that expect 50 draws or more each.
    order = expected.argsort(descending=True)
    group = (expected[order].cumsum(-1) * (total / 50)).floor().long()
    group = torch.cat((torch.zeros(1, dtype=torch.int64), (group.diff() > 0).long().cumsum(-1)))  # none empty
    n_groups = int(group.max()) + 1
    wanted = torch.zeros(n_groups, dtype=torch.float64).index_add_(0, group, expected[order] * total)
    found = torch.zeros(n_groups, dtype=torch.float64).index_add_(0, group, got[order])
    solid = wanted >= 25
    chi = float(((found - wanted) ** 2 / wanted)[solid].sum())
    degrees = int(solid.sum()) - 1
    bound = degrees + 4.5 * math.sqrt(2 * max(degrees, 1)) + 12
    print(f"  {case.name}: {int((expected > 0).sum())} kept, chi-squared {chi:.0f} of {degrees} degrees", flush=True)
    if chi > bound:
        wrong.append(f"chi-squared {chi:.0f} with {degrees} degrees, above {bound:.0f}")
    return [f"{case.name}: {text}" for text in wrong]


def graph_us(launches: Launches) -> float:
    """Microseconds of one run of the launches, from graphs of many; the median."""
    step = [launch for _, launch in launches]
    return statistics.median(replays_us(step * STEPS_A_GRAPH, RUNS)) / STEPS_A_GRAPH


def timed(case: Case) -> dict[str, object]:
    bench = Bench(case, max(ROWS), logits_like(case, max(ROWS)))
    row: dict[str, object] = {"case": case.name}
    for live in ROWS:
        bench.table["n_rows"].fill_(live)
        row[f"{live} rows"] = round(graph_us(bench.launches), 1)
    bench.table["n_rows"].fill_(8)
    bench.step()
    # gather last: run again and again without shape it finds the same candidates more than once.
    for name in ("shape", "choose", "gather"):
        if name == "choose":
            bench.step()
        row[name] = round(graph_us([one for one in bench.launches if one[0] == name]), 1)
    return row


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here; this bench is for machines with one")
    wrong = []
    print("checks against the twin")
    for case in CASES:
        found = check_tokens(case)
        print(f"  {case.name}: {'differs' if found else 'equal'}", flush=True)
        wrong += found
    print("200,000 draws each")
    for case in CASES:
        if case.name in ("temperature", "top-k 40, top-p 0.95", "min-p 0.05"):
            wrong += check_draws(case)
    for text in wrong:
        print("WRONG", text)
    rows = [timed(case) for case in CASES]
    for row in rows:
        goal = GOALS_US.get(str(row["case"]))
        row["goal"] = (
            "" if goal is None else f"{goal:.0f} us: " + ("met" if float(str(row["8 rows"])) <= goal else "missed")
        )
    question, device = "how long does a step's sampler take?", torch.cuda.get_device_name()
    facts = {"vocab": VOCAB, "unit": "us", "rows": rows, "wrong": wrong}
    print(as_json(question, command("bench.sampling"), versions("torch", "triton"), device, **facts))
    heads = list(rows[0])
    print("microseconds a step, of 32 slots; shape, choose and gather alone at 8 rows")
    print(f"{heads[0]:28}" + "".join(f"{head:>10}" for head in heads[1:]))
    for row in rows:
        print(f"{row[heads[0]]!s:28}" + "".join(f"{row[head]!s:>10}" for head in heads[1:-1]) + f"   {row['goal']}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
