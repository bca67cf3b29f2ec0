"""Typed reading of a model's own description: GGUF metadata or config.json, with errors that name the key.

A key is read with the type and the range it must have; what is missing or mistyped is a `BadFile` that says
where, so that no family file checks anything itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from ostinato.errors import BadFile
from ostinato.files.checkpoint import Checkpoint, TensorInfo

T = TypeVar("T")
_MOST = 2**31 - 1
# Models compute in float32
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping of a model's settings, read under a prefix (`llama.` in GGUF, none in config.json)."""

    values: Mapping[str, Any]
    path: Path
    prefix: str = ""

    def has(self, key: str) -> bool:
        return self.values.get(self.prefix + key) is not None

    def raw(self, key: str) -> Any:
        """The value as the file has it; None where it is absent or null."""
        return self.values.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise self._wrong(key, value, f"a whole number from {least} to {_MOST}")
        return value

    def per_layer(
        self, key: str, n_layers: int, default: Sequence[int] | None = None, *, least: int = 1
    ) -> tuple[int, ...]:
        """A whole number for each layer: one for all, or a list, in which 0 stands for a layer without such a part."""
        value = self.raw(key)
        if value is None and default is not None:
            return tuple(default)
        if not isinstance(value, (list, tuple, np.ndarray)):
            return (self.integer(key, least=least),) * n_layers
        found = [int(each) if isinstance(each, (int, np.integer)) else -1 for each in value]
        if len(found) != n_layers or not all(0 <= each <= _MOST for each in found):
            raise self._wrong(key, list(value), f"one whole number, or a list with one for each of {n_layers} layers")
        return tuple(found)

    def layer_numbers(self, key: str, n_layers: int) -> tuple[int, ...]:
        """A list of layers by their numbers."""
        value = self._present(key, None)
        if not isinstance(value, list) or any(not isinstance(one, int) or not 0 <= one < n_layers for one in value):
            raise self._wrong(key, value, f"a list of layer numbers from 0 to {n_layers - 1}")
        return tuple(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
            raise self._wrong(key, value, "a finite number that float32 can hold")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value < _SMALLEST:
            raise self._wrong(key, value, "greater than 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def word(self, key: str, default: str | None = None) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a word")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        value = self._present(key, None)
        good = isinstance(value, (list, tuple)) and len(value) == length
        if not good or not all(isinstance(v, (int, float)) and _SMALLEST <= v <= _LARGEST for v in value):
            raise self._wrong(key, value, f"a list of {length} positive numbers")
        return tuple(float(v) for v in value)

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers that are not negative; empty where there is none."""
        value = self.raw(key)
        if value is None:
            return ()
        found = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(found, (list, tuple)) or not all(type(v) is int and v >= 0 for v in found):
            raise self._wrong(key, value, "a list of whole numbers")
        return tuple(found)

    def inside(self, key: str) -> "Fields":
        """The mapping under a key, read the same way; an absent one is empty."""
        value = self.raw(key)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return Fields(value or {}, self.path)

    def _present(self, key: str, default: T | None) -> Any:
        value = self.raw(key)
        if value is not None:
            return value
        if default is None:
            raise BadFile(f"{self.path}: the setting {self.prefix + key!r} is missing; the file is incomplete")
        return default

    def _wrong(self, key: str, value: object, wanted: str) -> BadFile:
        shown = repr(value) if len(repr(value)) < 80 else repr(value)[:77] + "..."
        return BadFile(f"{self.path}: the setting {self.prefix + key!r} is {shown}; it must be {wanted}")


def text_config(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """What the config.json of a model of several parts says of its text part; None where there is one part."""
    text = checkpoint.metadata.get("text_config") if checkpoint.format == "safetensors" else None
    if text is not None and not isinstance(text, Mapping):
        raise BadFile(f"{checkpoint.path}: text_config is {str(text)[:80]!r}; it must be an object")
    return text


def n_further_layers(f: Fields) -> int:
    """How many layers a file has, beside the model's own, that predict tokens after the next one."""
    key = "nextn_predict_layers" if f.prefix else "num_nextn_predict_layers"
    return f.integer(key, 0, least=0)


def _rope_of_older_file(usual: Mapping[str, Any], stated: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The usual rope with the base of a file that states its base alone; none where the file scales its own."""
    if stated.get("rope_scaling") is not None:
        return None
    base = stated.get("rope_theta")
    return usual if base is None or "rope_theta" not in usual else {**usual, "rope_theta": base}


@dataclass(frozen=True, slots=True, kw_only=True)
class Description(Fields):
    """All that a checkpoint says of its model, for the family that reads its shape."""

    checkpoint: Checkpoint
    family: str

    @staticmethod
    def of(checkpoint: Checkpoint, family: str, defaults: Mapping[str, Any] = MappingProxyType({})) -> "Description":
        """`defaults` stand for what the config.json of a folder leaves out; a whole rope, where it states none."""
        if checkpoint.format == "gguf":
            prefix, values = f"{checkpoint.architecture}.", checkpoint.metadata
        else:
            stated, text = checkpoint.metadata, text_config(checkpoint)
            if text is not None:
                whole = {key: stated[key] for key in ("tie_word_embeddings",) if key in stated}  # of all parts together
                stated = {**{key: stated[key] for key in stated if key not in defaults}, **text, **whole}
            prefix, values = "", {**defaults, **stated}
            if "rope_parameters" in defaults and stated.get("rope_parameters") is None:
                values["rope_parameters"] = _rope_of_older_file(defaults["rope_parameters"], stated)
        return Description(values, checkpoint.path, prefix, checkpoint=checkpoint, family=family)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.checkpoint.tensors
