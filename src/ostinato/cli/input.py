"""Text from a user: as an argument, in a file, or on standard input; bytes are UTF-8 or refused.

Parsing at the edge, once: what comes out of here is a clean `str`. No verb opens a text file by itself.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Final

from ostinato.errors import BadInput, BadOption

STANDARD_INPUT: Final = Path("-")


def check_text(text: str, what: str) -> str:
    """A text from the command line, refused if the shell's bytes were not UTF-8."""
    return text if text.isascii() else decode_text(os.fsencode(text), what)


def decode_text(data: bytes, what: str) -> str:
    """UTF-8 bytes as text; a wrong byte is refused with its offset.

    >>> decode_text(b"ab\\xff", "the prompt")
    Traceback (most recent call last):
        ...
    ostinato.errors.BadInput: the prompt is not UTF-8: byte 0xff at offset 2 (invalid start byte)
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{what} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} ({error.reason})"
        ) from None


def read_file(path: Path) -> str:
    """A file as it is; `-` is standard input."""
    if path == STANDARD_INPUT:
        return read_standard_input()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    return decode_text(data, str(path))


def read_schema(path: Path) -> str:
    """The JSON in a file."""
    if str(path).lstrip()[:1] in ("{", "["):
        raise BadOption("--schema takes a file, not JSON text; write the schema to one, or give - for standard input")
    text = read_file(path)
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadOption(f"--schema {path} is no JSON: {error}") from error
    return text


def read_standard_input() -> str:
    """Standard input, byte for byte up to its end."""
    try:
        return decode_text(b"" if sys.stdin is None else sys.stdin.buffer.read(), "standard input")
    except OSError as error:
        raise BadInput(f"cannot read standard input: {error.strerror or error}") from error


def is_typed() -> bool:
    """Whether a person types on standard input."""
    return sys.stdin is not None and sys.stdin.isatty()


def standard_input_is_given() -> bool:
    """Whether standard input is a pipe or a file, not a terminal and not closed."""
    return sys.stdin is not None and not sys.stdin.isatty()


def holds_unread_text() -> bool:
    """Whether standard input is a pipe that holds text, or a file of which nothing was read. Takes nothing and never
    waits: a pipe may stay open for ever, and a file or a pipe may be the list of a shell's loop."""
    try:
        import fcntl
        import termios

        handle = sys.stdin.fileno()
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode):
            return status.st_size > 0 and os.lseek(handle, 0, os.SEEK_CUR) == 0
        return stat.S_ISFIFO(status.st_mode) and any(fcntl.ioctl(handle, termios.FIONREAD, bytes(4)))
    except (AttributeError, ImportError, OSError, ValueError):  # closed, no file, or no Unix
        return False


def read_text(argument: str | None, file: Path | None, what: str) -> str:
    """The text from the one place where it was given; raises if it was given twice or not at all."""
    if argument is not None and file is not None:
        raise BadInput(f"{what} was given twice, as an argument and with --file {file}; give one of them")
    if argument is not None:
        return check_text(argument, what)
    if file is not None:
        return read_file(file)
    if standard_input_is_given():
        return read_standard_input()
    raise BadInput(f"{what} is missing: give it as an argument, with --file FILE, or on standard input")


def without_last_newline(text: str) -> str:
    """Text files and `echo` end in a newline that is not meant as part of a prompt."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
