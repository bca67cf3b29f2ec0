"""Wraps the `tokenizers` library, whose failures are bare exceptions, or panics.

A panic is not an `Exception` in Python, so an ordinary `except` would let it through to the user.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer as Library
from tokenizers import models

from ostinato.errors import BadFile

Made = TypeVar("Made")


def guarded(make: Callable[[], Made], path: Path, what: str) -> Made:
    """The result of `make`; whatever the library raises becomes a `BadFile` about `path`."""
    try:
        return make()
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise BadFile(f"{path} {what}: {error}") from error


def bpe(path: Path, **settings: Any) -> Library:
    """The library's tokenizer by merges."""
    return Library(guarded(lambda: models.BPE(**settings), path, "has a bad vocabulary"))


def library_ids(
    library: Library, text: str, path: Path, *, whole: bool = False, second: str | None = None
) -> list[int]:
    """The library's ids of a text, or of a pair; `whole` adds what its own post-processor puts around them."""

    def ids() -> list[int]:
        # A batch of one: only for batches does the library let other threads run, and a long text takes seconds.
        found: list[int] = library.encode_batch_fast(
            [text if second is None else (text, second)], add_special_tokens=whole
        )[0].ids
        return found

    # The name alone: a server tells this to its clients.
    return guarded(ids, Path(path.name), "cannot encode a text")
