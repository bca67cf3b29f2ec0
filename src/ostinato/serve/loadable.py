"""Whether the models of a server can be loaded, by their files and this machine: no weights are read for that.

`ostinato serve A B` asks it of all models before it listens, in a process of its own, because asking about a GPU holds
some of its memory. A worker asks it again before another model makes room for its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from ostinato.engine.choose import room_for
from ostinato.errors import OstinatoError
from ostinato.files.checkpoint import open_checkpoint
from ostinato.files.store import resolve
from ostinato.models.registry import read_shape
from ostinato.models.shape import Shape
from ostinato.options import LoadOptions
from ostinato.serve.settings import ServeOptions
from ostinato.serve.supervisor import CannotLoad
from ostinato.text.of_checkpoint import template_of, tokenizer_of
from ostinato.text.retrieval import forms_of


def check_loadable(model: str, load: LoadOptions) -> None:
    """Refuse a model whose file, architecture, tokenizer or chat template cannot be used, or that cannot run or fit
    here even alone."""
    with open_checkpoint(resolve(model, talk=lambda _: None)) as checkpoint:
        shape = read_shape(checkpoint)
        room_for(checkpoint, shape, with_context_of(shape, load))
        template = template_of(checkpoint, tokenizer_of(checkpoint))
        forms_of(checkpoint, template, by_words=bool(shape.rank_tokens))


def with_context_of(shape: Shape, load: LoadOptions) -> LoadOptions:
    """The options of one of several models: they have one `--context`, which is lowered to what this one was trained
    for."""
    return load if (load.context or 0) <= shape.context else replace(load, context=shape.context)


def main() -> None:
    """Read the options of a server, and write why models cannot be loaded."""
    options = ServeOptions.from_json(sys.stdin.read())
    found: list[CannotLoad] = []
    for index, model in enumerate(options.models):
        try:
            check_loadable(model, options.load)
        except OstinatoError as error:
            found.append(CannotLoad(index, str(error), error.exit_code))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
