"""Models of named shapes with random weights: what a step costs can be measured without a file.

Weights are made on the device, each tensor from the seed and its own name, so that they do not depend on the order in
which they are asked for. Matrices are scaled so that a row keeps its size through a product; the logits are
in a range that a sampler can handle, without meaning.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from ostinato.backends.cuda.packed import PACKED_TYPES, Packed, pack
from ostinato.backends.native.tiles import TileMatrix, empty_tiles, fill_tiles
from ostinato.backends.torch.allocate import empty
from ostinato.backends.torch.load import constant
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.weight import Weight
from ostinato.backends.weights import Stack
from ostinato.errors import InternalError
from ostinato.files.checkpoint import TensorInfo
from ostinato.files.quants import BLOCKS
from ostinato.models.blocks import leaves_of, with_leaves
from ostinato.models.family import Family
from ostinato.models.named_shapes import named_shape
from ostinato.models.registry import family_named
from ostinato.models.shape import Shape
from ostinato.models.tensors import Constant, ExpertMatrices, Matrices, Reference, Sizes, StackedTensors
from ostinato.options import Activations

# What weights can be made as, by the words of the command line: plain numbers, or packed as a file of that type.
DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
)
_TYPES: Final = {dtype: name.upper() for name, dtype in DTYPES.items()}
MIXES: Final = ("q4_k_m", *(type.lower() for type in PACKED_TYPES))
# What a type becomes where rows are no whole blocks of 256, as in files that llama.cpp makes.
_SMALLER_BLOCKS: Final = MappingProxyType({"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"})


def kept_as(mix: str, name: str, cols: int, shape: Shape) -> str:
    """The packed type of a matrix in a file of that mix, as llama.cpp's quantisation chooses it.

    >>> kept_as("q4_k_m", "blk.0.attn_v.weight", 2048, named_shape("llama-1b"))
    'Q6_K'
    """
    type = _mixed(name, shape) if mix == "q4_k_m" else mix.upper()
    return type if cols % BLOCKS[type].elements == 0 else _SMALLER_BLOCKS[type]


def _mixed(name: str, shape: Shape) -> str:
    """q4_k_m: six bits for the head, and for the values and the way down in the layers that need them most.

    Beside eight experts attention is small, and gets more.
    """
    if name == ("token_embd.weight" if shape.tied_head else "output.weight"):
        return "Q6_K"
    if shape.experts is not None and shape.experts.n_experts == 8:
        if name.endswith(("attn_k.weight", "attn_v.weight")):
            return "Q8_0"
        if name.endswith("attn_output.weight"):
            return "Q5_K"
    if not name.endswith(("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")):
        return "Q4_K"
    layer, eighth = int(name.split(".")[1]), shape.n_layers // 8
    ends = layer < eighth or layer >= 7 * shape.n_layers // 8
    return "Q6_K" if ends or (layer - eighth) % 3 == 2 else "Q4_K"


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How random blocks of a type get usable values: bytes [n, n_bytes] are random except the scales.

    A value is d * scale * (q - middle); `spread` is the standard deviation of q. `fixed` are bytes at an offset, `d_at`
    and `m_at` where the float16 of d and, for types with minima, of the middle are.
    """

    spread: float
    scale: int
    d_at: int
    m_at: int | None = None
    m: float = 0.0  # in units of d
    fixed: tuple[int, tuple[int, ...]] = (0, ())


# Scales and minima of a K block, all of them 4, as six-bit numbers.
_FOURS: Final = (4, (4,) * 8 + (0x44,) * 4)
_RECIPES: Final[Mapping[str, _Recipe]] = MappingProxyType(
    {
        "Q4_0": _Recipe(spread=4.61, scale=1, d_at=0),
        "Q4_1": _Recipe(spread=4.61, scale=1, d_at=0, m_at=2, m=-7.5),
        "Q5_0": _Recipe(spread=9.23, scale=1, d_at=0),
        "Q5_1": _Recipe(spread=9.23, scale=1, d_at=0, m_at=2, m=-15.5),
        "Q8_0": _Recipe(spread=73.9, scale=1, d_at=0),
        "Q4_K": _Recipe(spread=4.61, scale=4, d_at=0, m_at=2, m=7.5, fixed=_FOURS),
        "Q5_K": _Recipe(spread=9.23, scale=4, d_at=0, m_at=2, m=15.5, fixed=_FOURS),
        "Q6_K": _Recipe(spread=18.5, scale=4, d_at=208, fixed=(192, (4,) * 16)),
    }
)


def random_blocks(type: str, rows: int, cols: int, random: torch.Generator) -> Tensor:
    """A matrix of that type as a file has it, uint8 [rows, row_bytes], its values of deviation 1 / sqrt(cols)."""
    block, recipe = BLOCKS[type], _RECIPES[type]
    n_blocks, device = cols // block.elements, random.device
    blocks = empty((rows * n_blocks, block.n_bytes), torch.uint8, device)
    blocks.random_(0, 256, generator=random)
    offset, values = recipe.fixed
    blocks[:, offset : offset + len(values)] = torch.tensor(values, dtype=torch.uint8, device=device)
    d = cols**-0.5 / (recipe.spread * recipe.scale)
    for at, value in ((recipe.d_at, d), (recipe.m_at, d * recipe.m)):
        if at is not None:
            blocks[:, at : at + 2] = torch.tensor([value], dtype=torch.float16, device=device).view(torch.uint8)
    return blocks.view(rows, n_blocks * block.n_bytes)


class AnyName:
    """The tensors of a file that has whatever a family asks for, but a bias of the head, which no shape states."""

    def has(self, name: str) -> bool:
        return name != "output.bias"

    def rows(self, name: str) -> int:
        raise InternalError(f"no shape says how many rows {name} has")


@dataclass(frozen=True, slots=True)
class RandomSpec:
    """How weights are made. `mix`: matrices are packed as in a file of that kind, and the rest is in `dtype`. `tiles`:
    matrices, of a mix or of `dtype`, are in the native loop's tiles, to be multiplied with such activations, and the
    rest is in float32."""

    shape: Shape
    dtype: torch.dtype
    mix: str | None = None
    tiles: Activations | None = None

    @property
    def rest(self) -> torch.dtype:
        return self.dtype if self.tiles is None else torch.float32

    def type_of(self, name: str, cols: int) -> str:
        """The type of a matrix. Routers are never packed: which experts are chosen must not turn on a rounding."""
        if self.mix is None or name.endswith("ffn_gate_inp.weight"):
            return _TYPES[self.dtype]
        return kept_as(self.mix, name, cols, self.shape)

    def number_type(self, reference: StackedTensors) -> str:
        """The type of what is no matrix."""
        return _TYPES[torch.float32 if reference.exact else self.rest]


class RandomLoader:
    """Makes a weight for each reference of blocks."""

    def __init__(self, kind: RandomSpec, device: torch.device, seed: int) -> None:
        self._kind, self._device, self._seed = kind, device, seed
        self._plain = _TYPES[kind.dtype]
        self._random = torch.Generator(device)

    def leaf(self, reference: Reference) -> Any:
        tiled = self._kind.tiles is not None
        match reference:
            case Constant():
                return constant(reference, self._kind.rest, self._device)
            case ExpertMatrices():
                return self._tiled_experts(reference) if tiled else self._experts(reference)
            case Matrices():
                return self._tiled(reference) if tiled else self._matrices(reference)
            case StackedTensors():
                dtype = torch.float32 if reference.exact else self._kind.rest
                return self._numbers(reference.names, reference.shapes, dtype)
        raise InternalError(f"{reference!r} is no reference to tensors")

    def _numbers(self, names: Sequence[str], shapes: Sequence[Sizes], dtype: torch.dtype) -> Tensor:
        rows = [shape[0] for shape in shapes]
        whole = empty((sum(rows), *shapes[0][1:]), dtype, self._device)
        for name, part in zip(names, torch.split(whole, rows), strict=True):
            middle, spread = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, part.shape[-1] ** -0.5)
            part.normal_(middle, spread, generator=self._seeded(name))
        return whole

    def _matrices(self, reference: Matrices) -> Weight:
        parts: list[Tensor | Packed] = []
        for type, run in groupby(reference.wanted, lambda one: self._kind.type_of(one[0], one[1][-1])):
            names, shapes = zip(*run, strict=True)
            if type == self._plain:
                parts.append(self._numbers(names, shapes, self._kind.dtype))
            else:
                parts.append(self._packed(type, [self._blocks(type, *one) for one in zip(names, shapes, strict=True)]))
        return parts[0] if len(parts) == 1 else Stack(tuple(parts))

    def _experts(self, reference: ExpertMatrices) -> Weight:
        n, (rows, cols) = reference.n_experts, reference.size
        types = [self._kind.type_of(names[0], cols) for names in reference.parts]
        if set(types) == {self._plain}:
            whole = empty(reference.shape, self._kind.dtype, self._device)
            for number, (name,) in enumerate(reference.parts):
                own = whole[:, number * rows : (number + 1) * rows]
                own.normal_(0.0, cols**-0.5, generator=self._seeded(name))
            return whole
        raws = [
            self._blocks(type, name, (n * rows, cols)).view(n, rows, -1)
            for type, (name,) in zip(types, reference.parts, strict=True)
        ]
        if len(set(types)) == 1:
            return self._packed(types[0], [torch.cat(raws, 1).flatten(0, 1)])
        return Stack(tuple(self._packed(type, [raw.flatten(0, 1)]) for type, raw in zip(types, raws, strict=True)))

    def _tiled(self, reference: Matrices) -> TileMatrix | Stack:
        tiles = [self._tiles_of(name, *shape) for name, shape in reference.wanted]
        return tiles[0] if len(tiles) == 1 else Stack(tuple(tiles))

    def _tiled_experts(self, reference: ExpertMatrices) -> tuple[TileMatrix | Stack, ...]:
        made = []
        for expert in range(reference.n_experts):
            own = tuple(self._tiles_of(f"{name}.{expert}", *reference.size) for (name,) in reference.parts)
            made.append(own[0] if len(own) == 1 else Stack(own))
        return tuple(made)

    def _tiles_of(self, name: str, rows: int, cols: int) -> TileMatrix:
        type = self._kind.type_of(name, cols)
        if type == self._plain:
            blocks = self._numbers([name], [(rows, cols)], self._kind.dtype).view(torch.uint8)
        else:
            blocks = self._blocks(type, name, (rows, cols))
        tiles = empty_tiles(type, rows, cols, wide=self._kind.tiles == "wide")
        fill_tiles(tiles, blocks.numpy(), 0)
        return tiles

    def _blocks(self, type: str, name: str, shape: Sizes) -> Tensor:
        return random_blocks(type, shape[0], shape[-1], self._seeded(name))

    def _packed(self, type: str, raws: Sequence[Tensor]) -> Packed:
        raw, block = torch.cat(list(raws)), BLOCKS[type]
        return pack(type, raw, len(raw), raw.shape[1] // block.n_bytes * block.elements)

    def _seeded(self, name: str) -> torch.Generator:
        # The CPU's generator looks at 32 bits of its seed: both must be in them.
        return self._random.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))


def random_tensors(shape: Shape, dtype: torch.dtype, mix: str | None = None) -> dict[str, TensorInfo]:
    """The tensors of such a model as a file's header would list them."""
    kind = RandomSpec(shape, dtype, mix)
    found: dict[str, TensorInfo] = {}
    for reference in leaves_of(family_named(shape.family).blocks(shape, AnyName())):
        for name, sizes in reference.wanted:
            numbers = isinstance(reference, StackedTensors) and not isinstance(reference, Matrices)
            type = kind.number_type(reference) if numbers else kind.type_of(name, sizes[-1])
            n_bytes = prod(sizes) // BLOCKS[type].elements * BLOCKS[type].n_bytes
            found[name] = TensorInfo(name, sizes, type, n_bytes)
    return found


def random_model(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    mix: str | None = None,
    tiles: Activations | None = None,
) -> Model:
    """A model of a named shape on `device`: its weights in `dtype`, or its matrices packed as a file of that mix; in
    the tiles of the CPU's native loop, where `tiles` says what they are multiplied with.

    The same seed gives the same weights on the same kind of device.
    """
    shape = named_shape(name)
    return random_model_of(family_named(shape.family), RandomSpec(shape, dtype, mix, tiles), device, seed)


def random_model_of(family: Family, kind: RandomSpec, device: torch.device, seed: int = 0) -> Model:
    """The same of any shape."""
    loader = RandomLoader(kind, device, seed)
    blocks = with_leaves(family.blocks(kind.shape, AnyName()), cache(loader.leaf))
    return Model.of(blocks, dtype=kind.rest, device=device, context=kind.shape.context)
