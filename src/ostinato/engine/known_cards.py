"""What is known of GPUs by their compute capability: where our kernels ran, where they were only compiled, and where
neither was done and they follow by the chip's limits.

`ostinato doctor --cards` prints this table, and README.md has the same. The examples are for readers. A card's name
decides one thing only: `serve` compares no mode with the reference on the card that the kernels ran on. The chooser
takes `persistent` unasked only where it ran, and for some families only (docs/tape.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ostinato.backends.tape.backend import MOST_QUERIES, group_of

if TYPE_CHECKING:
    from ostinato.models.shape import Shape


@dataclass(frozen=True, slots=True)
class KnownCards:
    """The cards of one compute capability."""

    examples: str
    compiled: str | None = None  # when the kernels were last compiled for it; None: they follow by the chip's limits
    ran: str | None = None  # when every mode last ran on such a card
    ran_on: str | None = None  # which card that was

    @property
    def state(self) -> str:
        if self.ran is not None:
            return f"ran on an {self.ran_on}"
        return "not compiled" if self.compiled is None else "compiled"

    @property
    def date(self) -> str:
        return self.ran or self.compiled or ""


KNOWN: Final[Mapping[tuple[int, int], KnownCards]] = MappingProxyType(
    {
        (8, 0): KnownCards("A100, A30", compiled="2026-11-18"),
        (8, 6): KnownCards("RTX 30, A10, A40, RTX A6000", compiled="2026-11-18"),
        (8, 7): KnownCards("Jetson Orin", compiled="2026-11-18"),
        (8, 9): KnownCards("RTX 40, L4, L40S", compiled="2026-11-18"),
        (9, 0): KnownCards("H100, H200, GH200", compiled="2026-11-18", ran="2026-11-20", ran_on="H200"),
        (10, 0): KnownCards("B200, GB200", compiled="2026-11-18"),
        (10, 3): KnownCards("B300, GB300"),
        (12, 0): KnownCards("RTX 50, RTX PRO 6000", compiled="2026-11-18"),
        (12, 1): KnownCards("GB10 (DGX Spark)", compiled="2026-11-18"),
    }
)
# Kinds of kernel (`kind_of_kernel`) for which `auto` takes `persistent` on such cards: with these it ran, or has the
# source of one with which it ran (tests/test_ran.py). It supports more, which were emulated only.
PERSISTENT_KINDS: Final = frozenset(
    {
        *("llama", "qwen2", "qwen3", "qwen3vl", "phi3", "ernie4_5", "seed_oss"),
        *("granite", "smollm3", "mistral3", "glm4", "gemma", "gemma2", "gemma3"),
        *("llama --kv-type q8_0", "gemma3 --kv-type q8_0"),
        "glm4 (query heads of a KV head in parts of 8)",
        "glm4 (query heads of a KV head in parts of 8) --kv-type q8_0",
    }
)
# Families that have run on no card yet in the other modes: none now. A new one is named here until it has run.
NOT_RUN: Final[frozenset[str]] = frozenset()
REFUSED: Final = ("T4, RTX 20, V100 and older", "sm_75 and older", "none", "refused by name", "")


def kind_of_kernel(shape: Shape, kv_type: str) -> str:
    """What a result of `persistent` holds for: a family, whether the query heads of a KV head attend in parts, and
    whether keys and values are quantised.

    >>> from ostinato.models.named_shapes import named_shape
    >>> kind_of_kernel(named_shape("llama-1b"), "q8_0"), kind_of_kernel(named_shape("glm4-9b"), "bf16")
    ('llama --kv-type q8_0', 'glm4 (query heads of a KV head in parts of 8)')
    """
    sizes = sorted({group_of(one) for one in shape.attention.values() if one.group > MOST_QUERIES})
    parts = f" (query heads of a KV head in parts of {' and '.join(map(str, sizes))})" if sizes else ""
    return f"{shape.family}{parts}{f' --kv-type {kv_type}' if kv_type == 'q8_0' else ''}"


def has_run(capability: tuple[int, int]) -> bool:
    """Whether our kernels ran on such a card, and were not only compiled for it."""
    return capability in KNOWN and KNOWN[capability].ran is not None


def is_card_that_ran(capability: tuple[int, int], name: str) -> bool:
    """Whether a card is the one that our kernels ran on, by its full name, and not another of its capability.

    >>> [is_card_that_ran((9, 0), name) for name in ("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3")]
    [True, False, False]
    """
    return has_run(capability) and name == f"NVIDIA {KNOWN[capability].ran_on}"
