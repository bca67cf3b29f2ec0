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
from ostinato.cli.serve import check_installed
from ostinato.files.store import DEFAULT

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from ostinato.scale.batch import Tally

_LINE_EVERY_S: Final = 10.0
_SCALE: Final = "Beyond this process"


@flags.verb
def batch(
    *,
    requests: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, one a line.")],
    results: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Results; an unfinished file is continued.")],
    model: flags.Model = DEFAULT,
    alias: Annotated[str | None, Flag("What the requests call the model.", "NAME")] = None,
    replicas: Annotated[int | None, Flag("Engines, through Ray Data.", "N", panel=_SCALE, min=1)] = None,
    ray_address: Annotated[str | None, Flag("A cluster to join.", "ADDRESS", panel=_SCALE)] = None,
    load: flags.ToBatch,
    as_json: flags.Json = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Every line gets exactly one result, in the order they are ready. Run the same command again after it was stopped or
    killed: what has a result is not asked again.
    """
    check_installed()
    from ostinato.scale.batch import Tally, run_here
    from ostinato.scale.batch_file import Requests, Results
    from ostinato.serve.service import name_of
    from ostinato.serve.settings import ServeOptions

    options = ServeOptions(model, load=load, alias=alias)
    asked = Requests(requests)
    with Results(results, asked, alias or name_of(model)) as written, Bar() as bar:
        if len(written.done) == len(asked.lines):
            talk(f"{results} has a result for each of {len(asked.lines)} lines already")
            tally = Tally(len(asked.lines), len(written.done))
        elif replicas is not None or ray_address is not None:
            from ostinato.scale.data import run_on_ray

            tally = run_on_ray(
                options, asked, written, replicas=replicas or 1, address=ray_address, on_progress=bar, talk=talk
            )
        else:
            import asyncio

            from ostinato.llm import LLM

            tally = asyncio.run(
                run_here(options, lambda: LLM(model, load=load, talk=talk), asked, written, on_progress=bar)
            )
    _sum_up(tally, bar.seconds, results, as_json=as_json)


def _sum_up(tally: Tally, seconds: float, results: Path, *, as_json: bool) -> None:
    rate = tally.tokens / seconds if seconds else 0.0
    earlier = f", {tally.before} before" if tally.before else ""
    talk(
        f"{results}: {tally.answered} answered, {tally.refused} refused, {tally.damaged} damaged{earlier}; "
        f"{tally.tokens} tokens in {seconds:.1f} s, {rate:.1f} tokens/s"
    )
    if as_json:
        write_json({**asdict(tally), "seconds": seconds, "tokens_s": rate})


class Bar(ProgressBar):
    """Called with a `Tally` after each line."""

    def __init__(self) -> None:
        super().__init__()
        self._began = self._said = time.monotonic()

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
        if tally.done == tally.before:
            self._began = time.monotonic()
        rate = f"{tally.tokens / max(self.seconds, 1e-9):.1f} tokens/s"
        self._show(tally.done, tally.lines, f"{tally.done} of {tally.lines} lines, {rate}", _LINE_EVERY_S, rate=rate)
