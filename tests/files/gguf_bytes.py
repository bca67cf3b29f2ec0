"""GGUF files put together byte by byte, so that a test can make any field wrong."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """One key with its value."""
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, elements: Sequence[bytes], count: int | None = None) -> bytes:
    """The value of an array; `count` lies about how many there are."""
    return struct.pack("<IQ", kind, len(elements) if count is None else count) + b"".join(elements)


def tensor(name: str | bytes, dims: Sequence[int], type: int, offset: int, n_dims: int | None = None) -> bytes:
    """One line of the tensor table; dims innermost first, as the file has them."""
    head = string(name) + struct.pack("<I", len(dims) if n_dims is None else n_dims)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, type, offset)


ARCHITECTURE = pair("general.architecture", STRING, string("llama"))


@dataclass(frozen=True)
class File:
    """A small valid file by default: an architecture and no tensor."""

    pairs: Sequence[bytes] = (ARCHITECTURE,)
    tensors: Sequence[bytes] = ()
    data: bytes = b""
    version: int = 3
    alignment: int = 32
    magic: bytes = b"GGUF"
    n_pairs: int | None = None
    n_tensors: int | None = None
    order: str = field(default="<")

    @property
    def header(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_pairs = len(self.pairs) if self.n_pairs is None else self.n_pairs
        counts = struct.pack(f"{self.order}IQQ", self.version, n_tensors, n_pairs)
        return self.magic + counts + b"".join(self.pairs) + b"".join(self.tensors)

    @property
    def bytes(self) -> bytes:
        header = self.header
        return header + b"\0" * (-len(header) % self.alignment) + self.data
