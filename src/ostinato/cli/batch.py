"""`ostinato batch`: a file of requests becomes a file of results, and may be interrupted at any moment.

`scale/` answers the requests; here options become settings, and counts a bar with tokens per second and the time left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Self

import typer

from ostinato.cli import flags
from ostinato.cli.flags import Flag
from ostinato.cli.loading import ProgressBar
from ostinato.cli.output import talk, write_json
from ostinato.extras import check_extra
from ostinato.files.store import DEFAULT

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from ostinato.scale.batch import Tally
    from ostinato.scale.batch_file import Requests, Results
    from ostinato.serve.settings import ServeOptions

_LINE_EVERY_S: Final = 10.0
_SCALE: Final = "Beyond this process"


@flags.verb
def batch(
    *,
    requests: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, one per line.")],
    results: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Results; an unfinished file is continued.")],
    model: flags.Model = DEFAULT,
    alias: Annotated[str | None, Flag("The model's name in the requests.", "NAME")] = None,
    replicas: Annotated[int | None, Flag("Number of engines, through Ray Data.", "N", panel=_SCALE, min=1)] = None,
    ray_address: Annotated[str | None, Flag("Ray cluster to join.", "ADDRESS", panel=_SCALE)] = None,
    load: flags.ToBatch,
    as_json: flags.Json = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Every line gets exactly one result, written in the order of completion. After an interruption, run the same command
    again: it answers the lines that have no result. The exit code is 0 once every line has a result, even if that is
    a refusal or says that the line is invalid; the last line on standard error and --json count them.
    """
    if replicas is not None or ray_address is not None:
        check_extra("scale", "a batch on several engines")
    check_extra("serve", "`ostinato batch`")
    from ostinato.scale.batch import Tally
    from ostinato.scale.batch_file import Requests, Results
    from ostinato.serve.settings import ServeOptions, name_of

    options = ServeOptions(model, load=load, alias=() if alias is None else (alias,))
    asked = Requests(requests)
    with Results(results, asked, alias or name_of(model)) as written, Bar() as bar:
        if len(written.done) == len(asked.lines):
            talk(f"{results} has a result for each of {len(asked.lines)} lines already")
            tally = Tally(len(asked.lines), len(written.done))
        else:
            try:
                tally = _answer(options, asked, written, bar, replicas, ray_address)
            except KeyboardInterrupt:
                bar.close()
                talk(
                    f"interrupted: {len(written.done)} of {len(asked.lines)} lines have a result in {results}; "
                    "the same command answers the rest"
                )
                raise typer.Exit(130) from None
    _sum_up(tally, bar.seconds, results, as_json=as_json)


def _answer(
    options: ServeOptions, asked: Requests, written: Results, bar: Bar, replicas: int | None, ray_address: str | None
) -> Tally:
    """Answer the lines that have no result: in this process, or on Ray if its options are given."""
    if replicas is not None or ray_address is not None:
        from ostinato.scale.data import run_on_ray

        return run_on_ray(
            options, asked, written, replicas=replicas or 1, address=ray_address, on_progress=bar, talk=talk
        )
    import asyncio

    from ostinato.llm import LLM
    from ostinato.scale.batch import run_here

    def load() -> LLM:
        return LLM(options.model, load=options.load, talk=talk)

    return asyncio.run(run_here(options, load, asked, written, on_progress=bar))


def _sum_up(tally: Tally, seconds: float, results: Path, *, as_json: bool) -> None:
    rate = tally.tokens / seconds if seconds else 0.0
    talk(
        f"{results}: {tally.answered} answered, {tally.refused} refused, {tally.invalid} invalid, "
        f"{tally.already_done} already done; "
        f"{tally.tokens} tokens in {seconds:.1f} s, {rate:.1f} tokens/s"
    )
    if as_json:
        write_json({**asdict(tally), "seconds": seconds, "tokens_s": rate})


class Bar(ProgressBar):
    """Called with a `Tally` after each line."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the first line could be submitted."""
        return time.monotonic() - self._began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _columns(self) -> Sequence[ProgressColumn]:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        return BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()

    def __call__(self, tally: Tally) -> None:
        if tally.done == tally.already_done:
            self._began = time.monotonic()
        rate = f"{tally.tokens / max(self.seconds, 1e-9):.1f} tokens/s"
        line = f"{tally.done} of {tally.lines} lines" + (f", {rate}" if tally.tokens else "")
        self._show(tally.done, tally.lines, line, _LINE_EVERY_S, rate=rate)
