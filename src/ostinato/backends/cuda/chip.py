"""What follows from a GPU's limits (`Chip`): how many iterations of a kernel's loop are in flight, and how the prompt's
attention is cut where a block has little shared memory; each choice with its reason (E-82).

Capabilities are compared as numbers: (10, 0) is newer than (9, 0). Nothing is chosen by a chip's name. The tables of
tiles were tuned where everything fits; elsewhere a kernel first gets fewer stages, which changes no bit. Integers only:
what a kernel needs is said beside it, and `bench/cards.py` holds it against the compiler's own figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from ostinato.backends.machine import (
    OLDEST,
    PRETENDED,
    PROGRAMS_PER_MULTIPROCESSOR,
    REGISTERS,
    SHARED_BYTES,
    TUNED,
    arch_of,
)
from ostinato.backends.machine import Chip as Chip
from ostinato.models.shape import Shape
from ostinato.options import KVType

TENSOR_CORES_SINCE: Final = OLDEST  # for bfloat16
TUNED_ON: Final = TUNED.capability  # where the table of tiles was measured


LEAST_SHARED_BYTES: Final = min(SHARED_BYTES.values())  # of a block: with so many, every kernel fits
MOST_REGISTERS: Final = 255  # of a thread
SAVES_REGISTERS: Final = (8, 0)  # where the assembler saves registers of products, too (`registers_alone`)
CHUNK_ROWS: Final = 64  # of a tile of the prompt's attention
LEAST_TILE: Final = 16  # rows or positions, what a tensor core multiplies
STORED_BYTES: Final[Mapping[KVType, int]] = {"f32": 4, "bf16": 2, "f16": 2, "q8_0": 1}  # of an element of keys
_CHUNK_BLOCK: Final = 64  # key positions at once, where they fit


def stages_that_fit(chip: Chip, wanted: int, iteration_bytes: int, beside: int = 0) -> int:
    """How many iterations of a loop may be in flight, `wanted` at most. A kernel of n stages keeps the operands of
    n - 1 iterations in shared memory, and `beside` bytes more. No bit depends on it.

    >>> [stages_that_fit(Chip((8, 9), 128, shared), 4, 36_864) for shared in (101_376, 166_912)]
    [3, 4]
    """
    return max(1, min(wanted, 1 + (chip.shared_bytes - beside) // iteration_bytes))


def registers_alone(chip: Chip, shared_bytes: int, num_warps: int, *, blocks: int = 1) -> dict[str, object]:
    """As an option of a kernel, all registers that a block can have where its shared memory leaves room for so many
    blocks on a multiprocessor and no more. The assembler does not know that, and may save registers for blocks that
    never come: 20 KB spilled of a thread of prompt attention over float32 on 9.0, 6 KB of a product with Q4_K on 8.0.
    No bit depends on it."""
    if not chip.has_ptx or (blocks + 1) * shared_bytes <= chip.shared_bytes:
        return {}
    return {"maxnreg": min(MOST_REGISTERS, REGISTERS // (32 * num_warps * blocks))}


def chunk_bytes(
    width: int,
    item_bytes: int,
    block: int,
    stages: int,
    row_bytes: int | None = None,
    *,
    rows: int = CHUNK_ROWS,
    shared: bool = False,
) -> int:
    """Shared memory that the prompt's attention takes at most: queries, weights of V, and blocks of K and V of all
    iterations in flight but the running one; `shared`: of that one too (`reads_shared`). A row of K has `row_bytes` in
    the store, where those are not its bytes as it is multiplied."""
    queries, weights = rows * width * item_bytes, rows * block * item_bytes
    keys = values = block * width * item_bytes
    if stages == 1:
        return queries + max(keys, weights) + values  # weights take the place of keys
    coming = (stages - 1) * 2 * block * (row_bytes or width * item_bytes)
    return queries + coming + weights + (keys + values if shared else 0)


def reads_shared(chip: Chip) -> bool:
    """Whether tensor cores read the blocks that they multiply in shared memory: Hopper's and the first Blackwells'."""
    return chip.capability[0] in (9, 10)


def chunk_block(chip: Chip, width: int, item_bytes: int) -> int:
    """Key positions that the prompt's attention takes at once, of heads so wide (a power of two): the same on all
    chips, unless not even one block fits. Fewer are summed in another order: bits change."""
    block = _CHUNK_BLOCK
    while block > LEAST_TILE and chunk_bytes(width, item_bytes, block, 1) > chip.shared_bytes:
        block //= 2
    return block


def chunk_rows(chip: Chip, width: int, item_bytes: int) -> int:
    """Rows that a program of the prompt's attention takes at once: fewer where they do not fit beside the smallest
    block. No bit depends on it."""
    rows, block = CHUNK_ROWS, chunk_block(chip, width, item_bytes)
    while rows > LEAST_TILE and chunk_bytes(width, item_bytes, block, 1, rows=rows) > chip.shared_bytes:
        rows //= 2
    return rows


def step_bytes(width: int, item_bytes: int, block: int, group: int) -> int:
    """Shared memory that a step's attention takes with one iteration in flight: blocks of K and V, the queries of
    `group` heads, weights of V, and a little."""
    return 2 * block * width * item_bytes + queries_bytes(width, item_bytes, block, group)


def queries_bytes(width: int, item_bytes: int, block: int, group: int) -> int:
    return padded(group) * (width + block) * max(item_bytes, 2) + 256


def step_block(chip: Chip, width: int, item_bytes: int, group: int) -> int:
    """Key positions that a step's attention takes at once, as `chunk_block` has them for a prompt's."""
    block = 64 if width <= 128 else 32
    while block > LEAST_TILE and step_bytes(width, item_bytes, block, group) > chip.shared_bytes:
        block //= 2
    return block


# Latent attention: all heads over one key, as wide as its rotated part and its compressed row, each a power of two


@dataclass(frozen=True, slots=True)
class LatentCut:
    """How a program is cut: rows (of a step: heads) and stages, which change no bit, and key positions at once."""

    rows: int
    block: int
    stages: int


def heads_together(n_heads: int) -> int:
    """Query heads that a program of a step takes at once: in groups of one size, no more than a tile has.

    >>> heads_together(128), heads_together(20), heads_together(6)
    (16, 10, 6)
    """
    return max(n for n in range(1, LEAST_TILE + 1) if n_heads % n == 0)


def latent_bytes(chip: Chip, width: int, item_bytes: int, cut: LatentCut) -> int:
    """Shared memory that latent attention takes at most, with two stages or more: queries, weights, and blocks of keys
    of all iterations in flight but the running one; of that one too where tensor cores read it there, which they do of
    64 rows (10.x: once for each of the two products)."""
    multiplied = max(item_bytes, 2)
    stored = width * item_bytes + (width // 16 if item_bytes == 1 else 0)  # with the scales of bytes
    copies = chip.capability[0] - 8 if reads_shared(chip) and cut.rows >= CHUNK_ROWS else 0
    running = copies * cut.block * width * multiplied
    queries = cut.rows * (width + cut.block) * multiplied
    return queries + running + (cut.stages - 1) * cut.block * stored + 256


def latent_cut(chip: Chip, width: int, item_bytes: int, rows: int) -> LatentCut:
    """At most so many rows. Key positions are the same on all chips unless not even 16 rows fit beside them: fewer are
    summed in another order. Float32 has no tensor cores: small tiles, which leave its numbers in registers."""
    cut = LatentCut(rows, 32, 2) if item_bytes < 4 else LatentCut(LEAST_TILE, LEAST_TILE, 2)
    while latent_bytes(chip, width, item_bytes, cut) > chip.shared_bytes and (cut.rows, cut.block) != (LEAST_TILE,) * 2:
        cut = replace(cut, rows=cut.rows // 2) if cut.rows > LEAST_TILE else replace(cut, block=cut.block // 2)
    more = replace(cut, stages=3)
    return more if latent_bytes(chip, width, item_bytes, more) <= chip.shared_bytes else cut


def latent_width(rotated: int, rank: int) -> int:
    return padded(rotated) + padded(rank)


def other_cut(shape: Shape, kv_type: KVType, chip: Chip | None) -> str | None:
    """What is summed in another order on a chip than where the kernels were tuned; None where nothing is."""
    if chip is None:
        return None
    found: dict[str, None] = {}
    for one in shape.attention.values():
        if one.latent is not None:
            width, stored = latent_width(one.head_width - one.value_width, one.value_width), STORED_BYTES[kv_type]
            block, tuned = (latent_cut(on, width, stored, LEAST_TILE).block for on in (chip, TUNED))
            found |= {f"latent attention by {block}": None} if block != tuned else {}
            continue
        width = padded(one.head_width)
        prompt = [chunk_block(on, width, product_bytes(kv_type)) for on in (chip, TUNED)]
        step = [step_block(on, width, STORED_BYTES[kv_type], one.n_heads // one.n_kv_heads) for on in (chip, TUNED)]
        named = (("prompt attention", prompt), ("attention", step))
        found |= {f"{name} by {block}": None for name, (block, tuned) in named if block != tuned}
    return ", ".join(found) or None


def product_bytes(kv_type: KVType) -> int:
    """Of an element of keys as it is multiplied: eight bits are, as bfloat16."""
    return 4 if kv_type == "f32" else 2


def padded(n: int) -> int:
    """The width of a head, or so many queries, in a kernel: a power of two, as many as tensor cores multiply."""
    return max(LEAST_TILE, 1 << (n - 1).bit_length())


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One thing that was chosen, and why."""

    what: str
    choice: str
    reason: str


def choices(chip: Chip) -> tuple[KernelChoice, ...]:
    """What is chosen for a chip."""
    major, minor = chip.capability
    has_cores = chip.capability >= TENSOR_CORES_SINCE
    since = f"{TENSOR_CORES_SINCE[0]}.{TENSOR_CORES_SINCE[1]}"
    tuned = f"{TUNED_ON[0]}.{TUNED_ON[1]}"
    fits = chip.shared_bytes >= TUNED.shared_bytes
    named: tuple[KernelChoice, ...] = ()
    if chip.device_capability is not None:
        real = arch_of(chip.device_capability)
        named = (KernelChoice("chip", f"as if it were {chip.arch}", f"{PRETENDED} says so; this GPU is {real}"),)
    return (
        *named,
        KernelChoice("step boundary", f"compiled for {chip.arch}", f"the chip's capability is {major}.{minor}"),
        KernelChoice(
            "attention in a step",
            f"{chip.attention_programs} programs",
            f"{PROGRAMS_PER_MULTIPROCESSOR} for each of {chip.n_multiprocessors} multiprocessors; no bit depends on it",
        ),
        KernelChoice(
            "products of bfloat16",
            "tensor cores" if has_cores else "float32 units",
            f"capability {major}.{minor}; tensor cores know bfloat16 since {since}",
        ),
        KernelChoice(
            "tiles of products",
            "by type and shape" + ("" if chip.capability == TUNED_ON else f", as tuned for capability {tuned}"),
            "the cut decides the bits, so no chip changes it",
        ),
        KernelChoice(
            "shared memory of a block",
            "enough for all stages of every tile" if fits else "fewer stages where a tile needs more; no bit changes",
            f"{chip.shared_bytes >> 10} kB; the tiles were tuned with {TUNED.shared_bytes >> 10} kB",
        ),
    )
