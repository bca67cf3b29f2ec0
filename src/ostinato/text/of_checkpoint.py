"""The tokenizer and the chat template of a model on disk, in either format.

The one place that knows that a GGUF file holds both in its metadata and a folder in files of their own.
"""

from __future__ import annotations

from pathlib import Path

from ostinato.files.checkpoint import Checkpoint, open_checkpoint
from ostinato.text.folder import tokenizer_from_folder
from ostinato.text.template import ChatTemplate, Sources, sources_in_folder, sources_in_gguf, template_from
from ostinato.text.tokenizer import Tokenizer, tokenizer_from_gguf


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a model."""
    if checkpoint.format == "gguf":
        return tokenizer_from_gguf(checkpoint.metadata, checkpoint.path)
    return tokenizer_from_folder(checkpoint.path)


def template_of(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a model; None for a model without. Its process starts with the first rendering."""
    return template_from(template_sources(checkpoint), tokenizer, checkpoint.path)


def template_sources(checkpoint: Checkpoint) -> Sources | None:
    """What `template_of` makes it from, also where the tokenizer cannot be read; None for a model without."""
    if checkpoint.format == "gguf":
        return sources_in_gguf(checkpoint.metadata, checkpoint.path)
    return sources_in_folder(checkpoint.path)


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model file or folder; a folder needs no weights for it, nor a GGUF file."""
    if path.is_dir():
        return tokenizer_from_folder(path)
    with open_checkpoint(path) as checkpoint:
        return tokenizer_of(checkpoint)
