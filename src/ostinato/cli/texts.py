"""Verbs that read a text and give figures: `tokenize`, `score` and `embed`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from ostinato.cli import flags
from ostinato.cli.flags import Flag
from ostinato.cli.input import (
    check_text,
    is_typed,
    read_file,
    read_standard_input,
    read_text,
    standard_input_is_given,
)
from ostinato.cli.loading import opened
from ostinato.cli.output import talk, write_columns, write_json, write_line
from ostinato.errors import BadInput
from ostinato.files.store import DEFAULT, resolve

PoolingName = Literal["mean", "cls", "last", "rank"]


@flags.verb
def tokenize(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text; by default standard input, byte for byte.")
    ] = None,
    model: flags.Model = DEFAULT,
    no_bos: Annotated[bool, Flag("Add neither BOS nor EOS.")] = False,
    special: Annotated[bool, Flag("Parse special tokens in the text.")] = False,
    as_json: flags.Json = False,
) -> None:
    """Show the tokens of a text.

    Works on a GGUF file that holds only a vocabulary. Plain output has a line per token: its id, a tab, its text.
    """
    from ostinato.text.of_checkpoint import open_tokenizer

    if text is None and is_typed():
        talk("reading standard input; Ctrl-D ends it")
    given = read_standard_input() if text is None else check_text(text, "the text")
    tokenizer = open_tokenizer(resolve(model, talk=talk))
    ids = tokenizer.encode(given, bos=not no_bos, special=special) if given else []
    pieces = tokenizer.pieces(ids)
    if as_json:
        write_json({"ids": ids, "pieces": pieces})
        return
    for token, piece in zip(ids, pieces, strict=True):
        write_line(f"{token}\t{json.dumps(piece, ensure_ascii=False)}")


@flags.verb
def score(
    *,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text; by default --file or standard input.")
    ] = None,
    file: flags.TextFile = None,
    model: flags.Model = DEFAULT,
    load: flags.ToCompute,
    as_json: flags.Json = False,
) -> None:
    """Measure how well a model predicts a text: tokens, negative log-likelihood, perplexity; teacher forced.

    The first token is not counted: nothing precedes it, so it is not predicted.
    """
    given = read_text(text, file, "the text to score")
    if not given:
        raise BadInput("the text to score is empty")
    with opened(model, load) as llm:
        result = llm.score(given)
    if as_json:
        figures = {"n_tokens": result.n_tokens, "nll": result.nll, "perplexity": result.perplexity}
        write_json({**figures, "model": llm.name})
    else:
        rows = [
            ("n_tokens", f"{result.n_tokens} (the first token is not predicted, so not counted)"),
            ("nll", f"{result.nll:.6f}"),
        ]
        write_columns([*rows, ("perplexity", f"{result.perplexity:.4f}")])


@flags.verb
def embed(
    *,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="The texts; by default the lines of --file or standard input."),
    ] = None,
    file: flags.TextFile = None,
    pooling: Annotated[
        PoolingName | None,
        Flag("How the rows of a text become one vector; by default as the model's files say, or mean."),
    ] = None,
    prompt: Annotated[
        str | None,
        Flag(
            "Name of a prompt in the model's files, put before each text; by default the one they name.", metavar="NAME"
        ),
    ] = None,
    model: flags.Model = DEFAULT,
    load: flags.ToCompute,
    as_json: flags.Json = False,
) -> None:
    """Compute one vector per text from the last hidden states; with --pooling rank, a ranking model's scores.

    Plain output has a line of numbers per text.
    """
    given = _texts(texts, file)
    with opened(model, load) as llm:
        vectors: list[list[float]] = llm.embed(given, pooling=pooling, prompt=prompt).tolist()
    if as_json:
        used = pooling or llm.shape.pooling or "mean"
        write_json({"model": llm.name, "pooling": used, "embeddings": vectors})
        return
    for vector in vectors:
        write_line(" ".join(f"{value:.8g}" for value in vector))


def _texts(arguments: list[str] | None, file: Path | None) -> list[str]:
    if arguments and file is not None:
        raise BadInput(f"texts were given twice, as arguments and with --file {file}; give one of them")
    if arguments:
        given = [check_text(text, f"text {number}") for number, text in enumerate(arguments, 1)]
    elif file is not None:
        given = read_file(file).splitlines()
    elif standard_input_is_given():
        given = read_standard_input().splitlines()
    else:
        given = []
    if not given:
        raise BadInput("no text to embed: give it as an argument, with --file FILE, or on standard input")
    empty = [number for number, text in enumerate(given, 1) if not text]
    if empty:
        raise BadInput(f"text {empty[0]} of {len(given)} is empty; an empty text has no vector")
    return given
