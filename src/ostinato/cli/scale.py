"""`ostinato scale plan`: how many replicas a load needs, from the measured speed of one.

The arithmetic is `scale/sizing.py`, its check `scale/simulate.py`; here options become a demand, and figures a table,
a line of JSON and a picture.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ostinato.cli import flags
from ostinato.cli.flags import Flag
from ostinato.cli.groups import Verbs, show_help
from ostinato.cli.output import talk, write_columns, write_json, write_line
from ostinato.cli.plot import figure_kind, save
from ostinato.errors import BadInput, BadOption
from ostinato.files.fetch import megabytes

if TYPE_CHECKING:
    from ostinato.options import KVType
    from ostinato.scale.measured import Replica
    from ostinato.scale.simulate import SimulatedLoad
    from ostinato.scale.sizing import Demand, SizingResult

_LOAD: Final = "Load"
_REPLICA: Final = "Each replica"
_LOADS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)

scale = Verbs()


@scale.callback()
def _scale(context: typer.Context, verbose: flags.Verbose = False) -> None:
    """Plan how many engines a load needs."""
    show_help(context)


@scale.command("plan")
@flags.verb
def plan(
    rps: Annotated[float, Flag("Requests per second in all.", "X", panel=_LOAD)],
    measured: Annotated[Path, Flag("JSON lines from `bench decode` or `bench serve`.", "FILE.json")],
    prompt: Annotated[int, Flag("Tokens of a prompt, on average.", "N", panel=_LOAD)] = 800,
    output: Annotated[int, Flag("Tokens of an answer, on average.", "N", panel=_LOAD)] = 200,
    p99_first_token: Annotated[
        float, Flag("Seconds within which 99 of 100 first tokens must come.", "S", panel=_LOAD)
    ] = 1.0,
    slots: Annotated[
        int | None, Flag("Slots of each replica; by default the most that were measured.", "N", panel=_REPLICA)
    ] = None,
    route_ms: Annotated[float, Flag("Milliseconds that routing adds to a first token.", "X", panel=_REPLICA)] = 0.0,
    model: Annotated[
        str | None,
        Flag(
            "Model whose KV bytes per token limit the slots.",
            "PATH|NAME",
            panel=_REPLICA,
            autocompletion=flags.complete_model,
        ),
    ] = None,
    kv_type: flags.KvType = None,
    memory_gb: Annotated[
        float | None, Flag("Memory of each replica for keys and values.", "GB", name="--kv-memory", panel=_REPLICA)
    ] = None,
    plot: Annotated[Path | None, Flag("Draw latency over load (needs the extra `lab`).", "FILE.svg")] = None,
    as_json: flags.Json = False,
) -> None:
    """Compute the number of replicas for a load, what limits it, and a simulation beside the formula.

    Ends with one line of JSON.
    """
    from ostinato.scale.measured import read_measured
    from ostinato.scale.sizing import Demand

    if kv_type is not None and model is None:
        raise BadOption("--kv-type needs --model, to know what a token takes")
    if memory_gb is not None and not (math.isfinite(memory_gb) and memory_gb > 0):
        raise BadOption(f"--kv-memory is {memory_gb:g}; it must be above 0")
    demand = Demand(rps, prompt, output, p99_first_token, route_ms / 1e3)
    if plot is not None:
        figure_kind(plot)  # before anything is simulated
    replica = read_measured(measured, prompt, output)
    kv_bytes = None if model is None else _kv_bytes(model, kv_type)
    n_slots = _slots(slots, replica, demand, kv_bytes, memory_gb)
    record = _record(replica, demand, n_slots, kv_bytes)
    if not as_json:
        _show(record)
    if plot is not None:
        draw(replica, demand, n_slots, plot)
    write_json(record)


def _kv_bytes(model: str, kv_type: KVType | None) -> int:
    """KV bytes of one token in all layers; only the header of the file is read."""
    from ostinato.cache.kv_bytes import page_bytes
    from ostinato.files.checkpoint import open_checkpoint
    from ostinato.files.store import resolve
    from ostinato.models.registry import read_shape

    with open_checkpoint(resolve(model, talk=talk)) as checkpoint:
        return page_bytes(read_shape(checkpoint), kv_type or "bf16", 1)


def _slots(wanted: int | None, replica: Replica, demand: Demand, kv_bytes: int | None, memory_gb: float | None) -> int:
    """The requested or the measured number of slots; never more than fit in memory."""
    from ostinato.scale.sizing import MOST_SLOTS

    slots = replica.most_live if wanted is None else wanted
    if not 1 <= slots <= MOST_SLOTS:
        raise BadOption(f"--slots is {slots}; it must be a whole number from 1 to {MOST_SLOTS}")
    if slots > replica.most_live:
        talk(f"note: {replica.most_live} live requests were measured; the step time of {slots} is drawn out from there")
    if memory_gb is None:
        return slots
    if kv_bytes is None:
        raise BadOption("--kv-memory needs --model, to know what a token takes")
    fit = int(memory_gb * 1e9 // (kv_bytes * (demand.prompt + demand.output))) if kv_bytes else slots
    if fit < 1:
        raise BadInput(
            f"--kv-memory {memory_gb:g} GB does not hold one request of {demand.prompt + demand.output} tokens"
        )
    if fit < slots:
        talk(f"note: {memory_gb:g} GB hold {fit} requests of {demand.prompt + demand.output} tokens, not {slots}")
    return min(slots, fit)


def planned(replica: Replica, demand: Demand, slots: int) -> tuple[SizingResult, int, SimulatedLoad]:
    """The formula's plan, the number of replicas by the simulation, and its result with that number."""
    from ostinato.scale import simulate
    from ostinato.scale.sizing import size, smallest

    formula = size(replica, demand, slots)
    seen: dict[int, SimulatedLoad] = {}

    def enough(n: int) -> bool:
        seen[n] = simulate.replica(replica, demand, slots, demand.rps / n)
        return seen[n].p99_first_token_s <= demand.p99_first_token_s

    found = smallest(enough, formula.replicas)
    if found is None:
        raise BadInput("the simulation never keeps --p99-first-token; give more time")
    return formula, found, seen[found]


def _record(replica: Replica, demand: Demand, slots: int, kv_bytes: int | None) -> dict[str, Any]:
    from ostinato.scale.sizing import working

    formula, found, simulated = planned(replica, demand, slots)
    memory = None if kv_bytes is None else kv_bytes * (demand.prompt + demand.output) * slots
    return {
        "question": "how many replicas does this load need?",
        "demand": asdict(demand),
        "replica": asdict(replica),
        "slots": slots,
        "replicas": found,
        "replicas_by_formula": formula.replicas,
        "limit": formula.limit,
        "capacity_rps": formula.capacity,
        "load": demand.rps / found / formula.capacity,
        "tokens_s": demand.rps * demand.output,
        "formula": asdict(working(replica, demand, slots, demand.rps / found)),
        "simulated": asdict(simulated),
        "kv_bytes_per_token": kv_bytes,
        "kv_bytes_per_replica": memory,
    }


def _show(record: dict[str, Any]) -> None:
    demand, formula, simulated = record["demand"], record["formula"], record["simulated"]
    write_line(
        f"{demand['rps']:g} requests/s of {demand['prompt']} tokens in and {demand['output']} out, 99 of 100 first "
        f"tokens within {demand['p99_first_token_s']:g} s"
    )
    kv = record["kv_bytes_per_replica"]
    write_columns(
        [
            ("replicas", f"{record['replicas']} ({record['replicas_by_formula']} by the formula)"),
            ("limit", record["limit"]),
            ("one replica", f"{record['capacity_rps']:.2f} requests/s at most, {record['slots']} slots"),
            ("load on each", f"{100 * record['load']:.0f} %"),
            ("first token p50", _both(formula, simulated, "p50_first_token_s", 1e3, "ms")),
            ("first token p99", _both(formula, simulated, "p99_first_token_s", 1e3, "ms")),
            ("gap", _both(formula, simulated, "gap_s", 1e3, "ms")),
            ("live", _both(formula, simulated, "live", 1, "")),
            ("KV of a replica", "unknown; give --model" if kv is None else megabytes(kv)),
        ]
    )


def _both(formula: dict[str, float], simulated: dict[str, float], name: str, times: float, unit: str) -> str:
    return f"{formula[name] * times:.1f} {unit} by the formula, {simulated[name] * times:.1f} {unit} simulated".replace(
        "  ", " "
    )


def draw(replica: Replica, demand: Demand, slots: int, plot: Path) -> None:
    """The 99th and 50th percentile of the first token over the load on a replica, by formula and simulation."""
    from ostinato.scale import simulate
    from ostinato.scale.sizing import capacity, working

    most = capacity(replica, demand, slots)
    lines = [working(replica, demand, slots, load * most) for load in _LOADS]
    simulated = [simulate.replica(replica, demand, slots, load * most) for load in _LOADS]
    picture = figure_kind(plot)(figsize=(7.0, 4.2), layout="constrained")
    axes = picture.subplots()
    percent = [100 * load for load in _LOADS]
    for name, colour in (("p99", "tab:red"), ("p50", "tab:blue")):
        field = f"{name}_first_token_s"
        axes.plot(percent, [getattr(one, field) for one in lines], color=colour, label=f"{name} by the formula")
        axes.plot(percent, [getattr(one, field) for one in simulated], "o", color=colour, label=f"{name} simulated")
    axes.axhline(demand.p99_first_token_s, color="grey", linestyle="dashed", label="asked for")
    axes.set_yscale("log")
    axes.set_xlabel("load on a replica, % of its capacity")
    axes.set_ylabel("time to first token, s")
    axes.set_title(f"{demand.prompt} tokens in, {demand.output} out, {slots} slots; {replica.source}", fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(picture, plot)
