"""The weights of a checkpoint by one set of names, each used once or named in an error.

The names are those of GGUF (`blk.3.attn_q.weight`); a safetensors folder's are translated by its family. A block
*takes* what it needs: the shape is checked and the memory laid out at once, the bytes are read later, all
together and in parallel, by `fill`. So a file with a missing or misshapen tensor is refused before anything is
read, and no weight exists twice.

A matrix is kept in one of three ways: dense, in the model's dtype; packed as in the file, for a GPU's kernels; or in
the tiles of the CPU's native loop (`tile_weights.py`).
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import gcd
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.backends.allocate import Allocate, empty
from ostinato.backends.cuda.packed import PACKED_TYPES, Packed, Stack, Weight, laid_out, put
from ostinato.backends.cuda.upload import THREADS, Uploads
from ostinato.backends.native.tile_weights import TilePiece, TileReader
from ostinato.backends.torch.arrays import array_of, dtype_of
from ostinato.errors import BadFile
from ostinato.files.checkpoint import holds_as_it_is
from ostinato.files.quants import BLOCKS
from ostinato.options import Activations

if TYPE_CHECKING:
    from ostinato.backends.native.tiles import TileMatrix
    from ostinato.files.checkpoint import Checkpoint

NOT_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "BOOL", "U8", "U16", "U32", "U64"})
SORTED_AT_ONCE = 4  # pieces of packed weights that are on the device a second time
_PIECE_BYTES = 1 << 26  # of packed weights, read and sorted at a time
Progress = Callable[[int, int], None]
Sizes = tuple[int, ...]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
LEAVES = {"gamma": "weight", "beta": "bias"}  # how the first files of bert call them


@dataclass(frozen=True, slots=True)
class Transform:
    """How a format keeps a tensor otherwise: the shape there, given ours, and how its values become ours."""

    shape: Callable[[Sizes], Sizes] = lambda ours: ours
    values: Callable[[Tensor], Tensor] = lambda stored: stored


TRANSPOSED = Transform(shape=lambda ours: ours[::-1], values=torch.t)  # a matrix as [in, out]
PLUS_ONE = Transform(values=lambda stored: stored + 1)  # a norm's weight as its distance from 1
MINUS_EXP = Transform(values=lambda stored: -stored.exp())  # a rate of decay as its logarithm
COLUMN = Transform(shape=lambda ours: (*ours, 1))  # a vector as a matrix of one column
FLAT = Transform(shape=lambda ours: (math.prod(ours),))  # rows one after the other
CHANNELS = Transform(shape=lambda ours: (ours[0], 1, *ours[1:]))  # a convolution of each channel alone
_AS_IT_IS = Transform()


class Weights:
    """What `blocks.py` takes its tensors from."""

    _packed = False  # whether matrices stay in the file's type
    _tiles: TileReader | None = None  # what packs them into tiles, where they are

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Mapping[str, str],
        dtype: torch.dtype,
        device: torch.device,
        transforms: Mapping[str, Transform] | None = None,
        spell: Callable[[str], str] = str,
        *,
        packed: bool = False,
        tiles: Activations | None = None,
        allocate: Allocate = empty,
    ) -> None:
        """`names` maps our names to the file's; `transforms` maps our names (without the layer) to a change on read;
        `spell` says how the file would call one of our names, for messages. `packed`: matrices stay in the file's
        type where kernels multiply it. `tiles`: they go into tiles, to be multiplied with such activations.
        `allocate`: where the memory of all others comes from, an arena or what measures one."""
        self._checkpoint = checkpoint
        self._names = names
        self.dtype = dtype
        self.device = device
        self._transforms = transforms or {}
        self._spell = spell
        self._taken: set[str] = set()
        self._packed = packed
        self._allocate = allocate
        self._tiles = None if tiles is None else TileReader(checkpoint, wide=tiles == "wide")
        self._jobs: list[tuple[str, Tensor]] = []
        self._packing: list[_Packing] = []
        self._uploads = Uploads(device)
        self._sorting = threading.Semaphore(SORTED_AT_ONCE)

    def has(self, name: str) -> bool:
        return name in self._names

    def rows(self, name: str) -> int:
        """The outermost size of a tensor."""
        return self._checkpoint.tensors[self._names[name]].shape[0]

    def take(self, name: str, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor of exactly this shape; its values are there after `fill`. In the model's dtype unless said."""
        return self.take_stacked([name], [shape], dtype=dtype).view(*shape)

    def take_stacked(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Several tensors on top of each other, along their rows, in one piece of memory [sum of rows, ...]."""
        rows = sum(shape[0] for shape in shapes)
        self.check(names, shapes)
        out = self._allocate((rows, *shapes[0][1:]), dtype or self.dtype, self.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            self._jobs.append((name, out[start : start + shape[0]]))
            start += shape[0]
        return out

    def take_matrix(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Weight:
        """Matrices on top of each other, for products: in tiles, one part for each; packed as in the file where that
        can be, one part for each run of one type; else dense."""
        if self._tiles is not None:
            self.check(names, shapes)
            tiles = [self._tiled(self._tiles, name, *shape) for name, shape in zip(names, shapes, strict=True)]
            return tiles[0] if len(tiles) == 1 else Stack(tuple(tiles))
        if not self._packed:
            return self.take_stacked(names, shapes)
        self.check(names, shapes)
        parts: list[Packed | Tensor] = []
        for kept, run in groupby(zip(names, shapes, strict=True), key=lambda one: self._kept_as(one[0], one[1][-1])):
            some, sizes = zip(*run, strict=True)
            if isinstance(kept, torch.dtype):
                parts.append(self.take_stacked(some, sizes, dtype=kept))
                continue
            packed = laid_out(kept, *_total(sizes), self.device, self._allocate)
            parts.append(packed)
            self._packing.append(_Packing([[name] for name in some], 1, packed))
        return parts[0] if len(parts) == 1 else Stack(tuple(parts))

    def take_experts(self, parts: Sequence[Sequence[str]], n_experts: int, size: tuple[int, int]) -> Weight:
        """The matrices of all experts on top of each other, each of `size`; a part is one tensor for all of them, or
        one for each.

        Of several parts (gate and up) an expert's stand together where they are of one type: dense
        [n_experts, parts * rows, cols], or packed [n_experts * parts * rows, cols]. Parts of different types stay
        apart, each [n_experts * rows, cols], in a `Stack`.
        """
        rows, cols = size
        for names in parts:
            self.check_experts(names, n_experts, size)
        kept = [self._kept_experts(names, cols) for names in parts]
        if all(isinstance(one, torch.dtype) for one in kept):
            whole = self.empty(n_experts, len(parts) * rows, cols)
            for number, names in enumerate(parts):
                self._into_experts(names, whole[:, number * rows : (number + 1) * rows])
            return whole
        if len(set(kept)) == 1:
            return self._packed_experts(parts, n_experts, size, str(kept[0]))
        apart: list[Packed | Tensor] = []
        for names, one in zip(parts, kept, strict=True):
            if isinstance(one, str):
                apart.append(self._packed_experts([names], n_experts, size, one))
            else:
                plain = self._allocate((n_experts, rows, cols), one, self.device)
                self._into_experts(names, plain)
                apart.append(plain.flatten(0, 1))
        return Stack(tuple(apart))

    def check_experts(self, names: Sequence[str], n_experts: int, size: tuple[int, int]) -> None:
        """Refuse experts' tensors that the file lacks or has otherwise."""
        self.check(names, [(n_experts, *size)] if _has_all(names) else [size] * n_experts)

    def _packed_experts(
        self, parts: Sequence[Sequence[str]], n_experts: int, size: tuple[int, int], type: str
    ) -> Packed:
        packed = laid_out(type, n_experts * len(parts) * size[0], size[1], self.device, self._allocate)
        self._packing.append(_Packing(parts, n_experts, packed))
        return packed

    def _into_experts(self, names: Sequence[str], out: Tensor) -> None:
        """One tensor for all experts, or one for each, into memory [n_experts, rows, cols]."""
        if _has_all(names):
            self.take_into(names[0], out)
            return
        for name, part in zip(names, out, strict=True):
            self.take_into(name, part)

    def take_halves(self, name: str, rows: int, cols: int) -> Weight:
        """One tensor of the file that is two matrices, `rows` each, one above the other; in tiles they are two, because
        the second would begin inside of a tile."""
        if self._tiles is None:
            return self.take_matrix([name], [(2 * rows, cols)])
        self.check([name], [(2 * rows, cols)])
        stored = self._names[name]
        return Stack(tuple(self._tiles.matrix(stored, rows, cols, first=first) for first in (0, rows)))

    @property
    def in_tiles(self) -> bool:
        """Whether matrices go into tiles: experts are then one matrix each."""
        return self._tiles is not None

    def take_tiled_experts(self, names: Sequence[str], n_experts: int, size: tuple[int, int]) -> tuple[TileMatrix, ...]:
        """The same matrix of every expert in tiles: one tensor for all of them, or one for each."""
        assert self._tiles is not None
        self.check_experts(names, n_experts, size)
        if not _has_all(names):
            return tuple(self._tiled(self._tiles, one, *size) for one in names)
        stored = self._names[names[0]]
        return tuple(self._tiles.matrix(stored, *size, first=expert * size[0]) for expert in range(n_experts))

    def take_into(self, name: str, out: Tensor) -> None:
        """One tensor into memory that somebody laid out, a view of it included."""
        self.check([name], [out.shape])
        self._jobs.append((name, out))

    def empty(self, *shape: int) -> Tensor:
        """Memory for `take_into`, where these weights live."""
        return self._allocate(shape, self.dtype, self.device)

    def pass_over(self, name: str) -> None:
        """Count a tensor as used that was read elsewhere (rope factors) or is the embedding once more."""
        self._taken.add(name)

    def fill(self, progress: Progress | None = None) -> None:
        """Refuse what nobody took, then read everything that was taken."""
        self._refuse_unused()
        pieces = [
            *(TilePiece(self._n_bytes(name), partial(self._read, name, out)) for name, out in self._jobs),
            *(TilePiece(sum(map(self._n_bytes, job.names)), partial(self._read_packed, job)) for job in self._packing),
        ]
        # The largest first, so that no thread is left with one big tensor at the end; tiles in the order of the file.
        pieces.sort(key=lambda piece: -piece.n_bytes)
        pieces += [] if self._tiles is None else self._tiles.pieces()
        done, total = 0, sum(piece.n_bytes for piece in pieces)
        with ThreadPoolExecutor(max_workers=self._n_threads) as pool:
            reading = {pool.submit(piece.read): piece for piece in pieces}
            try:
                for ready in as_completed(reading):
                    ready.result()
                    done += reading[ready].n_bytes
                    if progress is not None:
                        progress(done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # the rest need not be read any more
                raise
        self._packing.clear()
        self._jobs.clear()
        self._uploads.close()

    @property
    def _n_threads(self) -> int:
        """One for each core that torch uses; to a device, as many as fill the bus."""
        cores = torch.get_num_threads()
        return cores if self.device.type == "cpu" else max(cores, min(THREADS, os.cpu_count() or 1))

    def check(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Refuse names that the file lacks, or has in another shape; they count as used."""
        for name, shape in zip(names, shapes, strict=True):
            if name not in self._names:
                raise BadFile(f"{self._checkpoint.path}: the tensor {self._spell(name)} is missing; it is incomplete")
            found = self._checkpoint.tensors[self._names[name]]
            wanted = self._transform(name).shape(tuple(shape))
            if tuple(found.shape) != wanted:
                raise BadFile(
                    f"{self._checkpoint.path}: the tensor {found.name} has the shape {list(found.shape)}; "
                    f"this model needs {list(wanted)}"
                )
            if found.type in NOT_WEIGHTS:
                raise BadFile(
                    f"{self._checkpoint.path}: the tensor {found.name} holds {found.type}, which no weights are"
                )
            self._taken.add(name)

    def _transform(self, name: str) -> Transform:
        return self._transforms.get(without_layer(name), _AS_IT_IS)

    def _tiled(self, tiles: TileReader, name: str, rows: int, cols: int) -> TileMatrix:
        """One matrix in tiles; float32 where the format keeps it otherwise than we do."""
        transform = self._transform(name)
        if transform is _AS_IT_IS:
            return tiles.matrix(self._names[name], rows, cols)
        return tiles.changed(self._names[name], rows, cols, transform.values)

    def _read(self, name: str, out: Tensor) -> None:
        transform = self._transform(name)
        if transform is _AS_IT_IS and out.device.type == "cpu" and out.is_contiguous():
            self._checkpoint.read(self._names[name], array_of(out))
            return
        info = self._checkpoint.tensors[self._names[name]]
        if transform is _AS_IT_IS and out.is_contiguous() and holds_as_it_is(info.type, dtype_of(out.dtype)):
            self._uploads.put(self._checkpoint.raw(self._names[name]), out)
            return
        plain = torch.empty(tuple(info.shape), dtype=out.dtype)
        self._checkpoint.read(self._names[name], array_of(plain))
        values = transform.values(plain).reshape(out.shape)
        if out.device.type == "cpu" or not out.is_contiguous():
            out.copy_(values)
        else:
            self._uploads.put(values, out)

    def _kept_as(self, name: str, cols: int) -> str | torch.dtype:
        """The type that a matrix is kept in: its own where it can be, else the dtype it is dequantised to."""
        type = self._checkpoint.tensors[self._names[name]].type
        if self._transform(name) is _AS_IT_IS and stays_packed(type, (1, cols)):
            return type
        return torch.float16 if type == "F16" else self.dtype

    def _kept_experts(self, names: Sequence[str], cols: int) -> str | torch.dtype:
        """What all experts are kept as: their packed type where it is the same one, else the model's dtype."""
        kept = {self._kept_as(name, cols) for name in names} if self._packed else {self.dtype}
        only = kept.pop()
        return only if not kept and isinstance(only, str) else self.dtype

    def _read_packed(self, job: _Packing) -> None:
        """Piece by piece: what is read is on the device a second time, and experts are many."""
        n, packed = job.n_experts, job.packed
        blocks = [[raw.reshape(n // len(part), -1, raw.shape[-1]) for raw in self._raw(part)] for part in job.parts]
        of_expert = [[matrix for raw in part for matrix in raw] for part in blocks]
        rows = packed.rows // n
        few = packed.run // gcd(packed.run, rows)  # experts that are whole runs of rows
        at_once = few * max(_PIECE_BYTES // (few * rows * blocks[0][0].shape[-1]), 1)
        for start in range(0, n, at_once):
            some = range(start, min(start + at_once, n))
            with self._sorting:
                put(packed, self._uploaded([part[expert] for expert in some for part in of_expert]), start * rows)

    def _uploaded(self, raw: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Rows of packed bytes, one piece after the other, on the device."""
        whole = empty((sum(len(piece) for piece in raw), raw[0].shape[-1]), torch.uint8, self.device)
        at = 0
        for piece in raw:
            self._uploads.put(piece, whole[at : at + len(piece)])
            at += len(piece)
        return whole

    def _raw(self, names: Sequence[str]) -> list[NDArray[np.uint8]]:
        return [self._checkpoint.raw(self._names[name]) for name in names]

    def _n_bytes(self, name: str) -> int:
        return self._checkpoint.tensors[self._names[name]].n_bytes

    def _refuse_unused(self) -> None:
        unused = sorted(self._names[name] for name in self._names.keys() - self._taken)
        if unused:
            shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
            raise BadFile(
                f"{self._checkpoint.path}: it holds {len(unused)} tensors that this model has no use for: {shown}; "
                "running without them would give other answers than the model's"
            )


@dataclass(frozen=True, slots=True)
class _Packing:
    """A packed matrix to be read: for each expert (or once, where it is none) the rows of every part."""

    parts: Sequence[Sequence[str]]  # of each, the one tensor, or one for each expert
    n_experts: int
    packed: Packed

    @property
    def names(self) -> list[str]:
        return [name for part in self.parts for name in part]


def stays_packed(type: str, shape: Sequence[int]) -> bool:
    """Whether a GPU's kernels multiply a tensor of this type and shape as the file has it: a matrix, or the experts'
    matrices in one tensor of three dimensions."""
    return type in PACKED_TYPES and len(shape) in (2, 3) and shape[-1] % BLOCKS[type].elements == 0


def _has_all(names: Sequence[str]) -> bool:
    """Whether one tensor has all experts; else there is one for each."""
    return "_exps." in names[0]


def _total(sizes: Sequence[Sequence[int]]) -> tuple[int, int]:
    return sum(size[0] for size in sizes), sizes[0][-1]


def without_layer(name: str) -> str:
    return re.sub(r"^blk\.\d+\.", "", name)


def translate(
    tensors: Iterable[str], table: Mapping[str, str], ignored: re.Pattern[str] | None = None
) -> dict[str, str]:
    """Our names to the file's, by a table of the file's names in which `*` stands for a number.

    The table holds whole names (`...mixer.A_log`), or names without their last part, which then stays as it is.
    A name the table lacks stays as it is, to be refused by `fill`; what `ignored` matches holds no weights.

    >>> translate(["model.layers.3.mlp.up_proj.weight"], {"model.layers.*.mlp.up_proj": "blk.*.ffn_up"})
    {'blk.3.ffn_up.weight': 'model.layers.3.mlp.up_proj.weight'}
    """
    ours = {}
    for name in tensors:
        if ignored is not None and ignored.fullmatch(name):
            continue
        stem, _, leaf = name.rpartition(".")
        target = table.get(_starred(name))
        if target is None and (target := table.get(_starred(stem))) is not None:
            target = f"{target}.{LEAVES.get(leaf, leaf)}"
        ours[name if target is None else _numbered(target, name)] = name
    return ours


def spelled(table: Mapping[str, str], name: str) -> str:
    """How a file with these names would call one of ours; our own name where it has none for it.

    >>> spelled({"model.layers.*.mlp.up_proj": "blk.*.ffn_up"}, "blk.3.ffn_up.weight")
    'model.layers.3.mlp.up_proj.weight'
    """
    stem, _, leaf = name.rpartition(".")
    theirs = {ours: their for their, ours in list(table.items())[::-1]}
    if (whole := theirs.get(_starred(name))) is not None:
        return _numbered(whole, name)
    found = theirs.get(_starred(stem))
    return name if found is None else _numbered(f"{found}.{leaf}", name)


def _starred(name: str) -> str:
    return _NUMBER.sub("*", name)


def _numbered(target: str, name: str) -> str:
    """The numbers of a name in the places that a target has for them."""
    for number in _NUMBER.findall(name):
        target = target.replace("*", number, 1)
    return target
