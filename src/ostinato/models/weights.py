"""The weights of a checkpoint by one set of names, each used once or named in an error.

The names are those of GGUF (`blk.3.attn_q.weight`); a safetensors folder's are translated by its family. A block
*takes* what it needs: the shape is checked and the memory laid out at once, the bytes are read later, all
together and in parallel, by `fill`. So a file with a missing or misshapen tensor is refused before anything is
read, and no weight exists twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ostinato.errors import BadFile

if TYPE_CHECKING:
    from ostinato.files.checkpoint import Checkpoint

NOT_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "BOOL", "U8", "U16", "U32", "U64"})
Transform = Callable[[Tensor], Tensor]
Progress = Callable[[int, int], None]


class Weights:
    """What `blocks.py` takes its tensors from."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Mapping[str, str],
        dtype: torch.dtype,
        device: torch.device,
        transforms: Mapping[str, Transform] | None = None,
        spell: Callable[[str], str] = str,
    ) -> None:
        """`names` maps our names to the file's; `transforms` maps our names (without the layer) to a change on read;
        `spell` says how the file would call one of our names, for messages."""
        self._checkpoint = checkpoint
        self._names = names
        self._dtype = dtype
        self._device = device
        self._transforms = transforms or {}
        self._spell = spell
        self._taken: set[str] = set()
        self._jobs: list[tuple[str, Tensor]] = []

    def has(self, name: str) -> bool:
        return name in self._names

    def rows(self, name: str) -> int:
        """The outermost size of a tensor."""
        return self._checkpoint.tensors[self._names[name]].shape[0]

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor of exactly this shape, in dtype or the model's; its values are there after `fill`."""
        return self.take_stacked([name], [shape], dtype).view(*shape)

    def take_stacked(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Several tensors on top of each other, along their rows, in one piece of memory [sum of rows, ...]."""
        rows = sum(shape[0] for shape in shapes)
        self._check(names, shapes)
        out = torch.empty((rows, *shapes[0][1:]), dtype=dtype or self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            self._jobs.append((name, out[start : start + shape[0]]))
            start += shape[0]
        return out

    def take_into(self, name: str, out: Tensor) -> None:
        """One tensor into memory that somebody laid out, a view of it included."""
        self._check([name], [out.shape])
        self._jobs.append((name, out))

    def empty(self, *shape: int) -> Tensor:
        """Memory for `take_into`, where these weights live."""
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def pass_over(self, name: str) -> None:
        """Count a tensor as used that was read elsewhere (rope factors) or is the embedding once more."""
        self._taken.add(name)

    def fill(self, progress: Progress | None = None) -> None:
        """Refuse what nobody took, then read everything that was taken."""
        self._refuse_unused()
        total = sum(self._n_bytes(name) for name, _ in self._jobs)
        done = 0
        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
            # The largest first, so that no thread is left with one big tensor at the end.
            order = sorted(self._jobs, key=lambda job: -self._n_bytes(job[0]))
            reading = {pool.submit(self._read, name, out): name for name, out in order}
            for ready in as_completed(reading):
                ready.result()
                done += self._n_bytes(reading[ready])
                if progress is not None:
                    progress(done, total)
        self._jobs.clear()

    def _check(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        for name, shape in zip(names, shapes, strict=True):
            if name not in self._names:
                raise BadFile(f"{self._checkpoint.path}: the tensor {self._spell(name)} is missing; it is incomplete")
            found = self._checkpoint.tensors[self._names[name]]
            if tuple(found.shape) != tuple(self._stored(name, shape)):
                raise BadFile(
                    f"{self._checkpoint.path}: the tensor {found.name} has the shape {list(found.shape)}; "
                    f"this model needs {list(self._stored(name, shape))}"
                )
            if found.type in NOT_WEIGHTS:
                raise BadFile(
                    f"{self._checkpoint.path}: the tensor {found.name} holds {found.type}, which no weights are"
                )
            self._taken.add(name)

    def _stored(self, name: str, shape: Sequence[int]) -> Sequence[int]:
        """The shape in the file: transposed where the format keeps it so."""
        return shape[::-1] if self._transform(name) is transpose else shape

    def _transform(self, name: str) -> Transform | None:
        return self._transforms.get(without_layer(name))

    def _read(self, name: str, out: Tensor) -> None:
        transform = self._transform(name)
        if transform is None and out.device.type == "cpu" and out.is_contiguous():
            self._checkpoint.read(self._names[name], out)
            return
        plain = torch.empty(tuple(self._checkpoint.tensors[self._names[name]].shape), dtype=out.dtype)
        self._checkpoint.read(self._names[name], plain)
        out.copy_(plain if transform is None else transform(plain))

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


def without_layer(name: str) -> str:
    return re.sub(r"^blk\.\d+\.", "", name)


def transpose(x: Tensor) -> Tensor:
    """For formats that keep a matrix as [in, out]."""
    return x.t()


def plus_one(x: Tensor) -> Tensor:
    """For formats that keep a norm's weight as its distance from 1."""
    return x + 1


def translate(
    tensors: Iterable[str], table: Mapping[str, str], ignored: re.Pattern[str] | None = None
) -> dict[str, str]:
    """Our names to the file's, by a table of the file's names in which `*` stands for a number.

    A name the table lacks stays as it is, to be refused by `fill`; what `ignored` matches holds no weights.

    >>> translate(["model.layers.3.mlp.up_proj.weight"], {"model.layers.*.mlp.up_proj": "blk.*.ffn_up"})
    {'blk.3.ffn_up.weight': 'model.layers.3.mlp.up_proj.weight'}
    """
    ours = {}
    for name in tensors:
        if ignored is not None and ignored.fullmatch(name):
            continue
        stem, _, leaf = name.rpartition(".")
        numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", stem)
        target = table.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", stem))
        if target is None:
            ours[name] = name
            continue
        for number in numbers:
            target = target.replace("*", number, 1)
        ours[f"{target}.{leaf}"] = name
    return ours


def spelled(table: Mapping[str, str], name: str) -> str:
    """How a file with these names would call one of ours; our own name where it has none for it.

    >>> spelled({"model.layers.*.mlp.up_proj": "blk.*.ffn_up"}, "blk.3.ffn_up.weight")
    'model.layers.3.mlp.up_proj.weight'
    """
    stem, _, leaf = name.rpartition(".")
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", stem)
    pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", stem)
    theirs = next((their for their, ours in table.items() if ours == pattern), None)
    if theirs is None:
        return name
    for number in numbers:
        theirs = theirs.replace("*", number, 1)
    return f"{theirs}.{leaf}"
