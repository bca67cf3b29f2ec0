"""Small memories of every kind, filled with random numbers, and what they remember: for tests of saved states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ostinato.backends.torch.kv_store import KVStore, StateStore
from ostinato.cache.state_file import StateParts
from ostinato.cache.window import Window
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.decoder.cells.memory.saved import SavedKV, SavedStates
from ostinato.decoder.cells.memory.slots import Stream
from ostinato.models.rope import Rope
from ostinato.models.shape import Shape, alike
from ostinato.options import KVType

CPU = torch.device("cpu")

Cell = tuple[int, Sequence[int]]  # position, ids
Content = list[tuple[Any, ...]]  # what cells hold, with the bytes of their rows


@dataclass(frozen=True, slots=True)
class SavedParts(StateParts):
    """The parts of the cell kinds of memory."""

    kv: tuple[SavedKV, ...] = ()
    recurrent: SavedStates | None = None


def shape_of(n_layers: int, head_width: int = 32) -> Shape:
    return alike(
        "llama",
        Rope(1e4, head_width, "halves"),
        n_layers=n_layers,
        hidden=64,
        n_heads=2,
        n_kv_heads=1,
        head_width=head_width,
        ff_width=8,
        vocab=10,
        context=64,
        norm_eps=1e-5,
    )


def randomise(tensors: Sequence[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        if tensor.dtype is torch.int8:
            tensor.copy_(torch.randint(-127, 128, tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


def kv_part(
    size: int = 16,
    *,
    n_seq_max: int = 4,
    unified: bool = True,
    window: Window | None = None,
    kv_type: KVType = "f32",
    layers: Sequence[int] = (0, 1),
    n_pos_dims: int = 1,
    head_width: int = 32,
    seed: int = 0,
) -> SavedKV:
    """An empty cache, with random numbers in its tensors."""
    streams = 1 if unified else n_seq_max
    shape = shape_of(max(layers) + 1, head_width)
    store = KVStore(shape, dict.fromkeys(layers, size), kv_type, streams=streams, device=CPU, frequencies={})
    randomise([part for half in store.halves for part in half.parts], seed)
    cache = KVCache(size, n_seq_max=n_seq_max, unified=unified, window=window, n_pos_dims=n_pos_dims, tensors=store)
    return SavedKV(cache, store)


def state_part(n_seq_max: int = 4, *, n_snapshots: int = 0, width: int = 3, seed: int = 0) -> SavedStates:
    """Recurrent memory without sequences, with random numbers in its tensors."""
    store = StateStore(
        dict.fromkeys((0, 2), ((2, width), (width, 4))), rows=n_seq_max, planes=1 + n_snapshots, device=CPU
    )
    randomise([state for states in store.layers.values() for state in states], seed)
    return SavedStates(RecurrentMemory(n_seq_max, n_snapshots=n_snapshots, tensors=store), store)


def fill(stream: Stream, cells: Mapping[int, Cell]) -> None:
    for cell, (position, ids) in cells.items():
        stream.cells.set_position(cell, position)
        stream.cells.add([cell] * len(ids), list(ids))


def of(kv: SavedKV | None = None, states: SavedStates | None = None) -> SavedParts:
    return SavedParts("llama", () if kv is None else (kv,), states)


def kv_content(part: SavedKV, s: int | None = None) -> Content:
    """What the cells hold, in their order: stream, position, (y, x), ids, and the bytes of keys and values."""
    found = []
    for number, stream in enumerate(part.cache.streams):
        table = stream.cells
        for cell in np.flatnonzero(table.position >= 0).tolist():
            if s is not None and s not in table.ids(cell):
                continue
            rows = [tensor[number, cell].contiguous() for half in part.store.halves for tensor in half.parts]
            grid = None if table.grid is None else tuple(table.grid[cell].tolist())
            where: tuple[Any, ...] = (number, tuple(table.ids(cell))) if s is None else ()
            data = b"".join(row.view(torch.uint8).numpy().tobytes() for row in rows)
            found.append((*where, int(table.position[cell]), grid, data))
    return found


def state_of(part: SavedStates, s: int) -> tuple[Any, ...] | None:
    """The position of a sequence and the state that its next run starts from."""
    source = part.memory.source_of(s)
    if source is None:
        return None
    rows = [state[source.row, source.plane] for states in part.store.layers.values() for state in states]
    return part.memory.pos_max(s), b"".join(row.contiguous().numpy().tobytes() for row in rows)


def content(parts: SavedParts, s: int | None = None) -> list[Any]:
    """Everything that parts remember, or everything of a sequence."""
    found: list[Any] = [kv_content(part, s) for part in parts.kv]
    if parts.recurrent is not None:
        ids = range(parts.recurrent.memory.size) if s is None else [s]
        found.append([state_of(parts.recurrent, i) for i in ids])
    return found


def content_sorted(parts: SavedParts, s: int) -> list[Any]:
    """The content of a sequence, whatever the order of its cells."""
    return [sorted(rows, key=repr) for rows in content(parts, s)]


def in_reach(parts: SavedParts, s: int, ahead: int) -> list[Any]:
    """The content of a sequence that a token can see, so far ahead of its last."""
    found = content_sorted(parts, s)
    for k, part in enumerate(parts.kv):
        query = np.array((part.cache.pos_max(s) or 0) + ahead)
        found[k] = [row for row in found[k] if not part.cache.window.masked(np.array(row[0]), query)]
    return found


def run_states(part: SavedStates, runs: dict[int, int]) -> None:
    """Give sequences a cell each, at these positions, as if their last run had been long."""
    for s, position in runs.items():
        part.memory.load(frozenset({s}), position)
        part.memory.state.n_last[s] = 10


# A small memory of each kind, filled


def one_cache() -> SavedParts:
    part = kv_part()
    fill(part.cache.streams[0], {0: (0, [0]), 3: (1, [0, 2]), 4: (5, [1]), 9: (2, [0, 1, 2])})
    return of(part)


def several_streams() -> SavedParts:
    part = kv_part(n_seq_max=3, unified=False)
    fill(part.cache.streams[0], {2: (0, [0]), 3: (1, [0])})
    fill(part.cache.streams[2], {0: (7, [2]), 5: (8, [2]), 6: (9, [2])})
    return of(part)


def two_caches() -> SavedParts:
    full, windowed = kv_part(24, layers=(0, 2)), kv_part(24, layers=(1,), window=Window("standard", 4))
    fill(full.cache.streams[0], {p: (p, [0]) for p in range(8)} | {8: (0, [1])})
    fill(windowed.cache.streams[0], {p + 1: (p, [0]) for p in range(2, 8)} | {0: (0, [1])})
    return SavedParts("llama", (full, windowed))


def recurrent() -> SavedParts:
    part = state_part(n_snapshots=2)
    run_states(part, {1: 4, 3: 9, 0: 2})
    part.memory.seq_cp(3, 2)
    return of(None, part)


def hybrid() -> SavedParts:
    kv, states = kv_part(), state_part()
    fill(kv.cache.streams[0], {1: (0, [0]), 2: (1, [0]), 3: (0, [1])})
    run_states(states, {0: 1, 1: 0})
    return of(kv, states)


KINDS = [one_cache, several_streams, two_caches, recurrent, hybrid]


def fresh(parts: SavedParts) -> SavedParts:
    """An empty memory like another, with other numbers in its tensors."""
    kv = tuple(
        kv_part(
            part.cache.size,
            n_seq_max=len(part.cache.streams),
            unified=part.cache.unified,
            window=part.cache.window,
            kv_type=part.store.kv_type,
            layers=list(part.store.keys),
            n_pos_dims=1 if part.cache.streams[0].cells.grid is None else 3,
            seed=99,
        )
        for part in parts.kv
    )
    states = parts.recurrent
    if states is None:
        return replace(parts, kv=kv)
    return replace(
        parts, kv=kv, recurrent=state_part(states.memory.size, n_snapshots=states.memory.n_snapshots, seed=99)
    )


def nothing(parts: SavedParts) -> list[Any]:
    return content(fresh(parts))
