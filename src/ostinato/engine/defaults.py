"""A model's own sampling defaults, where its files state them: `general.sampling.*` or generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from ostinato.errors import BadFile, BadOption
from ostinato.files.checkpoint import Checkpoint
from ostinato.files.safetensors import SafetensorsFolder
from ostinato.options import NEUTRAL, SAMPLING_NUMBERS, Sampling

_GGUF: Final = {f"general.sampling.{number.key}": number.name for number in SAMPLING_NUMBERS if number.key is not None}


def default_sampling(checkpoint: Checkpoint) -> Sampling:
    """Every value that sampling needs: the model's where its files state one, else ours."""
    if isinstance(checkpoint, SafetensorsFolder):
        stated = _from_generation_config(checkpoint.generation_config)
    else:
        stated = {ours: checkpoint.metadata[key] for key, ours in _GGUF.items() if key in checkpoint.metadata}
    try:
        return Sampling(**{name: _tidy(value) for name, value in stated.items()}).over(NEUTRAL)
    except BadOption as error:
        raise BadFile(f"{checkpoint.path}: its own sampling defaults cannot be used: {error}") from error


def _from_generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values count only under do_sample: without it the file asks for the most likely token, whatever else it says."""
    stated = {name: config[name] for name in _GGUF.values() if config.get(name) is not None}
    if config.get("do_sample") is True:
        return {"temperature": 1.0, **stated}
    return {name: value for name, value in stated.items() if name == "repetition_penalty"}


def _tidy(value: Any) -> Any:
    """float32 from a file as the decimal that was meant: 0.6, not 0.60000002."""
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value
