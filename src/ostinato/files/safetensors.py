"""A safetensors model: a folder with config.json and .safetensors files, behind `checkpoint.py`.

Several files are listed by model.safetensors.index.json. F32, F16 and BF16 weights are read; weights
quantised by GPTQ, AWQ, FP8 and others are refused by name. The header of a file is read by
`safetensors_header.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.errors import BadFile, Unsupported, first_few
from ostinato.files import mxfp4_pairs
from ostinato.files.checkpoint import Checkpoint, TensorInfo
from ostinato.files.fingerprint import fingerprint_of
from ostinato.files.json_file import read_json_if_there, read_json_object
from ostinato.files.mapped import MappedFile
from ostinato.files.modules import MODULES_FILE, config_of, modules_of
from ostinato.files.safetensors_header import read_header
from ostinato.other_engines import LORA

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BESIDE_WEIGHTS = (  # optional files that also affect the answer
    "config.json",
    "generation_config.json",
    _INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    MODULES_FILE,
)
_MODULES_BESIDE_WEIGHTS = ("Pooling", "LogitScore")  # whose settings do
_BESIDE_MODULES = ("config_sentence_transformers.json", "sentence_bert_config.json")


class SafetensorsFolder(Checkpoint):
    """A safetensors model opened for reading."""

    format = "safetensors"

    def _open(self) -> None:
        self._parts: dict[str, list[tuple[MappedFile, TensorInfo]]] = {}  # of tensors that are two in the files
        self.metadata = MappingProxyType(read_json_object(self.path / "config.json"))
        self.architecture = self._architecture()
        self._refuse_quantised()
        stated = read_json_if_there(self.path / "generation_config.json")
        self.generation_config: Mapping[str, Any] = MappingProxyType(stated)
        self._open_shards()
        infos = {name: info for name, (_, info) in self._places.items()}
        self._pairs = {} if not self.metadata.get("quantization_config") else mxfp4_pairs.joined(infos, self.path)
        for stem, info in self._pairs.items():
            self._parts[stem] = [self._places.pop(stem + end) for end in (mxfp4_pairs.BLOCKS, mxfp4_pairs.SCALES)]
            self._places[stem] = (self._parts[stem][0][0], info)

    def raw(self, name: str) -> NDArray[np.uint8]:
        if name not in self._parts:
            return super().raw(name)
        return self.raw_rows(name, 0, math.prod(self._pairs[name].shape[:-1]))

    def raw_rows(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """Of MXFP4 weights, new arrays."""
        if name not in self._parts:
            return super().raw_rows(name, first, last)
        n_rows = math.prod(self._pairs[name].shape[:-1])
        blocks, scales = (file.view(info.start, info.n_bytes).reshape(n_rows, -1) for file, info in self._parts[name])
        return mxfp4_pairs.as_rows(blocks[first:last].reshape(last - first, -1, 16), scales[first:last])

    def let_go(self, name: str, first: int, last: int) -> None:
        if name not in self._parts:
            return super().let_go(name, first, last)
        n_rows = math.prod(self._pairs[name].shape[:-1])
        for file, info in self._parts[name]:
            row_bytes = info.n_bytes // n_rows
            file.let_go(info.start + first * row_bytes, (last - first) * row_bytes)

    def _architecture(self) -> str:
        names = self.metadata.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    def _refuse_quantised(self) -> None:
        for key in ("quantization_config", "compression_config", "quantization"):  # the last is MLX's
            config = self.metadata.get(key)
            method = config.get("quant_method") if isinstance(config, dict) else None
            if config and method != "mxfp4":
                raise Unsupported(
                    f"{self.path / 'config.json'}: the weights are quantised ({key}: {str(method or config)[:80]}); "
                    f"GPTQ, AWQ, FP8, MLX, bitsandbytes and their like are not read: give the F32, F16 or BF16 "
                    f"model, or a quantised GGUF"
                )

    def _open_shards(self) -> None:
        self._open_model()
        dense = [one.path for one in modules_of(self.path) if one.kind == "Dense"]
        for number, folder in enumerate(dense, 2):
            if os.path.exists(self.path / folder / _SINGLE):
                self._open_shard(f"{folder}/{_SINGLE}", f"dense.{number}.")

    def _open_model(self) -> None:
        if os.path.exists(self.path / _SINGLE):
            self._open_shard(_SINGLE)
            return
        if not os.path.exists(self.path / _INDEX):
            raise _no_weights(self.path)
        where = _weight_map(self.path)
        shards = sorted(set(where.values()))
        missing = [name for name in shards if not os.path.exists(self.path / name)]
        if missing:
            raise BadFile(f"{self.path}: {_INDEX} lists files that are not there: {first_few(missing)}; fetch them too")
        for shard in shards:
            self._open_shard(shard)
        for name, shard in where.items():
            if name not in self._places or self._places[name][0].path.name != shard:
                raise BadFile(f"{self.path / shard}: lacks tensor {name[:99]!r}, which {_INDEX} lists; fetch it again")

    def _open_shard(self, file_name: str, before: str = "") -> None:
        """Add a file's tensors, with a text before their names."""
        file = MappedFile(self.path / file_name)
        self._files.append(file)
        for own, info in read_header(file).items():
            name = before + own
            if name in self._places:
                earlier = self._places[name][0].path.name
                raise BadFile(f"{file.path}: tensor {name[:120]!r} is in {earlier} too; fetch the folder again")
            self._places[name] = (file, replace(info, name=name))

    def fingerprint(self) -> str:
        """The sha256 of the list of sums of weights, config and tokenizer files."""
        beside = [self.path / name for name in _BESIDE_WEIGHTS]
        beside += [config_of(self.path, kind) for kind in _MODULES_BESIDE_WEIGHTS]
        beside += [self.path / name for name in _BESIDE_MODULES]
        return fingerprint_of([*filter(os.path.isfile, beside), *(shard.path for shard in self._files)])


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name, each a plain name in this folder: an index cannot point elsewhere."""
    path = folder / _INDEX
    where = read_json_object(path).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise BadFile(f"{path}: weight_map is {type(where).__name__}, not an object with names; fetch the folder again")
    for name, shard in where.items():
        plain = isinstance(shard, str) and shard not in ("", ".", "..") and not {"/", "\\", "\0"} & set(shard)
        if not plain:
            raise BadFile(f"{path}: weight_map[{name[:99]!r}] is {str(shard)[:80]!r}; it must name a file beside it")
    return where


def _no_weights(folder: Path) -> BadFile | Unsupported:
    """The message for a folder with config.json and no model.safetensors."""
    names = sorted(os.listdir(folder))
    if "adapter_model.safetensors" in names or "adapter_config.json" in names:
        return Unsupported(f"{folder}: holds an adapter, not a model; {LORA}")
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        return BadFile(
            f"{folder}: has its weights as pickles ({pickles[0]}), which can run code and are not opened; "
            f"give a folder with {_SINGLE} or {_INDEX}"
        )
    return BadFile(f"{folder}: has config.json, but neither {_SINGLE} nor {_INDEX}; fetch the weights too")
