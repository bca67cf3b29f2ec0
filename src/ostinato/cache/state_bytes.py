"""The container of a saved state: a name, a header, raw bytes, and a digest over all of it.

    magic 8s | version u16 | kind u16 | name bytes u32 | header bytes u64 | payload bytes u64      little-endian
    name of the architecture, UTF-8 | header, JSON | payload | SHA-256 of everything before it

A digest detects damage, not malice, so every size is checked against a bound before it is used. `state_block.py`
describes the payload, and `state_file.py` when it is written and read.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import struct
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn, get_args

from ostinato.cache.sequences import MAX_SEQ
from ostinato.errors import BadFile, BadInput

StateKind = Literal["whole", "sequence"]

VERSION: Final = 1
MAX_NAME_BYTES: Final = 256
MAX_HEADER_BYTES: Final = 1 << 25  # notes included; a history of a million tokens takes about 2^23
MAX_STATE_BYTES: Final = 1 << 38
MAX_PARTS: Final = 16

_MAGIC: Final = b"\x8fOSTATE\n"  # no text file begins like this, and a copy that rewrites line ends breaks it
_PREFIX: Final = struct.Struct("<8sHHIQQ")
_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_KINDS: Final[tuple[StateKind, ...]] = get_args(StateKind)  # stored as their index
MAX_OVERHEAD_BYTES: Final = _PREFIX.size + MAX_NAME_BYTES + MAX_HEADER_BYTES + _DIGEST_BYTES  # all but the payload
_AGAIN: Final = "the state is damaged or cut off: save it again"


class StreamCounts(NamedTuple):
    """How much of one stream is saved: its cells, and the total number of their sequence ids."""

    n_cells: int
    n_ids: int


@dataclass(frozen=True, slots=True)
class Section:
    """The header of one part of memory; the memory that loads it must have the same `layout`."""

    layout: Mapping[str, Any]
    streams: tuple[StreamCounts, ...]


@dataclass(frozen=True, slots=True)
class StateHeader:
    """The contents of the payload, and the application's own note."""

    sections: tuple[Section, ...]
    partial: bool = False
    note: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """A state's own claim of what it is and where its pieces are; nothing of it has been checked yet."""

    kind: StateKind
    architecture: str
    header_start: int
    payload_start: int
    payload_stop: int

    @property
    def n_bytes(self) -> int:
        return self.payload_stop + _DIGEST_BYTES


def pack(kind: StateKind, architecture: str, header: StateHeader, payload: Iterable[memoryview]) -> bytes:
    """Pack a state from its pieces; BadInput where the note or the name is too long, or the note is not JSON."""
    name, text = architecture.encode(), _header_text(header)
    if len(name) > MAX_NAME_BYTES:
        raise BadInput(f"the architecture's name takes {len(name)} bytes; at most {MAX_NAME_BYTES} can be saved")
    out = io.BytesIO()  # getvalue() makes no copy
    out.write(bytes(_PREFIX.size) + name + text)
    for piece in payload:
        out.write(piece)
    n_payload = out.tell() - _PREFIX.size - len(name) - len(text)
    out.seek(0)
    out.write(_PREFIX.pack(_MAGIC, VERSION, _KINDS.index(kind), len(name), len(text), n_payload))
    out.seek(0, io.SEEK_END)
    with out.getbuffer() as everything:
        digest = hashlib.sha256(everything).digest()
    out.write(digest)
    return out.getvalue()


def identify(data: bytes) -> Identity:
    """Read a state's identity; BadFile for bytes that are no saved state (ST-1)."""
    n_name, n_header, n_payload, kind = _read_prefix(data[: _PREFIX.size])
    header_start = _PREFIX.size + n_name
    if n_name > MAX_NAME_BYTES or len(data) < header_start:
        raise BadFile(f"the saved state ends before, or within, the name of its architecture; {_AGAIN}")
    try:
        name = data[_PREFIX.size : header_start].decode()
    except UnicodeDecodeError:
        raise BadFile(f"the architecture's name in the saved state is no text; {_AGAIN}") from None
    return Identity(kind, name, header_start, header_start + n_header, header_start + n_header + n_payload)


def unpack(data: bytes, identity: Identity) -> tuple[StateHeader, memoryview]:
    """Header and payload; BadFile if a byte has changed since they were written."""
    if len(data) != identity.n_bytes:
        raise BadFile(f"the saved state has {len(data)} bytes and promises {identity.n_bytes}; {_AGAIN}")
    if identity.payload_start - identity.header_start > MAX_HEADER_BYTES:
        n_header = identity.payload_start - identity.header_start
        raise BadFile(f"the header of the saved state claims {n_header} bytes, at most {MAX_HEADER_BYTES} are read")
    view = memoryview(data)
    if hashlib.sha256(view[: identity.payload_stop]).digest() != data[identity.payload_stop :]:
        raise BadFile(f"the saved state does not match its SHA-256 digest; {_AGAIN}")
    header = _parse_header(data[identity.header_start : identity.payload_start])
    return header, view[identity.payload_start : identity.payload_stop]


def describe(data: bytes) -> StateHeader:
    """The header of a saved state, with its note; BadFile for a foreign or damaged one."""
    header, _ = unpack(data, identify(data))
    return header


def write(path: str | Path, data: bytes) -> None:
    """Write a state to a file, completely or not at all: an older file stays until the new one is on disk."""
    try:
        target = Path(path).resolve()  # keeps a symbolic link, and replaces its target
        if target.exists() and not target.is_file():
            raise BadInput(f"{path}: is no plain file, so no state can be written over it; give another name")
        handle, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:64]}-")
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name, a loop of links
        raise BadInput(f"{path}: the state of {len(data)} bytes cannot be written: {_why(error)}") from error


def read(path: str | Path, *, limit: int = MAX_STATE_BYTES) -> bytes:
    """Read the state in a file of at most `limit` bytes. A file that is no state is refused after reading its head."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # a pipe would block, a device never end
            raise BadFile("this is no plain file; give a file that holds a saved state")
        with open(path, "rb") as file:
            _check_size(file.read(_PREFIX.size), found.st_size, limit)
            file.seek(0)
            return file.read(found.st_size)
    except BadFile as error:
        raise BadFile(f"{path}: {error}") from None
    except MemoryError:
        raise BadInput(f"{path}: there is no memory for a state of {found.st_size} bytes") from None
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: the state cannot be read: {_why(error)}") from error


def _check_size(head: bytes, n_bytes: int, limit: int) -> None:
    n_name, n_header, n_payload, _ = _read_prefix(head)
    promised = _PREFIX.size + n_name + n_header + n_payload + _DIGEST_BYTES
    if promised != n_bytes:
        raise BadFile(f"the file has {n_bytes} bytes and promises {promised}; {_AGAIN}")
    if n_bytes > limit:
        raise BadFile(f"the file has {n_bytes} bytes, more than the {limit} that can be loaded here")


def _read_prefix(head: bytes) -> tuple[int, int, int, StateKind]:
    """Bytes of the name, of the header and of the payload; and the kind."""
    if len(head) < _PREFIX.size or not head.startswith(_MAGIC):
        raise BadFile(
            f"this is no saved state: it begins with the bytes {head[:8].hex(' ') or 'of nothing'}, not with "
            f"{_MAGIC.hex(' ')}, or ends at once"  # ST-1
        )
    _, version, kind, n_name, n_header, n_payload = _PREFIX.unpack(head)
    if version != VERSION:
        raise BadFile(f"the saved state has version {version}, and only {VERSION} is read here: save it again")
    if kind >= len(_KINDS):
        raise BadFile(f"the saved state is of kind {kind}; known: 0 to {len(_KINDS) - 1} ({', '.join(_KINDS)})")
    return n_name, n_header, n_payload, _KINDS[kind]


def _header_text(header: StateHeader) -> bytes:
    parts = [{"layout": dict(part.layout), "streams": part.streams} for part in header.sections]
    fields = {"byte_order": sys.byteorder, "partial": header.partial, "note": header.note, "parts": parts}
    try:
        text = json.dumps(fields, allow_nan=False, separators=(",", ":"), default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"the note beside a saved state must be JSON: {error}") from error
    if len(text) > MAX_HEADER_BYTES:
        raise BadInput(f"the note beside the saved state is too long: {len(text)} bytes, at most {MAX_HEADER_BYTES}")
    return text


def _plain(value: object) -> object:
    """Convert mappings in notes that are not dicts."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is none of its types")


def _parse_header(text: bytes) -> StateHeader:
    """Parse the header and check the type of every field."""
    try:
        fields = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of thousands of digits
        raise BadFile(f"the header of the saved state is not JSON: {str(error)[:200]}; {_AGAIN}") from None
    match fields:
        case {"byte_order": str(order), "partial": bool(partial), "note": dict() | None as note, "parts": list(parts)}:
            if order != sys.byteorder:
                raise BadFile(f"the saved state is {order}-endian and this machine is not: save it on one like this")
            _check_length("parts", parts, MAX_PARTS)
            return StateHeader(tuple(_section(part) for part in parts), partial, note)
    raise BadFile(f"the header of the saved state lacks a field, or has one of a wrong type; {_AGAIN}")


def _section(part: Any) -> Section:
    match part:
        case {"layout": dict(layout), "streams": list(streams)}:
            _check_length("streams", streams, MAX_SEQ)
            return Section(layout, tuple(_counts(stream) for stream in streams))
    raise BadFile(f"the header of the saved state lacks the layout or the streams of a part; {_AGAIN}")


def _counts(stream: Any) -> StreamCounts:
    match stream:
        case [int(n_cells), int(n_ids)] if 0 <= n_cells <= MAX_STATE_BYTES and 0 <= n_ids <= MAX_STATE_BYTES:
            return StreamCounts(int(n_cells), int(n_ids))
    raise BadFile(f"the header of the saved state has no good count of cells: {str(stream)[:80]}; {_AGAIN}")


def _check_length(name: str, found: list[Any], most: int) -> None:
    if len(found) > most:
        raise BadFile(
            f"the header of the saved state has {len(found)} {name}, and no memory more than {most}; {_AGAIN}"
        )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}")


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space or give another folder"
    if isinstance(error, OSError) and error.errno == errno.ENOENT:
        return "there is no such file or folder"
    return str(getattr(error, "strerror", None) or error)
