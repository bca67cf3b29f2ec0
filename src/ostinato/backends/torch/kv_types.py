"""The types of keys and values that torch keeps, and the torch dtype of each; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ostinato.options import KVType

KV_DTYPES: Final[Mapping[KVType, str]] = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "q8_0": "int8"}
