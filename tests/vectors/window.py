"""Vectors of sliding windows (SW): what is masked, and how large the windowed cache is."""

from typing import Any

import numpy as np

from ostinato.cache.window import Window, windowed_size
from ostinato.decoder.cells.memory.coordinator import Coordinator
from ostinato.decoder.cells.memory.kv_cache import KVCache


def masked(kind: Any, n_swa: int, pairs: list[list[int]]) -> dict[str, Any]:
    keys, queries = np.array(pairs, np.int64).T
    return {"masked": Window(kind, n_swa).masked(keys, queries)}


def size(base: int, n_swa: int, n_seq_max: int, unified: bool, n_ubatch: int, full: bool) -> dict[str, Any]:
    cells = windowed_size(base, n_swa, n_seq_max=n_seq_max, unified=unified, n_ubatch=n_ubatch, full=full)
    whole = KVCache(base, n_seq_max=n_seq_max, unified=unified)
    windowed = KVCache(cells, n_seq_max=n_seq_max, unified=unified, window=Window("standard", n_swa))
    return {"size": cells, "can_shift": Coordinator(whole, windowed).can_shift}


def run(given: dict[str, Any], op: Any) -> dict[str, Any]:
    if op == "masked":
        return masked(given["type"], given["n_swa"], given["pairs"])
    if op == "size":
        return size(**given)
    raise ValueError(f"{op!r} is no operation on windows")
