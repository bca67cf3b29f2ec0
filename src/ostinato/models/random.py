"""Models of known sizes with random weights: what a step costs can be measured without a file.

Weights are made on the device, each tensor from the seed and its own name, so that they do not depend on the order in
which blocks ask. Matrices are scaled so that a row keeps its size through a product; what comes out are numbers that
a sampler can live with, and no sense.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from ostinato.backends.allocate import empty
from ostinato.backends.cuda.packed import PACKED_TYPES, Packed, Stack, Weight, pack
from ostinato.backends.native.tiles import TileMatrix, empty_tiles, fill_tiles, tile_bytes
from ostinato.backends.torch.table import TWINS, Ops, ops_for
from ostinato.errors import UnknownName, listing
from ostinato.files.checkpoint import TensorInfo
from ostinato.files.quants import BLOCKS
from ostinato.models.blocks import Model
from ostinato.models.builder import Builder
from ostinato.models.llama import LLAMA
from ostinato.models.mixtral import MIXTRAL
from ostinato.models.qwen3 import QWEN3_MOE
from ostinato.models.rope import Rope
from ostinato.models.shape import ExpertShape, Shape, everywhere
from ostinato.models.tensors import tensors_in
from ostinato.models.weights import Weights
from ostinato.options import Activations


def _llama(
    *,
    hidden: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_width: int,
    ff_width: int,
    vocab: int,
    context: int,
    rope_base: float,
    tied_head: bool,
) -> Shape:
    rope = Rope(rope_base, head_width, "halves")
    return Shape(
        family="llama",
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_width=head_width,
        ff_width=ff_width,
        vocab=vocab,
        context=context,
        norm_eps=1e-5,
        ropes=everywhere(rope, n_layers),
        windows=everywhere(None, n_layers),
        query_scale=head_width**-0.5,
        tied_head=tied_head,
    )


# Small enough to answer at once, wide enough for whole blocks of 256 weights.
_TINY: Final = _llama(
    hidden=256,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_width=64,
    ff_width=512,
    vocab=1024,
    context=2048,
    rope_base=10_000.0,
    tied_head=True,
)
SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "llama-1b": _llama(
            hidden=2048,
            n_layers=16,
            n_heads=32,
            n_kv_heads=8,
            head_width=64,
            ff_width=8192,
            vocab=128_256,
            context=131_072,
            rope_base=500_000.0,
            tied_head=True,
        ),
        "llama-8b": _llama(
            hidden=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            head_width=128,
            ff_width=14_336,
            vocab=128_256,
            context=131_072,
            rope_base=500_000.0,
            tied_head=False,
        ),
        "smollm2-135m": _llama(
            hidden=576,
            n_layers=30,
            n_heads=9,
            n_kv_heads=3,
            head_width=64,
            ff_width=1536,
            vocab=49_152,
            context=8192,
            rope_base=100_000.0,
            tied_head=True,
        ),
        "mixtral-8x7b": replace(
            _llama(
                hidden=4096,
                n_layers=32,
                n_heads=32,
                n_kv_heads=8,
                head_width=128,
                ff_width=14_336,
                vocab=32_000,
                context=32_768,
                rope_base=1_000_000.0,
                tied_head=False,
            ),
            family="mixtral",
            experts=ExpertShape(8, 2, 14_336, renormalise=True),
        ),
        "qwen3-30b-a3b": replace(
            _llama(
                hidden=2048,
                n_layers=48,
                n_heads=32,
                n_kv_heads=4,
                head_width=128,
                ff_width=6144,
                vocab=151_936,
                context=40_960,
                rope_base=1_000_000.0,
                tied_head=False,
            ),
            family="qwen3moe",
            norm_eps=1e-6,
            experts=ExpertShape(128, 8, 768, renormalise=True),
        ),
        "tiny": _TINY,
        "tiny-mixtral": replace(_TINY, family="mixtral", experts=ExpertShape(4, 2, 512, renormalise=True)),
        "tiny-qwen3moe": replace(_TINY, family="qwen3moe", experts=ExpertShape(6, 3, 256, renormalise=False)),
    }
)
_FAMILIES: Final = MappingProxyType({"llama": LLAMA, "mixtral": MIXTRAL, "qwen3moe": QWEN3_MOE})

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

    >>> kept_as("q4_k_m", "blk.0.attn_v.weight", 2048, SHAPES["llama-1b"])
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
    """How random blocks of a type have sane values: bytes [n, n_bytes] are random but for what scales them.

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


class RandomWeights(Weights):
    """Weights that no file has: every tensor asked for is there, made when it is taken.

    `mix`: matrices are packed as in a file of that kind, and the rest is in `dtype`. `tiles`: matrices, of a mix or of
    `dtype`, are in the native loop's tiles, to be multiplied with such activations, and the rest is in float32.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        mix: str | None = None,
        tiles: Activations | None = None,
    ) -> None:
        self.dtype, self.device = dtype if tiles is None else torch.float32, device
        self._matrix_dtype, self._activations = dtype, tiles
        self._shape, self._seed, self._mix = shape, seed, mix
        self._allocate = empty
        self._random = torch.Generator(device)

    def has(self, name: str) -> bool:
        return name != "output.bias"  # which a file may have, and no shape asks for

    def take_stacked(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        rows = [shape[0] for shape in shapes]
        whole = empty((sum(rows), *shapes[0][1:]), dtype or self.dtype, self.device)
        for name, part in zip(names, torch.split(whole, rows), strict=True):
            self._seeded(name)
            middle, spread = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, part.shape[-1] ** -0.5)
            part.normal_(middle, spread, generator=self._random)
        return whole

    def take_matrix(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Weight:
        if self._activations is not None:
            tiles = [self._tiles_of(name, *shape) for name, shape in zip(names, shapes, strict=True)]
            return tiles[0] if len(tiles) == 1 else Stack(tuple(tiles))
        mix = self._mix
        if mix is None or _stays_plain(names):
            return self.take_stacked(names, shapes)
        cols = shapes[0][-1]
        parts = []
        for type, run in groupby(zip(names, shapes, strict=True), lambda one: kept_as(mix, one[0], cols, self._shape)):
            blocks = []
            for name, (rows, _) in run:
                self._seeded(name)
                blocks.append(random_blocks(type, rows, cols, self._random))
            raw = torch.cat(blocks)
            parts.append(pack(type, raw, len(raw), cols))
        return parts[0] if len(parts) == 1 else Stack(tuple(parts))

    def check(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        return

    def take_into(self, name: str, out: Tensor) -> None:
        self._seeded(name)
        out.normal_(0.0, out.shape[-1] ** -0.5, generator=self._random)

    def _kept_experts(self, names: Sequence[str], cols: int) -> str | torch.dtype:
        return self.dtype if self._mix is None else kept_as(self._mix, names[0], cols, self._shape)

    def _packed_experts(
        self, parts: Sequence[Sequence[str]], n_experts: int, size: tuple[int, int], type: str
    ) -> Packed:
        blocks = []
        for (name,) in parts:
            self._seeded(name)
            blocks.append(random_blocks(type, n_experts * size[0], size[1], self._random).view(n_experts, size[0], -1))
        raw = torch.cat(blocks, 1).flatten(0, 1)
        return pack(type, raw, len(raw), size[1])

    def pass_over(self, name: str) -> None:
        return

    @property
    def in_tiles(self) -> bool:
        return self._activations is not None

    def take_tiled_experts(self, names: Sequence[str], n_experts: int, size: tuple[int, int]) -> tuple[TileMatrix, ...]:
        return tuple(self._tiles_of(f"{names[0]}.{expert}", *size) for expert in range(n_experts))

    def _type_of(self, name: str, cols: int) -> str:
        """The type of a matrix in tiles."""
        if self._mix is None or _stays_plain([name]):
            return _TYPES[self._matrix_dtype]
        return kept_as(self._mix, name, cols, self._shape)

    def _tiles_of(self, name: str, rows: int, cols: int) -> TileMatrix:
        type = self._type_of(name, cols)
        if type == _TYPES[self._matrix_dtype]:
            blocks = self.take_stacked([name], [(rows, cols)], dtype=self._matrix_dtype).view(torch.uint8)
        else:
            self._seeded(name)
            blocks = random_blocks(type, rows, cols, self._random)
        tiles = empty_tiles(type, rows, cols, wide=self._activations == "wide")
        fill_tiles(tiles, blocks.numpy(), 0)
        return tiles

    def _seeded(self, name: str) -> None:
        # The CPU's generator looks at 32 bits of its seed: both must be in them.
        self._random.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))


def _stays_plain(names: Sequence[str]) -> bool:
    """Routers are never packed: which experts are chosen must not turn on a rounding."""
    return names[0].endswith("ffn_gate_inp.weight")


def named_shape(name: str) -> Shape:
    """The shape of that name; an unknown one is refused with the list of known ones."""
    if name not in SHAPES:
        raise UnknownName(f"no shape is called {name!r}; known: {listing(name, SHAPES)}")
    return SHAPES[name]


def weight_bytes(shape: Shape, dtype: torch.dtype, mix: str | None = None, tiles: Activations | None = None) -> int:
    """What the weights of such a model take; a tied head counts once."""
    counter = _Counter(shape, dtype, torch.device("meta"), mix, tiles)
    _built(shape, counter, TWINS)
    return counter.n_bytes


def random_tensors(shape: Shape, dtype: torch.dtype, mix: str | None = None) -> dict[str, TensorInfo]:
    """The tensors of such a model as a file's header would list them."""
    found = tensors_in(_built(shape, _Counter(shape, dtype, torch.device("meta"), None, None), TWINS))
    return found if mix is None else {name: _mixed_info(mix, tensor, shape) for name, tensor in found.items()}


def _mixed_info(mix: str, tensor: TensorInfo, shape: Shape) -> TensorInfo:
    if len(tensor.shape) < 2 or _stays_plain([tensor.name]):
        return tensor
    type = kept_as(mix, tensor.name, tensor.shape[-1], shape)
    return replace(tensor, type=type, n_bytes=tensor.n_elements // BLOCKS[type].elements * BLOCKS[type].n_bytes)


class _Counter(RandomWeights):
    """Makes nothing, on a device where nothing is, and counts."""

    n_bytes = 0

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, mix: str | None, tiles: Activations | None
    ) -> None:
        self.dtype, self.device = dtype if tiles is None else torch.float32, device
        self._shape, self._mix, self._matrix_dtype, self._activations = shape, mix, dtype, tiles

    def take_stacked(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        whole = empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype or self.dtype, self.device)
        self.n_bytes += whole.numel() * whole.element_size()
        return whole

    def take_matrix(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Weight:
        if self._activations is None and (self._mix is None or _stays_plain(names)):
            return self.take_stacked(names, shapes)
        for name, (rows, cols) in zip(names, shapes, strict=True):
            type = self._type_of(name, cols)
            block = BLOCKS[type]
            as_in_a_file = rows * cols // block.elements * block.n_bytes
            self.n_bytes += as_in_a_file if self._activations is None else tile_bytes(type, rows, cols)
        return empty((1, 1), self.dtype, self.device)

    def take_tiled_experts(self, names: Sequence[str], n_experts: int, size: tuple[int, int]) -> tuple[TileMatrix, ...]:
        self.n_bytes += n_experts * tile_bytes(self._type_of(names[0], size[1]), *size)
        return ()

    def take_experts(self, parts: Sequence[Sequence[str]], n_experts: int, size: tuple[int, int]) -> Weight:
        return self.take_matrix(
            [name for part in parts for name in part], [(n_experts * size[0], size[1])] * len(parts)
        )


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
    weights = RandomWeights(shape, dtype, device, seed, mix, tiles)
    return _built(shape, weights, ops_for(device))


def _built(shape: Shape, weights: Weights, ops: Ops) -> Model:
    family = _FAMILIES[shape.family]
    return family.build(Builder(shape, weights, ops, shape.context), family.layer)
