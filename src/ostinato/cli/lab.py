"""`ostinato lab`: how much of a decode step is launch overhead on this machine, and how to reduce it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ostinato.cli import flags
from ostinato.cli.bench import numbers
from ostinato.cli.flags import Flag, RecordFlags
from ostinato.cli.groups import Verbs
from ostinato.cli.output import InstallHints, talk, write_columns, write_json, write_line
from ostinato.errors import BadInput, BadOption, HardwareCannot
from ostinato.extras import check_extra
from ostinato.lab.model import BODIES, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostinato.lab.experiment import ExperimentRow
    from ostinato.lab.work import LabMachine
    from ostinato.models.blocks import LoadedModel

lab = Verbs(help="Measure launch overhead: kernels one by one, graphs, loops and persistent kernels.")

_WORK: Final = flags.under(
    "Sizes",
    {
        "n": Flag("Length of the vector.", "N"),
        "steps": Flag("Token steps.", "N"),
        "kernels": Flag("Kernels in each step.", "K"),
        "blocks": Flag("Blocks of a GPU's grid; 0: one per multiprocessor.", "N"),
        "threads": Flag("Threads of a GPU's block.", "N"),
        "a": Flag("Factor of the vector that each step adds: h += a x.", "X"),
        "body": Flag(
            "What a kernel computes: axpy, or tail (bias, GELU, residual).",
            "NAME",
            type=str,
            autocompletion=flags.among(*BODIES),
        ),
    },
)
_PROFILED: Final = {name: _WORK[name] for name in ("n", "steps", "kernels", "threads", "body")}
Work = Annotated[Workload, RecordFlags(Workload, _WORK, body="axpy")]
ProfiledWork = Annotated[Workload, RecordFlags(Workload, _PROFILED, steps=100, body="axpy")]
Repeats = Annotated[int, Flag("Measurements of each figure.", "N", min=1, max=100)]
Out = Annotated[Path | None, Flag("Write result.json, report.html, speedup.svg, decode.svg.", "FOLDER")]

DEFAULT_SHAPE: Final = {"gpu": "llama-1b", "cpu": "smollm2-135m"}
_HEADINGS: Final = ("start", "us a step", "tokens/s", "speed-up", "predicted", "launches", "max_abs_err")


@lab.callback()
@flags.verb
def everything(
    *,
    context: typer.Context,
    work: Work,
    repeats: Repeats = 5,
    out: Out = None,
    device: flags.Device = "auto",
    as_json: flags.Json = False,
) -> None:
    """Measure launch costs, all starts side by side, a sweep over a kernel's length, and the engine's own step.

    Ends with one line of JSON. Without a GPU the same runs on the CPU, with its counterparts of launches.
    """
    if context.invoked_subcommand is not None:
        return
    from ostinato.lab.experiment import LENGTHS, measured, result

    _check_folder(out)
    machine = _machine(device)
    if not as_json:
        _introduce(machine)
    first = measured(machine, work, repeats)
    if not as_json:
        _show(first)
    lengths = LENGTHS if machine.kind == "gpu" else LENGTHS[:6]
    rows = [first, *_swept(machine, work, "n", lengths, repeats, quiet=as_json)]
    shape = DEFAULT_SHAPE[machine.kind]
    n_prompt, n_gen = (512, 256) if machine.kind == "gpu" else (64, 32)
    decode, refused = _decoded(_model(machine, shape), shape, n_prompt, n_gen)
    found = result(machine, work, rows, decode=decode, refused_modes=refused)
    _warn_if_busy(rows)
    if not as_json:
        _show_sweep(rows[1:])
        _show_costs(found)
        _show_acceptance(found)
        _show_decode(decode)
    _keep(found, out)
    write_json(found)


@lab.command()
@flags.verb
def sweep(
    *,
    over: Annotated[str, Flag("The size that varies: n, steps, kernels, blocks or threads.", "SIZE")],
    values: Annotated[str, Flag("Its values, as in 1,4,16.", "LIST")],
    work: Work,
    repeats: Repeats = 5,
    out: Out = None,
    device: flags.Device = "auto",
    as_json: flags.Json = False,
) -> None:
    """Measure all starts over several values of one size."""
    from ostinato.lab.experiment import result

    _check_folder(out)
    wanted = numbers("--values", values, least=0 if over == "blocks" else 1)
    machine = _machine(device)
    if not as_json:
        _introduce(machine)
    rows = _swept(machine, work, over, wanted, repeats, quiet=as_json)
    if not rows:
        raise HardwareCannot("none of these values could be measured here")
    found = result(machine, work, rows)
    _warn_if_busy(rows)
    if not as_json:
        for row in rows:
            _show(row)
        _show_acceptance(found)
    _keep(found, out)
    write_json(found)


@lab.command()
@flags.verb
def one(
    *,
    start: Annotated[str, Flag("The start to run.", "NAME")],
    work: Work,
    repeats: Repeats = 1,
    device: flags.Device = "auto",
) -> None:
    """Run one start alone, for a profiler."""
    machine = _machine(device)
    if start not in machine.starts:
        why = machine.why_not.get(start)
        raise BadOption(f"--start is {start!r}; {why or 'here there are: ' + ', '.join(machine.starts)}")
    write_json(machine.time(work, start, repeats).record())


@lab.command()
@flags.verb
def predict(
    *,
    kernels: Annotated[int, Flag("Kernels for each token.", "K")],
    launch_us: Annotated[float, Flag("Cost of one launch, in microseconds.", "X")],
    compute_ms: Annotated[float, Flag("Computing time of a token, in milliseconds.", "X")],
    residual_us: Annotated[float, Flag("Cost of the replay or iteration that replaces the launches.", "X")] = 0.0,
    as_json: flags.Json = False,
) -> None:
    """Compute the share of launches in a token's time by the formula; needs no GPU."""
    from ostinato.lab.model import Overhead

    found = Overhead(kernels, launch_us, compute_ms * 1e3)
    if as_json:
        write_json({"launch_ms": found.total_us / 1e3, "share": found.share, "speedup": found.speedup(residual_us)})
        return
    launches = f"{kernels} launches of {launch_us:g} us are {found.total_us / 1e3:.2f} ms"
    write_line(f"{launches} of a token that computes {compute_ms:g} ms")
    write_line(f"overhead {_share(found.share)}")
    write_line(f"without them a token is {found.speedup(residual_us):.2f} times as fast")


@lab.command()
@flags.verb
def compare(
    *,
    first: Annotated[Path, typer.Argument(metavar="A.json", help="A result of `ostinato lab --out`.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another result.")],
    as_json: flags.Json = False,
) -> None:
    """Compare two results: of two machines, or of one machine at two times."""
    from ostinato.lab.experiment import compared, read_result

    results = [read_result(first), read_result(second)]
    rows = compared(*results)
    names = [f"{found['machine']['name']}, {found['date']}" for found in results]
    if as_json:
        write_json({"machines": names, "rows": rows})
        return
    write_columns([("", *names, "second / first"), *rows])


@lab.command()
@flags.verb
def profile(
    *,
    start: Annotated[str | None, Flag("The start to profile; all by default.", "NAME")] = None,
    work: ProfiledWork,
    trace: Annotated[Path | None, Flag("Write a trace for chrome://tracing or Perfetto.", "FILE.json")] = None,
    counters: Annotated[bool, Flag("Also read two hardware counters with ncu.")] = False,
    device: flags.Device = "auto",
    as_json: flags.Json = False,
) -> None:
    """Count launches, list the longest calls, and print the profilers' commands for this machine."""
    check_extra("torch", "`ostinato lab profile`")
    from ostinato.lab.profile import architecture, commands, counted, profiled, profiled_command
    from ostinato.lab.programs import FOLDER

    machine = _machine(device)
    work = machine.settle(work)
    chosen = machine.starts if start is None else (start,)
    if start is not None and start not in machine.starts:
        raise BadOption(f"--start is {start!r}; here there are: {', '.join(machine.starts)}")
    if counters and machine.kind == "cpu":
        raise BadOption("--counters are a GPU's, and this is a CPU")
    if trace is not None and len(chosen) > 1:
        raise BadOption("--trace is of one start; give --start too")
    found: dict[str, Any] = {"profiles": [profiled(machine, work, name, trace) for name in chosen]}
    found["commands"] = commands(FOLDER, arch=architecture(machine))
    if counters:
        found["counters"] = {}
        for name in machine.starts[:2]:
            command = profiled_command(name, replace(work, steps=20, kernels=1))
            found["counters"][name] = counted(command[0], command[1:])
    if not as_json:
        _introduce(machine)
        for one_profile in found["profiles"]:
            seen = ", ".join(f"{name} {count}" for name, count in one_profile["calls"].items()) or "none"
            write_line(
                f"{one_profile['start']}: {one_profile['launches']} launches by the host; torch's profiler saw {seen}"
            )
            write_columns(
                [(e["name"][:60], f"{e['count']} times", f"{e['us']:.1f} us") for e in one_profile["longest"]]
            )
        for name, values in found.get("counters", {}).items():
            write_line(
                f"{name}: {values['kernels']:.0f} kernels, {values['time_us']:.1f} us together "
                f"(gpu__time_duration.sum), {values['throughput_pct']:.1f} % of the peak (sm__throughput)"
            )
        for tool, lines in found["commands"].items():
            write_line(f"\n{tool}:")
            for line in lines:
                write_line(f"  {line}")
    write_json(found)


@lab.command()
@flags.verb
def decode(
    *,
    shape: Annotated[
        str | None,
        Flag("Sizes of a model with random weights; by default llama-1b on a GPU, smollm2-135m on a CPU.", "NAME"),
    ] = None,
    n_prompt: Annotated[int, Flag("Tokens of the prompt.", "N", min=1)] = 64,
    n_gen: Annotated[int, Flag("Tokens to generate.", "N", min=2)] = 64,
    plot: Annotated[Path | None, Flag("Draw the modes beside each other.", "FILE.svg")] = None,
    device: flags.Device = "auto",
    as_json: flags.Json = False,
) -> None:
    """Measure the engine's own step in every mode: first token, tokens per second, launches and host time per token."""
    from ostinato.lab.picture import decode_picture

    _check_plot(plot)
    machine = _machine(device)
    shape = shape or DEFAULT_SHAPE[machine.kind]
    model = _model(machine, shape)
    if n_prompt + n_gen + 2 > model.shape.context:
        raise BadOption(
            f"--n-prompt {n_prompt} and --n-gen {n_gen} do not fit {shape}'s context of {model.shape.context}"
        )
    rows, refused = _decoded(model, shape, n_prompt, n_gen)
    if not as_json:
        _introduce(machine)
        _show_decode(rows)
    write_json({"decode": rows, "why_not": refused})
    if plot is not None:
        _draw(plot, decode_picture(rows, f"{shape} on {machine.name}: tokens per second, one request"))


@lab.command()
@flags.verb
def tape(
    *,
    shape: Annotated[str, Flag("Sizes of a model with random weights.", "NAME")] = "llama-1b",
    n_prompt: Annotated[int, Flag("Positions that the context holds before.", "N", min=1)] = 500,
    n_gen: Annotated[int, Flag("Tokens to generate.", "N", min=2)] = 64,
    plot: Annotated[Path | None, Flag("Draw a timeline of the step.", "FILE.svg")] = None,
    device: flags.Device = "auto",
    as_json: flags.Json = False,
) -> None:
    """Show where the time of a persistent kernel's step goes, by the clock marks of its blocks."""
    _check_plot(plot)
    machine = _machine(device)
    if machine.kind != "gpu":  # before a model is made in vain
        raise HardwareCannot("the persistent kernel needs CUDA, and this machine has no GPU")
    from ostinato.lab.tape import by_phase, recorded, spans, step_us, timeline

    marks = recorded(_model(machine, shape), n_prompt=n_prompt, n_gen=n_gen, kv_type="bf16")
    found = spans(marks)
    shares, total = by_phase(found), step_us(found)
    if not as_json:
        _introduce(machine)
        rows = [
            (phase, f"{own.us:.1f}", f"{own.us / total:.0%}", f"{own.spread_us:.1f}") for phase, own in shares.items()
        ]
        last = ("step, without its step boundary", f"{total:.1f}", "", "")
        write_columns([("phase", "us", "share", "blocks begin within us"), *rows, last])
    write_json(
        {
            "model": shape,
            "step_us": total,
            "n_blocks": len(marks),
            "phases_us": {phase: own.us for phase, own in shares.items()},
            "spreads_us": {phase: own.spread_us for phase, own in shares.items()},
        }
    )
    if plot is not None:
        title = (
            f"{shape} on {machine.name}: {total:.0f} us a step without its step boundary, median of {len(marks)} blocks"
        )
        _draw(plot, timeline(found, title))


# Machines and models


def _machine(device: str) -> LabMachine:
    from ostinato.engine.machine import choose_device
    from ostinato.lab.cpu import CpuMachine

    chosen = choose_device(device)
    if chosen == "cpu":
        return CpuMachine()
    from ostinato.lab.gpu import GpuMachine

    return GpuMachine(chosen)


def _model(machine: LabMachine, shape: str) -> LoadedModel:
    from ostinato.engine.choose import LoadCase, prepared
    from ostinato.engine.machine import machine_at
    from ostinato.lab.random_weights import RandomFile, random_model
    from ostinato.models.named_shapes import named_shape
    from ostinato.options import LoadOptions

    if machine.kind == "gpu":
        return random_model(shape, "bf16", "cuda")
    # In tiles, if the native loop can run them: `eager` uses the same weights.
    sizes = named_shape(shape)
    file = RandomFile(sizes, "f32")
    settled = prepared(LoadCase(sizes, file.tensors, LoadOptions(device="cpu"), machine_at("cpu")), talk)
    return file.load(settled)


def _decoded(model: LoadedModel, name: str, n_prompt: int, n_gen: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The engine's own step in each mode, and why it cannot run in others, which is also said."""
    from ostinato.lab.bench import decoded_by_mode

    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    hints = InstallHints()
    for mode, found in decoded_by_mode(model, n_prompt=n_prompt, n_gen=n_gen):
        if isinstance(found, str):
            refused[mode] = found
            talk(f"not {mode}: {hints.cell(found)}")
        else:
            rows.append({"model": name, **found})
    for hint in hints.lines:
        talk(f"to install {hint}")
    return rows, refused


def _swept(
    machine: LabMachine, work: Workload, what: str, values: Sequence[int], repeats: int, *, quiet: bool
) -> list[ExperimentRow]:
    """The rows of a sweep; a row that this machine refuses is reported and left out."""
    from ostinato.lab.experiment import swept

    rows: list[ExperimentRow] = []
    with _progress(f"sweeping {what}", len(values), quiet=quiet) as advance:
        for row in swept(machine, work, what, values, repeats):
            advance()
            if isinstance(row, tuple):
                talk(f"{what}={getattr(row[0], what)}: {row[1]}")
            else:
                rows.append(row)
    return rows


# Printing


def _introduce(machine: LabMachine) -> None:
    if machine.kind == "cpu":
        write_line(f"{machine.name}: a CPU, which launches no kernels; its starts are the counterparts of a GPU's.")
    else:
        write_line(f"{machine.name}")
    for start, why in machine.why_not.items():
        talk(f"not {start}: {why}")


def _show(row: ExperimentRow) -> None:
    work = row.work
    grid = f", {work.blocks} x {work.threads}" if work.blocks else ""
    what = f"{work.body}, n={work.n}, {work.steps} steps of {work.kernels}{grid}"
    write_line(f"\n{what}; a kernel by itself {row.body_us:.2f} us")
    lines = [
        (
            t.start,
            f"{t.us:.2f}",
            f"{t.tokens_s:,.0f}",
            f"{row.speedup(t):.2f}",
            f"{row.predicted_speedup(t.start):.2f}",
            str(t.launches),
            f"{t.max_abs_err:.1e}",
        )
        for t in row.timings
    ]
    write_columns([_HEADINGS, *lines])
    predicted, found = row.overhead
    off = f", off by {predicted / found - 1:+.0%}" if found > 0 and not row.is_busy else ""
    write_line(f"overhead of the first: predicted {predicted:.1%}, measured {found:.1%}{off}")


def _warn_if_busy(rows: Sequence[ExperimentRow]) -> None:
    if any(row.is_busy for row in rows):
        spread = max(row.spread for row in rows)
        talk(
            f"this machine is busy: the same work took {spread:.0%} longer in half of its runs than in the fastest, so "
            "figures and predictions cannot be compared; end other programs, or give more --repeats"
        )


def _show_sweep(rows: Sequence[ExperimentRow]) -> None:
    write_line("\nspeed-up over the length of a kernel:")
    starts = [t.start for t in rows[0].timings] if rows else []
    lines = [(f"{row.work.n}", f"{row.body_us:.2f}", *(f"{row.speedup(t):.2f}" for t in row.timings)) for row in rows]
    write_columns([("n", "kernel, us", *starts), *lines])


def _show_costs(found: dict[str, Any]) -> None:
    from ostinato.lab.report import cost_table

    write_line("\nwhat each start adds, and up to which length of a kernel it pays:")
    write_columns(cost_table(found))
    facts = found["machine"]
    if "barrier_idle_us" in facts:
        idle, loaded = facts["barrier_idle_us"], facts["barrier_loaded_us"]
        write_line(f"a barrier over the grid: {idle:.2f} us idle, {loaded:.2f} us under load")


def _show_acceptance(found: dict[str, Any]) -> None:
    from ostinato.lab.report import acceptance_table

    write_line("\nwhat was asked of this laboratory:")
    write_columns(acceptance_table(found["acceptance"]))


def _show_decode(rows: Sequence[dict[str, Any]]) -> None:
    from ostinato.lab.report import decode_table

    write_line("\nthe engine's own step:")
    write_columns(decode_table(rows))


def _share(value: float) -> str:
    """4.8 %, and 13 % from ten on."""
    return f"{100 * value:.1f} %" if value < 0.1 else f"{100 * value:.0f} %"


def _check_folder(out: Path | None) -> None:
    """Create the folder of results; refused here, before anything is measured."""
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {out}: cannot be made: {error.strerror}") from error


def _check_plot(plot: Path | None) -> None:
    """Refuse a picture that could not be written, before anything is measured."""
    if plot is None:
        return
    if plot.suffix.lower() != ".svg":
        raise BadOption(f"--plot {plot}: pictures of the laboratory are SVG; name a file that ends in .svg")
    if plot.is_dir():
        raise BadInput(f"--plot {plot}: is a folder; name a file in it")
    try:
        plot.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--plot {plot}: its folder cannot be made: {error.strerror}") from error


def _draw(plot: Path, picture: str) -> None:
    try:
        plot.write_text(picture, "utf-8")
    except OSError as error:
        raise BadInput(f"--plot {plot}: cannot be written: {error.strerror}") from error
    talk(f"drawn: {plot}")


def _keep(found: dict[str, Any], out: Path | None) -> None:
    if out is None:
        return
    from ostinato.lab.picture import decode_picture, speedup_picture
    from ostinato.lab.report import report

    files = {
        "result.json": json.dumps(found) + "\n",
        "report.html": report(found),
        "speedup.svg": speedup_picture(found),
    }
    if found["decode"]:
        files["decode.svg"] = decode_picture(found["decode"])
    for name, text in files.items():
        try:
            (out / name).write_text(text, "utf-8")
        except OSError as error:
            raise BadInput(f"--out {out / name}: cannot be written: {error.strerror}") from error
    talk(f"written: {out / 'report.html'}")


@contextmanager
def _progress(words: str, total: int, *, quiet: bool) -> Iterator[Any]:
    """A bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(words, total=total)
        yield lambda: bar.advance(task)
