"""`ostinato bench serve`: measures a server of OpenAI's API under load.

`serve/load.py` sends the requests; here options become a load, and results a table, a line of JSON and a picture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from ostinato import __version__
from ostinato.cli import flags
from ostinato.cli.bench import bench as bench
from ostinato.cli.flags import Flag
from ostinato.cli.output import write_columns, write_json, write_line
from ostinato.cli.plot import figure_kind, save
from ostinato.errors import BadInput, BadOption

if TYPE_CHECKING:
    from ostinato.serve.load import Lengths, Load, LoadReport, Outcome

_LOAD: Final = "Load"


@bench.command("serve")
@flags.verb
def serve_load(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, Flag("Name of the model in requests; by default none is sent.", "NAME")] = None,
    endpoint: Annotated[Literal["chat", "completions"], Flag("Which API to use.")] = "chat",
    requests: Annotated[int, Flag("Requests in total.", "N", min=1, panel=_LOAD)] = 64,
    concurrency: Annotated[
        int | None, Flag("Clients at once; by default 8, without --rate.", "N", min=1, panel=_LOAD)
    ] = None,
    rate: Annotated[float | None, Flag("Arrivals per second, at random times.", "X", panel=_LOAD)] = None,
    prompt_words: Annotated[str, Flag("Words of a prompt, about a token each.", "N[-N]", panel=_LOAD)] = "64",
    max_tokens: Annotated[str, Flag("Tokens of an answer.", "N[-N]", panel=_LOAD)] = "64",
    stream: Annotated[
        bool, Flag("Receive answers token by token, or whole.", name="--stream/--no-stream", panel=_LOAD)
    ] = True,
    ignore_eos: Annotated[
        bool,
        Flag(
            "Generate all tokens of every answer, or end where the model does.",
            name="--ignore-eos/--keep-eos",
            panel=_LOAD,
        ),
    ] = True,
    api_key: Annotated[str | None, Flag("The server's key.", "KEY", envvar="OSTINATO_API_KEY")] = None,
    warmup: Annotated[int, Flag("Requests before the measurement.", "N", min=0, panel=_LOAD)] = 2,
    timeout: Annotated[float, Flag("Seconds to wait for one answer.", "S", panel=_LOAD)] = 300.0,
    seed: Annotated[int, Flag("Seed; the same seed gives the same requests.", "N", panel=_LOAD)] = 0,
    plot: Annotated[Path | None, Flag("Draw the latencies (needs the extra `lab`).", "FILE.png")] = None,
    as_json: flags.Json = False,
) -> None:
    """Measure time to the first token, gaps between tokens and throughput of a server under load.

    Ends with one line of JSON.
    """
    import asyncio
    from dataclasses import replace

    from ostinato.serve.load import Load, report, run

    if rate is not None and concurrency is not None:
        raise BadOption("--rate leaves --concurrency to what comes; give one of the two")
    for name, value in (("--rate", rate), ("--timeout", timeout)):
        if value is not None and not 0 < value < math.inf:
            raise BadOption(f"{name} is {value}; it must be a number above 0")
    if plot is not None:
        figure_kind(plot)
    load = Load(
        url=url,
        model=model,
        kind=endpoint,
        n_requests=requests,
        clients=None if rate is not None else concurrency or 8,
        rate=rate,
        prompt=lengths("--prompt-words", prompt_words),
        answer=lengths("--max-tokens", max_tokens),
        stream=stream,
        ignore_eos=ignore_eos,
        key=api_key,
        seed=seed,
        timeout_s=timeout,
    )
    if warmup:
        warm = asyncio.run(run(replace(load, n_requests=warmup, clients=1, rate=None, seed=seed + 1)))
        if all(one.error for one in warm):
            why = f"{warm[0].error} {warm[0].said}".strip()
            raise BadInput(f"{url} did not answer: {why}; is a server there, and does it know the model?")
    outcomes = asyncio.run(run(load))
    found = report(outcomes)
    if not as_json:
        show(load, found)
    write_json(record(load, found))
    if plot is not None:  # last: the figures are printed even if the picture fails
        draw(outcomes, head(load), plot)


def lengths(option: str, text: str) -> Lengths:
    """`64`, or `16-128` for any of them.

    >>> lengths("--max-tokens", "16-128")
    Lengths(least=16, most=128)
    """
    from ostinato.serve.load import Lengths

    found = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text.strip(), re.ASCII)
    if found is None:
        raise BadOption(f"{option} is {text!r}; it must be a whole number, or two as in 16-128")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most:
        raise BadOption(f"{option} is {text!r}; it must be from 1 up, the smaller number first")
    return Lengths(least, most)


def head(load: Load) -> str:
    """The load, in a line."""
    how = f"{load.rate:g} requests/s" if load.rate is not None else f"{load.clients} clients"
    prompt, answer = ("-".join(map(str, dict.fromkeys(each))) for each in (load.prompt, load.answer))
    kind = "streamed" if load.stream else "whole"
    return f"{load.url} {load.kind}: {load.n_requests} requests, {how}, {prompt} words in, {answer} tokens out, {kind}"


def show(load: Load, found: LoadReport) -> None:
    """The table."""
    write_line(head(load))
    rows: list[tuple[str, ...]] = [("ms", "mean", "p50", "p90", "p95", "p99", "most")]
    for name, each in (
        ("first token", found.first_token_s),
        ("gap between tokens", found.gap_s),
        ("mean gap of a request", found.per_token_s),
        ("whole answer", found.whole_s),
    ):
        if each is not None:
            rows.append((name, *(f"{value * 1e3:.1f}" for value in each[1:])))
    write_columns(rows, numbers=True)
    write_columns(
        [
            ("answered", f"{found.answered} of {load.n_requests} in {found.seconds:.2f} s"),
            ("throughput", f"{found.requests_s:.2f} requests/s, {found.tokens_s:.1f} tokens/s out"),
            ("tokens", f"{found.prompt_tokens} in, {found.tokens} out"),
            ("errors", ", ".join(f"{n} x {what}" for what, n in found.errors.items()) or "none"),
        ]
    )


def record(load: Load, found: LoadReport) -> dict[str, Any]:
    """The line of JSON; no key in it."""
    asked = {name: value for name, value in asdict(load).items() if name != "key"}
    figures = {
        name: None if value is None else value._asdict() if hasattr(value, "_asdict") else value
        for name, value in ((each, getattr(found, each)) for each in found.__dataclass_fields__)
    }
    facts = {"date": date.today().isoformat(), "question": "what does this server do under load?"}
    return {**facts, "ostinato": __version__, "load": asked, **figures}


def draw(outcomes: Sequence[Outcome], title: str, plot: Path) -> None:
    """Two cumulative curves: the times to first token, and the gaps between tokens."""
    good = [one for one in outcomes if one.error is None]
    curves = {
        "time to first token": [(one.first - one.asked) * 1e3 for one in good if one.first is not None],
        "gap between tokens": [gap * 1e3 for one in good for gap in one.gaps],
    }
    picture = figure_kind(plot)(figsize=(9.0, 4.0), layout="constrained")
    for axes, (name, values) in zip(picture.subplots(1, 2), curves.items(), strict=True):
        ordered = sorted(values)
        axes.plot(ordered, [100 * (place + 1) / len(ordered) for place in range(len(ordered))])
        axes.set_xlabel(f"{name}, ms")
        axes.set_ylabel("% within")
        axes.set_ylim(0, 101)
        axes.grid(alpha=0.3)
    picture.suptitle(title, fontsize=9)
    save(picture, plot)
