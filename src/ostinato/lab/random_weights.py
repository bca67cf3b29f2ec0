"""Models of named shapes with random weights: what a step costs can be measured without a file.

`RandomFile` takes the place of one: its header lists what a file of such a model would have, and the bytes of each
tensor come from the seed and the tensor's own name, so that they do not depend on the order in which they are read. Any
backend loads it as it loads a file. Matrices are scaled so that a row keeps its size through a product; the logits are
in a range that a sampler can handle, without meaning.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ostinato.backends.base import Settled
from ostinato.engine.load import load_blocks
from ostinato.errors import InternalError
from ostinato.files.checkpoint import BFLOAT16, Checkpoint, TensorInfo, rounded
from ostinato.files.quants import BLOCKS
from ostinato.files.unpack import Bytes
from ostinato.models.blocks import ModelBlocks, leaves_of
from ostinato.models.family import Family
from ostinato.models.named_shapes import named_shape
from ostinato.models.registry import family_named
from ostinato.models.shape import Shape
from ostinato.models.tensors import ExpertMatrices, HeadMatrices, Matrices, TensorTable

if TYPE_CHECKING:
    from ostinato.models.blocks import LoadedModel
    from ostinato.options import Activations

# What weights can be made as, by the words of the command line: plain numbers, or packed as a file of that type.
DTYPES: Final[Mapping[str, str]] = MappingProxyType({"f32": "float32", "f16": "float16", "bf16": "bfloat16"})
_NUMBERS: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
}
# What a type becomes where rows are no whole blocks of 256, as in files that llama.cpp makes; F16 where no block fits.
_SMALLER_BLOCKS: Final = MappingProxyType({"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"})
# At most so many blocks or numbers of a tensor are drawn; a larger one repeats them. They are primes, so that the rows
# of a matrix begin at different places of them and no two rows are equal.
_BLOCKS_MADE: Final = 131_071
_NUMBERS_MADE: Final = 8_388_593
_KEPT: Final = 8  # tensors whose bytes are held for further reads: a loader reads one piece by piece


def kept_as(mix: str, name: str, cols: int, shape: Shape) -> str:
    """The packed type of a matrix in a file of that mix, as llama.cpp's quantisation chooses it.

    >>> kept_as("q4_k_m", "blk.0.attn_v.weight", 2048, named_shape("llama-1b"))
    'Q6_K'
    >>> kept_as("q4_0", "blk.0.ssm_dt.weight", 48, named_shape("mamba-1.4b"))
    'F16'
    """
    type = _mixed(name, shape) if mix == "q4_k_m" else mix.upper()
    if type == "MXFP4" and shape.experts is not None and "_exps." not in name:
        type = "Q8_0"  # files of that type have it in their experts alone
    for kept in (type, _SMALLER_BLOCKS.get(type, type)):
        if cols % BLOCKS[kept].elements == 0:
            return kept
    return "F16"


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
    and `m_at` where the float16 of d and, for types with minima, of the middle are; `power_at` where d is an exponent
    of two.
    """

    spread: float
    scale: int = 1
    d_at: int | None = None
    m_at: int | None = None
    m: float = 0.0  # in units of d
    fixed: tuple[int, tuple[int, ...]] = (0, ())
    power_at: int | None = None


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
        "MXFP4": _Recipe(spread=2.93, power_at=0),
    }
)
MIXES: Final = ("q4_k_m", *(type.lower() for type in _RECIPES))


def random_bytes(n: int, random: np.random.Generator) -> Bytes:
    words = random.integers(0, 1 << 64, -(-n // 8), dtype=np.uint64)
    return words.view(np.uint8)[:n]


def random_blocks(type: str, rows: int, cols: int, random: np.random.Generator) -> Bytes:
    """A matrix of that type as a file has it, uint8 [rows, row_bytes], its values of deviation 1 / sqrt(cols)."""
    block, recipe = BLOCKS[type], _RECIPES[type]
    n = rows * cols // block.elements
    blocks = random_bytes(min(n, _BLOCKS_MADE) * block.n_bytes, random).reshape(-1, block.n_bytes)
    offset, values = recipe.fixed
    blocks[:, offset : offset + len(values)] = values
    d = cols**-0.5 / (recipe.spread * recipe.scale)
    for at, value in ((recipe.d_at, d), (recipe.m_at, d * recipe.m)):
        if at is not None:
            blocks[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    if recipe.power_at is not None:
        low = math.floor(math.log2(d))  # blocks of this power of two and of the next, so many that the squares agree
        share = (d**2 / 4**low - 1) / 3
        blocks[:, recipe.power_at] = 127 + low + (random.random(len(blocks)) < share)
    return np.resize(blocks, (n, block.n_bytes)).reshape(rows, -1)


def random_numbers(type: str, n: int, middle: float, spread: float, random: np.random.Generator) -> Bytes:
    """Normally distributed numbers as a file has them: each is one of 65,536 that are equally likely."""
    values = rounded((middle + spread * _quantiles()).astype(np.float32), _NUMBERS[type])
    made = values.take(random_bytes(2 * min(n, _NUMBERS_MADE), random).view(np.uint16), mode="clip")
    return np.resize(made, n).view(np.uint8)


@cache
def _quantiles() -> NDArray[np.float64]:
    normal, n = NormalDist(), 1 << 16
    return np.array([normal.inv_cdf((i + 0.5) / n) for i in range(n)])


class AnyName:
    """The tensors of a file that has whatever a family asks for, but a bias of the head, which no shape states, and
    what GGUF files of most families have in several tensors."""

    def has(self, name: str) -> bool:
        return name != "output.bias" and not any(one in name for one in ("ffn_gate_up_", ".ssm_in.", ".ssm_ba."))

    def rows(self, name: str) -> int:
        raise InternalError(f"no shape says how many rows {name} has")


class RandomFile(Checkpoint):
    """A checkpoint of a shape, its matrices of that type (`DTYPES`, `MIXES`) and the rest in float32."""

    format = "gguf"
    metadata: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, shape: Shape, type: str, seed: int = 0, family: Family | None = None) -> None:
        family = family or family_named(shape.family)
        self.shape, self.architecture = shape, family.name
        self._type, self._seed = type, seed
        self.blocks: ModelBlocks = family.blocks(shape, AnyName())
        self._lock = threading.Lock()
        self._kept: dict[str, _Made] = {}
        super().__init__(Path(f"random {type}"))
        self.tensors = {info.name: info for info in self._infos()}

    def _open(self) -> None:
        """There are no files to map."""

    def load(self, settled: Settled) -> LoadedModel:
        """The model with its weights in the settled layout."""
        table = TensorTable(self, {name: name for name in self.tensors})
        try:
            return load_blocks(self.blocks, table, replace(settled, context=self.shape.context, prompts="plain"))
        finally:
            self.close()

    def raw(self, name: str) -> Bytes:
        with self._lock:
            made = self._kept.pop(name, None) or _Made()
            self._kept[name] = made  # now the newest
            while len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        with made.lock:
            if made.data is None:
                made.data = self._make(name)
            return made.data

    def let_go(self, name: str, first: int, last: int) -> None:
        """Nothing to do: few tensors are held."""

    def fingerprint(self) -> str:
        raise InternalError("random weights have no content that a fingerprint could be of")

    def close(self) -> None:
        self._kept.clear()

    def _make(self, name: str) -> Bytes:
        info = self.tensors[name]
        rows, cols = prod(info.shape[:-1]), info.shape[-1]
        random = np.random.Generator(np.random.SFC64([zlib.crc32(name.encode()), self._seed]))
        if info.type not in _NUMBERS:
            return random_blocks(info.type, rows, cols, random)
        middle, spread = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, cols**-0.5)
        if name.endswith("ssm_a"):  # every state fades
            middle, spread = -1.0, 0.1
        return random_numbers(info.type, rows * cols, middle, spread, random).reshape(rows, -1)

    def _infos(self) -> Iterator[TensorInfo]:
        for reference in leaves_of(self.blocks):
            for name, sizes in reference.wanted:
                matrices = isinstance(reference, Matrices | ExpertMatrices | HeadMatrices)
                type = self._type_of(name, sizes[-1]) if matrices else "F32"
                yield TensorInfo(name, sizes, type, prod(sizes) // BLOCKS[type].elements * BLOCKS[type].n_bytes)

    def _type_of(self, name: str, cols: int) -> str:
        """The type of a matrix. Routers are never packed: which experts are chosen must not turn on a rounding."""
        if self._type in DTYPES:
            return self._type.upper()
        return (
            "F32"
            if name.endswith(("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight"))
            else kept_as(self._type, name, cols, self.shape)
        )


@dataclass(slots=True)
class _Made:
    """The bytes of a tensor; mutable, because the first thread that asks makes them."""

    data: Bytes | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def random_model(
    name: str, type: str, device: str, dtype: str | None = None, *, seed: int = 0, tiles: Activations | None = None
) -> LoadedModel:
    """A model of a named shape on `device`: its weights in `dtype`, by default the type's own, and packed where the
    type is; in the tiles of the CPU's native loop, where `tiles` says what they are multiplied with."""
    file = RandomFile(named_shape(name), type, seed)
    return file.load(settled_for(file.shape, type, device, dtype, tiles))


def settled_for(
    shape: Shape, type: str, device: str, dtype: str | None = None, tiles: Activations | None = None
) -> Settled:
    """How weights of a type are loaded for `random_model`."""
    dtype = dtype or DTYPES.get(type, "bfloat16")
    if tiles is not None:
        return Settled(
            device, "native", "loop", "float32", "f32", shape.context, weights="tiles", activations=tiles, threads=1
        )
    if type in DTYPES:
        return Settled(device, "torch", "eager", dtype, "f32", shape.context)
    return Settled(device, "cuda", "eager", dtype, "f32", shape.context, weights="packed")
