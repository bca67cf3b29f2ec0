"""The sources of the laboratory, and the compiled library of the host's part."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

from ostinato.build import CXX_FLAGS, shared_object

FOLDER: Final = Path(__file__).parent


def source(name: str) -> str:
    """One of the sources, by its file name."""
    return (FOLDER / name).read_text("utf-8")


@cache
def host_library() -> ctypes.CDLL:
    """`host.cpp`, compiled once; HardwareCannot where there is no compiler."""
    # Not -ffast-math: a library linked with it makes the whole process treat the smallest numbers as zero.
    library = ctypes.CDLL(str(shared_object(source("host.cpp"), "host.cpp", flags=(*CXX_FLAGS, "-O3"))))
    pointer, whole, number = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_uint
    library.run_all.argtypes = [pointer, pointer, whole, ctypes.c_int, pointer, whole, ctypes.c_int]
    library.feed.argtypes = [pointer, pointer, ctypes.c_int, pointer, whole]
    library.feed.restype = library.run_all.restype = None
    library.launch_many.argtypes = [pointer, pointer, number, number, pointer, pointer, whole]
    library.replay_many.argtypes = [pointer, pointer, pointer, whole]
    library.update_and_replay.argtypes = [
        *(pointer,) * 4, ctypes.c_int, pointer, number, number, pointer, pointer, pointer, whole,
    ]  # fmt: skip
    return library
