"""Verbs of the store: `pull`, `models` and `rm`."""

from __future__ import annotations

from typing import Annotated

import typer

from ostinato.cli import flags
from ostinato.cli.output import talk, write_columns, write_json, write_line
from ostinato.files import store
from ostinato.files.fetch import megabytes


@flags.verb
def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A known name, hf:owner/repo/file.gguf or hf:owner/repo.",
            autocompletion=flags.complete_model,
        ),
    ],
    as_json: flags.Json = False,
) -> None:
    """Fetch a model, or check the copy that is here, and print its path."""
    stored = store.pull(name, talk=talk)
    if as_json:
        write_json({"name": stored.name, "path": str(stored.path), "bytes": stored.n_bytes})
    else:
        write_line(str(stored.path))


@flags.verb
def models(as_json: flags.Json = False) -> None:
    """List the models on this machine and the names that can be pulled."""
    here = store.installed()
    absent = sorted(set(store.TABLE) - {model.name for model in here})
    if as_json:
        listed = [{"name": m.name, "path": str(m.path), "bytes": m.n_bytes} for m in here]
        write_json({"home": str(store.home()), "installed": listed, "available": absent})
        return
    rows = [(model.name, megabytes(model.n_bytes), str(model.path)) for model in here]
    rows += [(name, "-", f"not here; `ostinato pull {name}` fetches it") for name in absent]
    write_columns(rows)


@flags.verb
def rm(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A name in `ostinato models`.", autocompletion=flags.complete_installed),
    ],
    as_json: flags.Json = False,
) -> None:
    """Remove a model that was pulled."""
    n_bytes = store.remove(name, talk=talk)
    if as_json:
        write_json({"name": name, "bytes": n_bytes})
    else:
        talk(f"{name} is removed ({megabytes(n_bytes)})")
