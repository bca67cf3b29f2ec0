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
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ostinato.errors import BadFile
from ostinato.files.quants import BLOCKS
from ostinato.kernels.allocate import empty
from ostinato.kernels.packed import PACKED_TYPES, Packed, Stack, Weight, pack
from ostinato.models.tile_weights import Piece, TileReader
from ostinato.options import Activations

if TYPE_CHECKING:
    from ostinato.files.checkpoint import Checkpoint
    from ostinato.kernels.tiles import TileMatrix

NOT_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "BOOL", "U8", "U16", "U32", "U64"})
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
    ) -> None:
        """`names` maps our names to the file's; `transforms` maps our names (without the layer) to a change on read;
        `spell` says how the file would call one of our names, for messages. `packed`: matrices stay in the file's
        type where kernels multiply it. `tiles`: they go into tiles, to be multiplied with such activations."""
        self._checkpoint = checkpoint
        self._names = names
        self.dtype = dtype
        self.device = device
        self._transforms = transforms or {}
        self._spell = spell
        self._taken: set[str] = set()
        self._packed = packed
        self._tiles = None if tiles is None else TileReader(checkpoint, wide=tiles == "wide")
        self._jobs: list[tuple[str, Tensor]] = []
        self._packing: list[tuple[Sequence[str], Packed]] = []

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
        out = empty((rows, *shapes[0][1:]), dtype or self.dtype, self.device)
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
            like = pack(kept, self._empty_blocks(kept, sum(size[0] for size in sizes), sizes[0][-1]), *_total(sizes))
            planes = tuple(empty(plane.shape, torch.uint8, self.device) for plane in like.planes if plane is not None)
            packed = replace(like, planes=planes)
            parts.append(packed)
            self._packing.append((some, packed))
        return parts[0] if len(parts) == 1 else Stack(tuple(parts))

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

    def take_experts(self, name: str, n_experts: int, shape: tuple[int, int]) -> tuple[TileMatrix, ...]:
        """The same matrix of every expert in tiles: one tensor for all of them (`{name}_exps`), or one for each."""
        assert self._tiles is not None
        whole = f"{name}_exps.weight"
        if not self.has(whole):
            each = [f"{name}.{expert}.weight" for expert in range(n_experts)]
            self.check(each, [shape] * n_experts)
            return tuple(self._tiled(self._tiles, one, *shape) for one in each)
        self.check([whole], [(n_experts, *shape)])
        return tuple(
            self._tiles.matrix(self._names[whole], *shape, first=expert * shape[0]) for expert in range(n_experts)
        )

    def take_into(self, name: str, out: Tensor) -> None:
        """One tensor into memory that somebody laid out, a view of it included."""
        self.check([name], [out.shape])
        self._jobs.append((name, out))

    def empty(self, *shape: int) -> Tensor:
        """Memory for `take_into`, where these weights live."""
        return empty(shape, self.dtype, self.device)

    def pass_over(self, name: str) -> None:
        """Count a tensor as used that was read elsewhere (rope factors) or is the embedding once more."""
        self._taken.add(name)

    def fill(self, progress: Progress | None = None) -> None:
        """Refuse what nobody took, then read everything that was taken."""
        self._refuse_unused()
        whole = [Piece(self._n_bytes(name), partial(self._read, name, out)) for name, out in self._jobs]
        # The largest first, so that no thread is left with one big tensor at the end; tiles in the order of the file.
        pieces = sorted(whole, key=lambda piece: -piece.n_bytes)
        pieces += [] if self._tiles is None else self._tiles.pieces()
        done, total = 0, sum(piece.n_bytes for piece in pieces)
        total += sum(self._n_bytes(name) for names, _ in self._packing for name in names)
        for names, packed in self._packing:
            self._read_packed(names, packed)
            done += sum(self._n_bytes(name) for name in names)
            if progress is not None:
                progress(done, total)
        self._packing.clear()
        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
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
        self._jobs.clear()

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
            self._checkpoint.read(self._names[name], out)
            return
        plain = torch.empty(tuple(self._checkpoint.tensors[self._names[name]].shape), dtype=out.dtype)
        self._checkpoint.read(self._names[name], plain)
        out.copy_(transform.values(plain).reshape(out.shape))

    def _kept_as(self, name: str, cols: int) -> str | torch.dtype:
        """The type that a matrix is kept in: its own where it can be, else the dtype it is dequantised to."""
        type = self._checkpoint.tensors[self._names[name]].type
        if self._transform(name) is _AS_IT_IS and stays_packed(type, (1, cols)):
            return type
        return torch.float16 if type == "F16" else self.dtype

    def _empty_blocks(self, type: str, rows: int, cols: int) -> Tensor:
        """The blocks of a matrix without their bytes: what its planes are measured by."""
        block = BLOCKS[type]
        return torch.empty((rows, cols // block.elements * block.n_bytes), dtype=torch.uint8, device="meta")

    def _read_packed(self, names: Sequence[str], packed: Packed) -> None:
        raw = [torch.from_numpy(np.array(self._checkpoint.raw(self._names[name]))) for name in names]
        made = pack(packed.type, torch.cat(raw).to(self.device), packed.rows, packed.cols)
        for kept, plane in zip(packed.planes, made.planes, strict=True):
            if kept is not None and plane is not None:
                kept.copy_(plane)

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


def stays_packed(type: str, shape: Sequence[int]) -> bool:
    """Whether a GPU's kernels multiply a tensor of this type and shape as the file has it; experts, one tensor of three
    dimensions, are dequantised when they are read."""
    return type in PACKED_TYPES and len(shape) == 2 and shape[-1] % BLOCKS[type].elements == 0


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
