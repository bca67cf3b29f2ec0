"""Rows of a memory plan that every backend has: pages, states, tables, rings, rows of output. Counted, and nothing is
allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.backends.base import MemoryRow, Settled, rows_of_logits
from ostinato.cache.kv_bytes import kv_bytes
from ostinato.loop.layout import Layout, arena_bytes

if TYPE_CHECKING:
    from ostinato.models.shape import Shape

FLOAT_BYTES = 4
# Of recurrent states, in the host's memory, for prompts that begin alike: of small models so many snapshots are enough.
SNAPSHOT_BYTES = 512 << 20
MOST_SNAPSHOTS = 64
KV_PAGES = "KV pages"
OUTPUT_ROWS = "rows of output (at first use)"
# Beside the CPU's own: what is imported and built between asking for free memory and answering; measured at 70 MB, and
# at 125 MB with torch.
LIBRARIES = MemoryRow("Python and its libraries (about)", 80 << 20)
LIBRARIES_WITH_TORCH = MemoryRow(LIBRARIES.name, 160 << 20)


def shared_rows(shape: Shape, settled: Settled) -> tuple[MemoryRow, ...]:
    """What holds sequences, and what host and device tell each other through. Beside a GPU the host's part is pinned
    memory. What holds sequences is allocated at once there; on the CPU it is address space, and the system commits it
    when it is first written."""
    on_host, on_cpu = settled.kind == "cuda", settled.kind == "cpu"
    groups = settled.groups(shape)
    layout = Layout(settled.n_slots, settled.max_pages, shape.vocab, n_groups=len(groups))
    return (
        MemoryRow(KV_PAGES, kv_bytes(shape, groups, settled.kv_type, settled.page_tokens), on_demand=on_cpu),
        MemoryRow("recurrent states", _state_bytes(shape, settled.n_slots), on_demand=on_cpu),
        MemoryRow("state snapshots (at most)", snapshot_bytes(shape), on_host=on_host, on_demand=True),
        MemoryRow("slot table", arena_bytes(layout.table_fields)),
        MemoryRow("admissions", arena_bytes(layout.admission_fields), on_host=on_host),
        MemoryRow("rings", arena_bytes(layout.ring_fields), on_host=on_host),
        MemoryRow("grammars (at most)" if on_cpu else "grammars", settled.grammar_bytes, on_demand=on_cpu),
    )


def output_row(shape: Shape, chunk_rows: int, beside_logits: int = 0) -> MemoryRow:
    """What logits, log-probabilities and hidden rows of texts take from their first use on: a bounded number of rows of
    logits, each with so many bytes beside it."""
    row_bytes = shape.vocab * FLOAT_BYTES + beside_logits
    return MemoryRow(OUTPUT_ROWS, rows_of_logits(shape.vocab, chunk_rows) * row_bytes, on_demand=True)


def _state_bytes(shape: Shape, n_rows: int) -> int:
    return n_rows * shape.state_numbers * FLOAT_BYTES


def snapshot_bytes(shape: Shape) -> int:
    """Of all snapshots of a model's recurrent states together, at most."""
    return min(SNAPSHOT_BYTES, MOST_SNAPSHOTS * _state_bytes(shape, 1))


def without_empty(*rows: MemoryRow) -> tuple[MemoryRow, ...]:
    return tuple(row for row in rows if row.n_bytes)
