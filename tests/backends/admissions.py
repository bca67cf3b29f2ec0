"""What a slot is admitted with, and how it is written into the table or the admissions: for the samplers' tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ostinato.loop.layout import Arena


@dataclass(frozen=True, slots=True)
class Setting:
    """What one slot was admitted with, and what it has made so far."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    position: int = 5  # of the token just taken in
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    prompt: tuple[int, ...] = ()
    made: dict[int, int] = field(default_factory=dict)
    allowed: frozenset[int] | None = None
    n_logprobs: int = 0

    @property
    def penalised(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)

    @property
    def n_made(self) -> int:
        return sum(self.made.values())


def bits(ids: frozenset[int], vocab: int) -> Tensor:
    flags = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    flags[list(ids)] = 1
    return torch.from_numpy(np.packbits(flags, bitorder="little").view(np.int32))


def write_admission(table: Arena, slot: int, setting: Setting, vocab: int) -> None:
    """Write a setting into a slot as an admission would, over whatever lay there."""
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "seed"):
        table[name][slot] = getattr(setting, name)
    for name in ("position", "min_tokens", "n_logprobs"):
        table[name][slot] = getattr(setting, name)
    table["penalised"][slot] = int(setting.penalised)
    table["n_stop"][slot] = len(setting.stop_ids)
    table["stop_ids"][slot, : len(setting.stop_ids)] = torch.tensor(setting.stop_ids, dtype=torch.int32)
    table["n_bias"][slot] = len(setting.bias)
    for i, (token, value) in enumerate(setting.bias):
        table["bias_ids"][slot, i], table["bias_values"][slot, i] = token, value
    table["prompt_bits"][slot] = bits(frozenset(setting.prompt), vocab)
    table["constrained"][slot] = int(setting.allowed is not None)
    if setting.allowed is not None:
        table["mask_bits"][slot] = bits(setting.allowed, vocab)
    if "made" not in table.names:
        return
    table["made"][slot] = setting.n_made
    table["counts"][slot] = 0
    for token, times in setting.made.items():
        table["counts"][slot, token] = times
