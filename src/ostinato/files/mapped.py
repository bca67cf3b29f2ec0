"""One regular file, opened or as a read-only memory map, with a message for every way in which that can fail.

Only bytes here; `gguf.py`, `safetensors.py` and `json_file.py` give them meaning. A view keeps the map
alive, so closing never invalidates memory that a reader uses.
"""

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ostinato.errors import BadFile, InternalError


def status(path: Path) -> os.stat_result:
    """`path.stat()`, or BadFile that says why it failed."""
    try:
        return path.stat()
    except FileNotFoundError:
        raise BadFile(f"{path}: there is no such file or folder; check the path") from None
    except PermissionError:
        raise BadFile(
            f"{path}: may not be looked at with your permissions; allow reading it (chmod +rx its folder)"
        ) from None
    except (OSError, ValueError) as error:  # a name too long, a loop of links, a NUL in the name
        raise BadFile(f"{path}: cannot be looked at: {error}; check the path") from None


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading; BadFile for any failure."""
    mode = status(path).st_mode
    if not stat.S_ISREG(mode):  # a pipe or a device could block for ever, or have no end
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise BadFile(f"{path}: is {kind}; a file of a model is wanted here")
    try:
        with path.open("rb") as file:
            yield file
    except PermissionError:
        raise BadFile(f"{path}: may not be read with your permissions; allow it (chmod +r)") from None
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: cannot be read: {error}") from None


class MappedFile:
    """A file mapped into memory, read only. An empty file has no bytes and no map."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as file:
            self.n_bytes = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.n_bytes else None
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self._map or b"", dtype=np.uint8)

    @property
    def data(self) -> mmap.mmap | bytes:
        """The whole file, for `struct` and slicing."""
        self._check_open()
        return self._map if self._map is not None else b""

    def view(self, start: int, n_bytes: int) -> NDArray[np.uint8]:
        """Bytes [start, start + n_bytes) without a copy; the caller has checked the bounds."""
        return self._check_open()[start : start + n_bytes]

    def let_go(self, start: int, n_bytes: int) -> None:
        """The pages of [start, start + n_bytes) need not stay in memory; a later access reads them again."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and last > first and hasattr(mmap, "MADV_DONTNEED"):
            with suppress(OSError, ValueError):  # only advice, and the system may not support it
                self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _check_open(self) -> NDArray[np.uint8]:
        if self._bytes is None:
            raise InternalError(f"{self.path}: was closed and cannot be read any more; open it again")
        return self._bytes

    def close(self) -> None:
        """Release the map; views that are still held stay valid, and the map ends with the last of them."""
        self._bytes = None
        if self._map is not None:
            with suppress(BufferError):  # a view is still held
                self._map.close()
            self._map = None
