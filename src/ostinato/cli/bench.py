"""`ostinato bench decode`: tokens per second of every mode here, beside the limit of memory bandwidth.

`lab/bench.py` measures; here options become lists, and figures become a table, a line of JSON and a picture.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ostinato import __version__
from ostinato.cli import flags
from ostinato.cli.bare import Bare, opened_bare
from ostinato.cli.flags import Flag
from ostinato.cli.groups import Verbs, show_help
from ostinato.cli.output import InstallHints, detail, talk, write_columns, write_json, write_line
from ostinato.cli.plot import figure_kind, save
from ostinato.errors import BadInput, BadOption, HardwareCannot, listing
from ostinato.files.fetch import megabytes
from ostinato.files.store import DEFAULT
from ostinato.options import MODES, LoadOptions

if TYPE_CHECKING:
    from ostinato.backends.base import Settled
    from ostinato.files.checkpoint import Checkpoint
    from ostinato.lab.bench import Figure, Profile
    from ostinato.models.blocks import LoadedModel

MOST_BATCH: Final = 64
ALL: Final = "all"
_MEASURED: Final = "What to measure"

bench = Verbs()


@bench.callback()
def _bench(context: typer.Context, verbose: flags.Verbose = False) -> None:
    """Measure this machine or a server."""
    show_help(context)


@dataclass(frozen=True, slots=True)
class BenchModel:
    """The source of the measured model, and its name in the table.

    On a CPU the native loop has weights in tiles and `eager` has dense weights, so `load` takes which are wanted.
    """

    name: str
    type: str
    load: Callable[[bool], LoadedModel]  # dense, or as the highest mode has them
    weight_bytes: int  # of the latter
    settled: Settled  # for the highest mode
    why_not: Mapping[str, str | None]  # each mode and why it cannot run here
    routed: bool  # has experts

    @property
    def in_tiles(self) -> bool:
        return self.settled.weights == "tiles"


@bench.command("decode")
@flags.verb
def decode(
    *,
    model: Annotated[str | None, flags.ModelFlags()] = None,
    shape: Annotated[
        str | None,
        Flag("Random weights instead of a file: llama-1b, llama-8b, smollm2-135m, mamba2-1.3b, tiny.", "NAME"),
    ] = None,
    type: Annotated[
        str | None,
        Flag("Type of random weights: f32, f16, bf16, q8_0, q4_k_m, ...; by default that of --dtype.", "TYPE"),
    ] = None,
    mode: Annotated[
        str,
        Flag(f"Modes: {', '.join(MODES)}; or all.", "LIST", panel=_MEASURED, autocompletion=flags.among(ALL, *MODES)),
    ] = ALL,
    batch: Annotated[str, Flag("Sequences at once.", "LIST", panel=_MEASURED)] = "1",
    n_gen: Annotated[str, Flag("Tokens to generate (tg); 0 skips this.", "LIST", panel=_MEASURED)] = "128",
    n_prompt: Annotated[str, Flag("Tokens of a prompt (pp); 0 skips this.", "LIST", panel=_MEASURED)] = "512",
    depth: Annotated[str, Flag("Positions that the context holds before (d).", "LIST", panel=_MEASURED)] = "0",
    repeats: Annotated[int, Flag("Runs of each measurement, after one warm-up.", "N", min=1, panel=_MEASURED)] = 5,
    profile: Annotated[
        bool, Flag("Also measure the time of each kind of node; on a CPU only in eager.", panel=_MEASURED)
    ] = False,
    plot: Annotated[Path | None, Flag("Draw a bar chart (needs the extra `lab`).", "FILE.png")] = None,
    load: flags.ToMeasure,
    as_json: flags.Json = False,
) -> None:
    """Measure tokens per second of decoding, mode by mode, beside the limit of this machine's memory.

    The limit of generation is how often per second all weights can be read from memory. Lists are combined: `--mode
    eager,graph,loop --batch 1,4,16 --depth 0,500` measures all of them. In the terms of llama-bench: pp is a prompt, tg
    is generation, d is depth. Ends with one line of JSON.
    """
    if model is not None and shape is not None:
        raise BadInput(f"--model {model} and --shape {shape} are two models; give one of them")
    if type is not None and shape is None:
        raise BadInput(f"--type {type} is for random weights; give --shape too, or --dtype for a file's")
    lists = {
        "batches": numbers("--batch", batch, least=1, most=MOST_BATCH),
        "n_prompts": numbers("--n-prompt", n_prompt, least=0),
        "n_gens": numbers("--n-gen", n_gen, least=0),
        "depths": numbers("--depth", depth, least=0),
    }
    modes = mode_names(mode)
    if not any((*lists["n_prompts"], *lists["n_gens"])):
        raise BadOption("--n-prompt 0 and --n-gen 0 leave nothing to measure; give one of them")
    if plot is not None:
        figure_kind(plot)  # before anything is measured
    with _source(model, shape, type, load) as source:
        _measure(source, modes, lists, repeats, profile=profile, plot=plot, as_json=as_json)


# Options into lists


def numbers(option: str, text: str, *, least: int, most: int | None = None) -> list[int]:
    """A list of whole numbers, each once, in the order given.

    >>> numbers("--batch", "1,4,16", least=1)
    [1, 4, 16]
    """
    found: list[int] = []
    for word in text.split(","):
        value = int(word) if word.strip().isascii() and word.strip().isdecimal() else None
        if value is None or value < least or (most is not None and value > most):
            upto = "" if most is None else f" to {most}"
            raise BadOption(f"{option} is {text!r}; it must be whole numbers from {least}{upto}, as in 1,4,16")
        found.append(value)
    return list(dict.fromkeys(found))


def mode_names(text: str) -> list[str] | None:
    """A list of modes, or None for all that can run."""
    if text == ALL:
        return None
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in MODES:
            raise BadOption(f"--mode is {text!r}; {word!r} is none of {listing(word, MODES)}, or `{ALL}`")
    return list(dict.fromkeys(words))


# The model


@contextmanager
def _source(model: str | None, shape: str | None, type: str | None, options: LoadOptions) -> Iterator[BenchModel]:
    if shape is None:
        name = model or DEFAULT
        with opened_bare(name, options) as bare:
            yield _of_file(name, bare, options)
        return
    yield _random(shape, type, options)


def _of_file(name: str, bare: Bare, options: LoadOptions) -> BenchModel:
    from ostinato.engine.choose import LoadCase, backend_of, why_not
    from ostinato.engine.machine import machine_at
    from ostinato.engine.memory_plan import MemoryPlan
    from ostinato.models.header import tensors_of

    settled, tensors, machine = bare.settled, tensors_of(bare.checkpoint), machine_at(bare.settled.device)
    return BenchModel(
        name,
        type=_file_type(bare.checkpoint) if settled.weights == "tiles" else settled.dtype,
        load=lambda dense: bare.load(dense=dense),
        weight_bytes=MemoryPlan(backend_of(settled), bare.shape, tensors, settled, 0).bytes_of("weights"),
        settled=settled,
        why_not=why_not(LoadCase(bare.shape, tensors, _least_of(options), machine)),
        routed=bare.shape.experts is not None,
    )


def _least_of(options: LoadOptions) -> LoadOptions:
    """The options of the smallest engine; the lists set the slots and the context that are measured."""
    return replace(options, slots=1, context=1)


def _file_type(checkpoint: Checkpoint) -> str:
    """The type of most of a file's bytes."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.type] += tensor.n_bytes
    return sizes.most_common(1)[0][0]


def _random(shape: str, type: str | None, options: LoadOptions) -> BenchModel:
    from ostinato.backends.base import dtype_of, kv_type_of
    from ostinato.backends.torch.backend import TORCH
    from ostinato.engine.choose import LoadCase, backend_of, prepared, why_not
    from ostinato.engine.machine import choose_device, machine_at
    from ostinato.engine.memory_plan import MemoryPlan
    from ostinato.lab.random_weights import DTYPES, MIXES, RandomFile
    from ostinato.models.named_shapes import named_shape

    sizes = named_shape(shape)
    if type is not None and type not in (*DTYPES, *MIXES):
        raise BadOption(f"--type is {type!r}; known: {listing(type, (*DTYPES, *MIXES))}")
    machine = machine_at(choose_device(options.device))
    dtype = DTYPES.get(type or "", dtype_of(options, machine.kind))
    called = type or next(name for name, known in DTYPES.items() if known == dtype)
    file = RandomFile(sizes, called)
    settled = prepared(LoadCase(sizes, file.tensors, options, machine), talk)
    if settled.weights != "tiles":  # with tiles, rows are float32 for any weight type
        settled = replace(settled, dtype=dtype, kv_type=kv_type_of(options, dtype))
        TORCH.prepare(settled, talk)

    def how(dense: bool) -> Settled:
        return replace(settled, backend="torch", weights="dense", dtype=dtype) if dense else settled

    def room(dense: bool) -> MemoryPlan:
        """The memory of the smallest engine."""
        least = replace(how(dense), n_slots=1, context=1, n_pages=1, kv_type="bf16")
        return MemoryPlan(backend_of(least), sizes, file.tensors, least, machine.free_bytes)

    def load(dense: bool) -> LoadedModel:
        room(dense).check()  # before any of it is allocated
        detail(f"making {shape} as {called} on {settled.device}")
        return file.load(how(dense))

    return BenchModel(
        shape,
        called,
        load,
        weight_bytes=room(False).bytes_of("weights"),
        settled=settled,
        why_not=why_not(LoadCase(sizes, file.tensors, _least_of(options), machine)),
        routed=sizes.experts is not None,
    )


# Measuring and printing


def _measure(
    source: BenchModel,
    wanted: list[str] | None,
    lists: dict[str, list[int]],
    repeats: int,
    *,
    profile: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    from ostinato.lab.bench import Bench, weights_read_bandwidth, why_not_profiled

    # A CPU's eager comes first, with weights of its own.
    modes = _modes_here(wanted, source)
    dense = source.in_tiles and "eager" in modes
    model: LoadedModel | None = source.load(dense)
    assert model is not None
    why_not = {mode: why_not_profiled(mode, source.settled.kind) for mode in modes} if profile else {}
    profiled = _possible(why_not, "no profile of")
    facts = _facts(source, repeats)
    if not as_json:
        write_line(_head(facts))
        _show_row(_HEADINGS)
    figures, profiles = [], []
    reads: dict[str, float] = {}  # bytes per second, by mode
    cached = _why_no_limit(source)
    for dense, group in _by_weights(modes, source):
        if model is None:
            model = source.load(dense)
        how = source.settled
        bandwidth = facts["read_bytes_s"] = weights_read_bandwidth(model, threads=how.threads)
        reads |= dict.fromkeys(group, bandwidth)
        bench = Bench(model, how.kv_type, bandwidth, repeats, "wide" if dense else how.activations, how.threads)
        for figure in bench.figures(modes=group, **lists):
            figures.append(figure)
            if not as_json:
                _show_row(_row(figure, limited=cached is None))  # print at once: a table may take minutes
        cases = product([mode for mode in group if mode in profiled], lists["batches"], lists["depths"])
        profiles += [bench.profile(batch=batch, depth=depth, mode=mode) for mode, batch, depth in cases]
        model = None  # freed before the next is loaded
        del bench
    if not as_json:
        write_line(cached or f"limit: a step reads {_what_is_read(source)} once, {_spoken(reads)}")
        for one in profiles:
            _show_profile(one, reads[one.mode])
    if plot is not None:
        draw(figures, _head(facts), plot)
    write_json({**facts, "figures": list(map(_record, figures)), "profiles": [asdict(one) for one in profiles]})


def _what_is_read(source: BenchModel) -> str:
    return "all weights, but of experts those that its rows use," if source.routed else "all weights"


def _by_weights(modes: list[str], source: BenchModel) -> list[tuple[bool, list[str]]]:
    """The modes, grouped by the weights they share: on a CPU `eager` with dense ones, then the native loop's tiles."""
    if not source.in_tiles:
        return [(False, modes)]
    dense, packed = [mode for mode in modes if mode == "eager"], [mode for mode in modes if mode != "eager"]
    return [(kind, group) for kind, group in ((True, dense), (False, packed)) if group]


def _modes_here(wanted: list[str] | None, source: BenchModel) -> list[str]:
    """The requested modes, refused if one cannot run; or all that can."""
    from ostinato.engine.choose import modes_of

    if wanted is None:
        return _possible({mode: source.why_not[mode] for mode in modes_of(source.settled.kind)}, "not")
    for mode in wanted:
        if (reason := source.why_not[mode]) is not None:
            raise HardwareCannot(f"mode {mode!r} cannot run here: {reason}")
    return wanted


def _possible(reasons: Mapping[str, str | None], what: str) -> list[str]:
    """The modes that have no reason against them; prints that of each of the others."""
    hints = InstallHints()
    for mode, reason in reasons.items():
        if reason is not None:
            talk(f"{what} {mode}: {hints.cell(reason)}")
    for hint in hints.lines:
        talk(f"to install {hint}")
    return [mode for mode, reason in reasons.items() if reason is None]


def _facts(source: BenchModel, repeats: int) -> dict[str, Any]:
    from ostinato.backends.machine import cpu_name, package_version

    device = source.settled.device
    return {
        "date": date.today().isoformat(),
        "question": "how fast does it decode here?",
        "ostinato": __version__,
        "python": platform.python_version(),
        "model": source.name,
        "type": source.type,
        "kv_type": source.settled.kv_type,
        "activations": source.settled.activations if source.in_tiles else None,
        "weight_bytes": source.weight_bytes,
        "device": device,
        "device_name": cpu_name() if source.settled.kind == "cpu" else _gpu_name(device),
        "threads": source.settled.threads,
        "torch": package_version("torch"),
        "repeats": repeats,
    }


def _gpu_name(device: str) -> str:
    from ostinato.backends.cuda import gpu

    return gpu.name_of(device)


def _head(facts: dict[str, Any]) -> str:
    threads = "" if facts["threads"] is None else f", {facts['threads']} threads"
    activations = "" if facts["activations"] is None else f", activations {facts['activations']}"
    return (
        f"{facts['model']} {facts['type']}, {megabytes(facts['weight_bytes'])} of weights{activations}, "
        f"KV {facts['kv_type']}, on {facts['device_name']}{threads}"
    )


def _why_no_limit(source: BenchModel) -> str | None:
    """That memory does not limit this model, whose weights stay in the CPU's cache; None if they do not."""
    from ostinato.lab.read_bandwidth import cache_bytes

    cache = cache_bytes() if source.settled.kind == "cpu" else 0
    if source.weight_bytes > cache:
        return None
    return f"no limit: memory is not read, as {megabytes(source.weight_bytes)} fit the CPU's cache, {megabytes(cache)}"


def _spoken(reads: Mapping[str, float]) -> str:
    """The read bandwidth; that of each mode where they differ, since a CPU's eager has weights of its own.

    >>> _spoken({"eager": 45e9, "loop": 50e9})
    'at 45.0 GB/s in eager, 50.0 GB/s in loop'
    """
    if len(set(reads.values())) == 1:
        return f"at {next(iter(reads.values())) / 1e9:.1f} GB/s"
    return "at " + ", ".join(f"{rate / 1e9:.1f} GB/s in {mode}" for mode, rate in reads.items())


_HEADINGS: Final = ("mode", "batch", "test", "tok/s", "least - most", "by the host", "limit", "of it")
_WIDTHS: Final = (10, 5, 15, 10, 20, 11, 10, 6)


def _show_row(cells: Sequence[str]) -> None:
    """Words to the left, numbers to the right."""
    shown = [
        cell.ljust(width) if heading in ("mode", "test") else cell.rjust(width)
        for cell, width, heading in zip(cells, _WIDTHS, _HEADINGS, strict=True)
    ]
    write_line("  ".join(shown).rstrip())


def _row(figure: Figure, *, limited: bool) -> tuple[str, ...]:
    test, rates = figure.task, figure.rates
    limit = (f"{figure.limit_tok_s:.1f}", f"{100 * figure.tok_s / figure.limit_tok_s:.0f} %")
    return (
        test.mode,
        str(test.batch),
        test.name,
        f"{figure.tok_s:.1f}",
        f"{min(rates):.1f} - {max(rates):.1f}",
        f"{figure.host_tok_s:.1f}",
        *(limit if limited and test.kind == "tg" else ("-", "-")),  # arithmetic limits a prompt, not memory
    )


def _record(figure: Figure) -> dict[str, Any]:
    return {
        **asdict(figure.task),
        "test": figure.task.name,
        "tok_s": figure.tok_s,
        "host_tok_s": figure.host_tok_s,
        "limit_tok_s": figure.limit_tok_s,
        "read_bytes_s": figure.bandwidth,
        "bytes_per_token": figure.bytes_per_token,
        "runs": [asdict(run) for run in figure.runs],
    }


def _show_profile(profile: Profile, bandwidth: float) -> None:
    whole = profile.microseconds
    between = "" if profile.between_us is None else f", and {profile.between_us:.1f} us to the next"
    where = f"a step of batch {profile.batch} at depth {profile.depth} in {profile.mode}"
    write_line(f"{where}, without its step boundary: {whole:.0f} us{between}")
    rows: list[tuple[str, ...]] = [("kind", "nodes", "us", "of it", "reads at", "of the limit")]
    for kind in profile.kinds:
        rate = kind.weight_bytes / kind.microseconds * 1e6 if kind.microseconds else 0.0
        reads = (f"{rate / 1e9:.1f} GB/s", f"{100 * rate / bandwidth:.0f} %") if kind.weight_bytes else ("-", "-")
        share = 100 * kind.microseconds / whole if whole else 0.0
        rows.append((kind.kind, str(kind.n_nodes), f"{kind.microseconds:.1f}", f"{share:.0f} %", *reads))
    write_columns(rows)


# The picture


def draw(figures: Sequence[Figure], title: str, plot: Path) -> None:
    """The bar chart: for every batch and depth a group of bars, one per mode, and the limit as a line above them."""
    shown = [figure for figure in figures if figure.task.kind == "tg"] or list(figures)
    groups = list(dict.fromkeys((f.task.batch, f.task.name) for f in shown))
    modes = list(dict.fromkeys(f.task.mode for f in shown))
    picture = figure_kind(plot)(figsize=(max(6.0, 1.6 * len(groups)), 4.5), layout="constrained")
    axes = picture.subplots()
    width = 0.8 / len(modes)
    for number, mode in enumerate(modes):
        mine = [f for f in shown if f.task.mode == mode]
        places = [groups.index((f.task.batch, f.task.name)) - 0.4 + (number + 0.5) * width for f in mine]
        bars = axes.bar(places, [f.tok_s for f in mine], width, label=mode)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    limits = {(f.task.batch, f.task.name): f.limit_tok_s for f in shown if f.task.kind == "tg"}
    for place, group in enumerate(groups if limits else ()):
        label = "read limit" if place == 0 else None
        axes.hlines(limits[group], place - 0.45, place + 0.45, colors="black", linestyles="dashed", label=label)
    axes.set_xticks(range(len(groups)), [f"batch {batch}\n{name}" for batch, name in groups])
    axes.set_ylabel("tokens per second")
    axes.set_title(title, fontsize=8)
    picture.legend(loc="outside lower center", ncols=len(modes) + 1)
    save(picture, plot)
