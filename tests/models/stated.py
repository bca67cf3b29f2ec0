"""Families and shapes of what config.json states, without weights."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import transformers

from ostinato.files.checkpoint import Checkpoint
from ostinato.models.family import Family
from ostinato.models.registry import FAMILIES, family_of, read_shape
from ostinato.models.shape import Shape
from tests.models.tiny import TinyModel
from tests.models.tiny_encoders import TinyEncoder

# Widths that every kernel knows, in the place of those of a tiny model.
USUAL: Final = MappingProxyType({"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "n_embd": 256})


class _Stated(Checkpoint):
    """A folder of which there is nothing but config.json."""

    format = "safetensors"

    def __init__(self, kind: str, config: Mapping[str, Any]) -> None:
        self.architecture, self.metadata = kind, config
        super().__init__(Path(kind))

    def _open(self) -> None:
        """There are no files."""

    def fingerprint(self) -> str:
        return self.architecture


def shape_of(kind: str, config: Mapping[str, Any]) -> Shape:
    """The shape that a config.json of this class states, as it stands."""
    return read_shape(_Stated(kind, {**config, "architectures": [kind]}))


def read(kind: str, config: Mapping[str, Any]) -> tuple[Family, Shape]:
    """The family of a class of transformers and the shape of its configuration, defaults where nothing is given."""
    made = getattr(transformers, kind).config_class(**json.loads(json.dumps(dict(config))))
    stated = _Stated(kind, {**json.loads(made.to_json_string(use_diff=False)), "architectures": [kind]})
    return family_of(stated), read_shape(stated)


def read_tiny(model: TinyModel | TinyEncoder) -> tuple[Family, Shape]:
    """The family and the shape of a tiny model; without recurrent layers it has widths that every kernel knows. A
    family that shares a class with another goes by its own name, which it has in GGUF alone."""
    family, shape = read(model.kind, model.config)
    if not shape.recurrent:
        family, shape = read(model.kind, _usual(model.config))
    family = next((one for one in FAMILIES if one.name == model.architecture and not one.hf), family)
    return family, replace(shape, family=family.name)


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("hidden_size", 64) != 64:
        return dict(config)  # the sizes of a published model
    grown = {key: USUAL.get(key, value) for key, value in config.items()}
    if "text_config" in grown:
        grown["text_config"] = _usual(grown["text_config"])
    rope = grown.get("rope_parameters") or {}
    if "short_factor" in rope:  # one for each pair of a head
        n = 4 * len(rope["short_factor"])
        grown["rope_parameters"] = {**rope, "short_factor": [1.0] * n, "long_factor": [2.0] * n}
    return grown
