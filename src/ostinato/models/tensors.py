"""References to the tensors of a file, by one set of names, and the table that finds and checks them.

The names are those of GGUF (`blk.3.attn_q.weight`); a safetensors folder's are translated by its family. Blocks are
made over references, so all that a model takes is known before a byte is read: `TensorTable.check` refuses a file with
a missing or misshapen tensor, or with one that no block takes. A backend then replaces each reference by what it loads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ostinato.errors import BadFile, first_few
from ostinato.files.checkpoint import rounded
from ostinato.files.quants import BLOCKS

if TYPE_CHECKING:
    from ostinato.files.checkpoint import Checkpoint, TensorInfo

NOT_WEIGHTS: Final = frozenset({"I8", "I16", "I32", "I64", "BOOL", "U8", "U16", "U32", "U64"})
QUANTISED: Final = frozenset(type for type, block in BLOCKS.items() if block.elements > 1)
LEAVES: Final = {"gamma": "weight", "beta": "bias"}  # how the first files of bert call them
_EXPERTS: Final = re.compile(r"(blk\.\d+\.)ffn_(gate|up|down)_exps\.(weight|bias)")
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")
Sizes = tuple[int, ...]
Wanted = Iterator[tuple[str, Sizes]]  # names, and the shape that each must have


@dataclass(frozen=True, slots=True)
class StackedTensors:
    """Tensors of a file on top of each other, along their rows. `exact`: float32, whatever the model's dtype. `zeros`:
    the first and the last of rows that no tensor has, the last not included."""

    names: tuple[str, ...]
    shapes: tuple[Sizes, ...]
    exact: bool = False
    zeros: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> Sizes:
        return sum(shape[0] for shape in self.shapes) + self.zeros[1] - self.zeros[0], *self.shapes[0][1:]

    @property
    def placed(self) -> Iterator[tuple[str, int, int]]:
        """Each tensor, and the first and the last of its rows, the last not included."""
        start, (first, stop) = 0, self.zeros
        for name, shape in self.wanted:
            start = stop if start == first else start
            yield name, start, start + shape[0]
            start += shape[0]

    @property
    def wanted(self) -> Wanted:
        return zip(self.names, self.shapes, strict=True)


@dataclass(frozen=True, slots=True)
class Matrices(StackedTensors):
    """The same for what is multiplied with: every backend keeps matrices its own way. `halves`: one tensor that is two
    matrices, one above the other."""

    halves: bool = False


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of all experts, each of `size`; a part (gate, up or down) is one tensor for all, or one for each.
    `halves`: one part that is two matrices, one above the other."""

    parts: tuple[tuple[str, ...], ...]
    n_experts: int
    size: tuple[int, int]
    halves: bool = False

    @property
    def shape(self) -> Sizes:
        return self.n_experts, len(self.parts) * self.size[0], self.size[1]

    @property
    def wanted(self) -> Wanted:
        for names in self.parts:
            shape = (self.n_experts, *self.size) if is_whole(names) else self.size
            yield from ((name, shape) for name in names)


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """A vector of `width` for each expert, float32; parts (gate and up) stand side by side."""

    names: tuple[str, ...]  # of each part, one tensor for all experts
    n_experts: int
    width: int

    @property
    def shape(self) -> Sizes:
        return self.n_experts, len(self.names) * self.width

    @property
    def wanted(self) -> Wanted:
        return ((name, (self.n_experts, self.width)) for name in self.names)


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """A matrix of `size` for each head: a tensor [heads, *size], or some rows of each head in a tensor that holds
    those of others too, [heads * rows, cols]; `swapped`: these are the matrices' columns."""

    name: str
    n_heads: int
    size: tuple[int, int]
    rows: tuple[int, int, int] | None = None  # first, stop, and how many a head has in all
    swapped: bool = False

    @property
    def shape(self) -> Sizes:
        return self.n_heads, *self.size

    @property
    def wanted(self) -> Wanted:
        if self.rows is None:
            yield self.name, self.shape
        else:
            yield self.name, (self.n_heads * self.rows[2], self.size[0 if self.swapped else 1])

    def of(self, stored: NDArray[Any]) -> NDArray[Any]:
        """The matrices [heads, *size] in the values of the tensor."""
        if self.rows is None:
            return stored.reshape(self.shape)
        first, stop, n_rows = self.rows
        own = stored.reshape(self.n_heads, n_rows, -1)[:, first:stop]
        return own.swapaxes(1, 2) if self.swapped else own


@dataclass(frozen=True, slots=True)
class Constant:
    """Numbers that no file has: each of `values`, as often as `sizes` says, in the model's dtype; float32 where
    `exact`."""

    sizes: Sizes
    values: tuple[float, ...]
    exact: bool = False

    @property
    def shape(self) -> Sizes:
        return (sum(self.sizes),)

    @property
    def wanted(self) -> Wanted:
        return iter(())


Reference: TypeAlias = StackedTensors | ExpertMatrices | ExpertBiases | HeadMatrices | Constant


def is_whole(names: tuple[str, ...]) -> bool:
    """Whether one tensor has all experts; else there is one for each."""
    return "_exps." in names[0]


@dataclass(frozen=True, slots=True)
class Transform:
    """How a format keeps a tensor otherwise: the shape there, given ours, and how its values, float32, become ours.

    `unless`: of the shape there and the width of embeddings, whether this file keeps it as we do. `rows`: of a matrix
    of so many rows, which of the file's each of ours is; it changes nothing else, so that quantised rows stay as they
    are. `quantised`: the transform in place of this one, where the file keeps blocks."""

    shape: Callable[[Sizes], Sizes] = lambda ours: ours
    values: Callable[[NDArray[np.float32]], NDArray[np.float32]] = lambda stored: stored
    unless: Callable[[Sizes, int], bool] | None = None
    rows: Callable[[int], NDArray[np.intp]] | None = None
    quantised: Transform | None = None


def _minus_exp(stored: NDArray[np.float32]) -> NDArray[np.float32]:
    return (-np.exp(stored.astype(np.float64))).astype(np.float32)


TRANSPOSED: Final = Transform(shape=lambda ours: ours[::-1], values=np.transpose)  # a matrix as [in, out]
PLUS_ONE: Final = Transform(values=lambda stored: stored + 1)  # a norm's weight as its distance from 1
MINUS_EXP: Final = Transform(values=_minus_exp)  # a rate of decay as its logarithm
# A matrix of one row as a vector, and the reverse; some files keep it as we do.
ROW: Final = Transform(shape=lambda ours: ours[1:], unless=lambda stored, _: len(stored) == 2)
IN_A_ROW: Final = Transform(shape=lambda ours: (1, *ours), unless=lambda stored, _: len(stored) == 1)
# All experts' matrices as [n, in, out].
SWAPPED: Final = Transform(lambda ours: (ours[0], ours[2], ours[1]), lambda stored: stored.swapaxes(1, 2))
COLUMN: Final = Transform(shape=lambda ours: (*ours, 1))  # a vector as a matrix of one column
FLAT: Final = Transform(shape=lambda ours: (math.prod(ours),))  # rows one after the other
CHANNELS: Final = Transform(shape=lambda ours: (ours[0], 1, *ours[1:]))  # a convolution of each channel alone
AS_IT_IS: Final = Transform()


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The tensors of a checkpoint by our names. `names` maps ours to the file's; `transforms` maps ours, without the
    layer, to a change on read; `spell` says how the file would call one of our names, for messages."""

    checkpoint: Checkpoint
    names: Mapping[str, str]
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    spell: Callable[[str], str] = str

    def has(self, name: str) -> bool:
        return name in self.names

    def rows(self, name: str) -> int:
        """The outermost size of a tensor."""
        return self.info(name).shape[0]

    def info(self, name: str) -> TensorInfo:
        """What the file says of a tensor, under its own name."""
        return self.checkpoint.tensors[self.names[name]]

    def is_as_stored(self, name: str) -> bool:
        """Whether the format keeps a tensor as we want it."""
        return self._transform(name) is AS_IT_IS

    def keeps_rows(self, name: str) -> bool:
        """Whether the format keeps the rows of a tensor as we want them, in whatever order."""
        return self.is_as_stored(name) or self._transform(name).rows is not None

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of the file, rows in our order."""
        if self.is_as_stored(name):
            return self.checkpoint.raw(self.names[name])
        return self.raw_rows(name, 0, math.prod(self.info(name).shape[:-1]))

    def raw_rows(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """Rows [first, last) of `raw`."""
        if self.is_as_stored(name):
            return self.checkpoint.raw_rows(self.names[name], first, last)
        theirs = self._stored_rows(name, first, last)
        begin = int(theirs.min())
        return self.checkpoint.raw_rows(self.names[name], begin, int(theirs.max()) + 1)[theirs - begin]

    def let_go(self, name: str, first: int, last: int) -> None:
        """Rows [first, last) of ours were read and are not needed in memory any more."""
        theirs = np.array([first, last - 1]) if self.is_as_stored(name) else self._stored_rows(name, first, last)
        self.checkpoint.let_go(self.names[name], int(theirs.min()), int(theirs.max()) + 1)

    def _stored_rows(self, name: str, first: int, last: int) -> NDArray[np.intp]:
        """The file's numbers of our rows [first, last), where it keeps them in another order."""
        order = self._transform(name).rows
        assert order is not None, f"the file does not keep the rows of {name} as we do"
        n = self.info(name).shape[-2]
        ours = np.arange(first, last)
        return ours // n * n + order(n)[ours % n]

    def values(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The values as we want them, in a new array; of the file's shape, or as the transform leaves it."""
        as_stored = self.is_as_stored(name)
        out = np.empty(self.info(name).shape, dtype if as_stored else np.float32)
        self.checkpoint.read(self.names[name], out)
        if (order := self._transform(name).rows) is not None:
            out = out[..., order(out.shape[-2]), :]
        return out if as_stored else np.ascontiguousarray(rounded(self._transform(name).values(out), dtype))

    def check(self, references: Iterable[Reference], spare: Iterable[str] = ()) -> None:
        """Refuse a file that lacks a tensor, has it in another shape, or has one that no block takes; `spare` names
        are allowed."""
        taken = set(spare)
        for reference in references:
            for name, shape in reference.wanted:
                self._check_one(name, shape)
                taken.add(name)
        unused = sorted(self.names[name] for name in self.names.keys() - taken)
        if unused:
            raise BadFile(
                f"{self.checkpoint.path}: it holds {len(unused)} tensors that this model has no use for: "
                f"{first_few(unused)}; running without them would give other answers than the model's"
            )

    def _check_one(self, name: str, shape: Sizes) -> None:
        path = self.checkpoint.path
        if name not in self.names:
            raise BadFile(f"{path}: the tensor {self.spell(name)} is missing; it is incomplete")
        found, wanted = self.info(name), self._transform(name).shape(shape)
        if tuple(found.shape) != wanted:
            raise BadFile(
                f"{path}: the tensor {found.name} has the shape {list(found.shape)}; this model needs {list(wanted)}"
            )
        if found.type in NOT_WEIGHTS:
            raise BadFile(f"{path}: the tensor {found.name} holds {found.type}, which no weights are")

    def _transform(self, name: str) -> Transform:
        found = self.transforms.get(without_layer(name), AS_IT_IS)
        if found.quantised is not None and self.info(name).type in QUANTISED:
            return found.quantised
        if found.unless is not None and found.unless(self.info(name).shape, self.info("token_embd.weight").shape[-1]):
            return AS_IT_IS
        return found


def without_layer(name: str) -> str:
    return re.sub(r"^blk\.\d+\.", "", name)


def translate(
    tensors: Iterable[str], table: Mapping[str, str], ignored: re.Pattern[str] | None = None
) -> dict[str, str]:
    """Our names to the file's, by a table of the file's names in which `*` stands for a number.

    The table holds whole names (`...mixer.A_log`), or names without their last part, which then stays as it is.
    A name the table lacks stays as it is, and `TensorTable.check` refuses it; what `ignored` matches holds no weights.

    >>> translate(["model.layers.3.mlp.up_proj.weight"], {"model.layers.*.mlp.up_proj": "blk.*.ffn_up"})
    {'blk.3.ffn_up.weight': 'model.layers.3.mlp.up_proj.weight'}
    """
    ours = {}
    for name in tensors:
        if ignored is not None and ignored.fullmatch(name):
            continue
        stem, _, leaf = name.rpartition(".")
        target = table.get(starred(name))
        if target is None and (target := table.get(starred(stem))) is not None:
            target = f"{target}.{LEAVES.get(leaf, leaf)}"
        ours[name if target is None else _numbered(target, name)] = name
    return ours


def spelled(table: Mapping[str, str], name: str) -> str:
    """How a file with these names, the nearest first, would call one of ours; our own name where it has none for it.

    >>> spelled({"model.layers.*.mlp.up_proj": "blk.*.ffn_up"}, "blk.3.ffn_up.weight")
    'model.layers.3.mlp.up_proj.weight'
    """
    forms = {starred(stem): (form, leaf) for form in _forms(name) for stem, leaf in ((form, ""), _stem_and_leaf(form))}
    found = next((theirs for theirs, ours in table.items() if ours in forms), None)
    if found is None:
        return name
    form, leaf = forms[table[found]]
    return _numbered(found + leaf, form)


def _stem_and_leaf(name: str) -> tuple[str, str]:
    stem, dot, leaf = name.rpartition(".")
    return stem, dot + leaf


def _forms(name: str) -> tuple[str, ...]:
    """The name, and of experts' matrices the other names under which files keep them: one tensor for all experts, in
    which gate and up may be one, or a tensor for each."""
    found = _EXPERTS.fullmatch(name)
    if found is None:
        return (name,)
    at, part, leaf = found.groups()
    both = part if part == "down" else "gate_up"
    return name, f"{at}ffn_{both}_exps.{leaf}", f"{at}ffn_{part}.0.{leaf}"


def stem_of(name: str) -> str:
    """A tensor's name without its last part, `*` for its numbers, as a table of names has it.

    >>> stem_of("model.layers.3.mlp.up_proj.weight")
    'model.layers.*.mlp.up_proj'
    """
    return starred(name.rpartition(".")[0] or name)


def starred(name: str) -> str:
    """A tensor's name with `*` for its numbers."""
    return _NUMBER.sub("*", name)


def _numbered(target: str, name: str) -> str:
    """The numbers of a name in the places that a target has for them."""
    for number in _NUMBER.findall(name):
        target = target.replace("*", number, 1)
    return target
