"""Describes a file or folder that is not a model we can open, and says what to give instead.

Only messages come from here; the readers are `gguf.py` and `safetensors.py`.
"""

import codecs
import os
from pathlib import Path

from ostinato.errors import BadFile, Unsupported, first_few
from ostinato.other_engines import LORA

_GIVE = "give a .gguf file, or a folder with config.json and .safetensors files"
_OLD_GGML = (b"lmgg", b"tjgg", b"fmgg", b"algg", b"ggml", b"ggjt", b"ggmf", b"ggla")


def _kind(head: bytes) -> str:
    """What the first bytes of a file look like, with advice where there is some."""
    if head[:4] in _OLD_GGML:
        return "a GGML file of the days before GGUF; convert it to GGUF or fetch a newer one"
    if head[:2] == b"PK":
        return f"a zip archive, as PyTorch pickles are: they can run code and are not opened; {_GIVE}"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return f"a Python pickle (.bin, .pt): it can run code and is not opened; {_GIVE}"
    if head[8:9] == b"{":
        return "a single safetensors file; give the folder that holds it with config.json and tokenizer.json"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself; run `git lfs pull` or fetch the file again"
    if head.lstrip()[:1] == b"<":
        return f"a web page, perhaps an error page saved under this name; fetch the file again, or {_GIVE}"
    if _is_text(head):
        return f"a text file; {_GIVE}"
    return f"not a model: it begins with the bytes {head[:4].hex(' ')}; {_GIVE}"


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # `head` may end within a character
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character.isspace() for character in text)


def not_a_model(path: Path, head: bytes, n_bytes: int) -> BadFile:
    """The error for a file that does not begin as a GGUF does; `head` is its beginning."""
    if n_bytes == 0:
        return BadFile(f"{path}: is empty; fetch it again, or {_GIVE}")
    if n_bytes < 4 and b"GGUF".startswith(head):
        return BadFile(f"{path}: holds only {n_bytes} bytes of a GGUF file; it was cut off, fetch it again")
    return BadFile(f"{path}: is {_kind(head)}")


def refuse_folder(folder: Path) -> None:
    """Raise BadFile for a folder that is no safetensors model: what it holds, and what to give instead."""
    if os.path.exists(folder / "config.json"):
        return
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise BadFile(
            f"{folder}: the folder cannot be listed: {error.strerror}; allow reading it (chmod +rx)"
        ) from None
    if "adapter_config.json" in names:
        raise Unsupported(f"{folder}: holds an adapter, not a model; {LORA}")
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        raise BadFile(
            f"{folder}: is a folder without config.json; give the path of one of its GGUF files: {first_few(ggufs)}"
        )
    holds = f"{len(names)} entries" if names else "nothing"
    raise BadFile(f"{folder}: is a folder without config.json (it holds {holds}); {_GIVE}")
