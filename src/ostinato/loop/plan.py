"""What a step is: a frozen list of nodes over buffers at fixed addresses, with a hash.

A node is one launch, bound to its memory when the plan is made; what changes from step to step is read from the slot
table. Every start runs the same nodes in the same order. Each backend's `plan.py` makes plans; nothing here knows a
model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ostinato.errors import InternalError, PlanStale
from ostinato.loop.guard import Guard
from ostinato.loop.memory import address_of, read_only, version_of


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that nodes use, with its address when the plan was made."""

    name: str
    _memory: Any  # the device's own array or tensor; `check` reads its address again
    address: int
    n_bytes: int
    is_weight: bool = False  # neither device nor host writes to it from when the plan is made

    @staticmethod
    def of(name: str, tensor: Any, *, is_weight: bool = False) -> Buffer:
        return Buffer(name, tensor, address_of(tensor), tensor.nbytes, is_weight)

    @property
    def tensor(self) -> Any:
        """Its contents for the host, which reads them and does not write: an array or a tensor of the backend's."""
        return read_only(self._memory)

    @property
    def text(self) -> str:
        """Name, dtype and shape without the address: the same in every process."""
        dtype = str(self._memory.dtype).removeprefix("torch.")
        return f"{self.name} {dtype} {list(self._memory.shape)}"

    @property
    def array(self) -> np.ndarray | None:
        """Its memory where that is an array of the host; None where it is a tensor."""
        return self._memory if isinstance(self._memory, np.ndarray) else None

    @property
    def version(self) -> int | None:
        """Grows when the host writes to it, where that is counted."""
        return version_of(self._memory)

    def check(self) -> None:
        """PlanStale where it is no longer where the plan says (I-6, I-10)."""
        address, n_bytes = address_of(self._memory), self._memory.nbytes
        if (address, n_bytes) != (self.address, self.n_bytes):
            raise PlanStale(
                "I-6",
                f"the buffer {self.name} was at {self.address:#x} ({self.n_bytes} bytes) when the plan was made and is "
                f"at {address:#x} ({n_bytes} bytes) now; nothing may run on this plan any more",
            )

    def zero(self, guard: Guard) -> None:
        """Set every byte to 0; refused in decode mode, and of weights at any time."""
        guard.allow("I-5", f"zeroing the buffer {self.name}")
        if self.is_weight:
            raise InternalError(f"the buffer {self.name} holds weights, which nothing writes to")
        self._memory[...] = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One launch: `run` is bound to its buffers. A buffer in both `reads` and `writes` is changed in place."""

    name: str
    kind: str
    run: Callable[[], object]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weight_bytes: int = 0  # bytes of weights that belong here
    n_launches: int | None = None  # kernels that it launches; None where torch decides how many
    routed_bytes: int = 0  # of the weights, those of routed experts
    routed_share: float = 1.0  # of the routed experts, those that a row uses

    @property
    def text(self) -> str:
        return f"{self.name} ({self.kind}): {', '.join(self.reads)} -> {', '.join(self.writes)}"

    def guarded(self, guard: Guard) -> Node:
        """The same node for the host, which may run it outside decode mode only (I-8)."""

        def run() -> object:
            guard.allow("I-8", f"running the node {self.name}")
            return self.run()

        return replace(self, run=run)

    def read_bytes(self, n_rows: int) -> float:
        """Bytes of weights that a step of so many rows must read: of routed experts those that rows use which choose
        independently of each other, each once."""
        used = 1.0 - (1.0 - self.routed_share) ** n_rows
        return self.weight_bytes - self.routed_bytes * (1.0 - used)


@dataclass(frozen=True)
class Plan:
    """A step up to its step boundary. Each start builds the step boundary itself, because that depends on whether the
    host or the device paces."""

    device: str  # as torch writes it: cpu, cuda:0
    buffers: tuple[Buffer, ...]
    nodes: tuple[Node, ...]
    page_tokens: int
    constants: str = ""  # other values that the plan depends on, as text for the hash

    def __post_init__(self) -> None:
        known = [buffer.name for buffer in self.buffers]
        if len(set(known)) != len(known):
            raise InternalError("two buffers of a plan have one name")
        for node in self.nodes:
            unknown = {*node.reads, *node.writes} - set(known)
            if unknown:
                raise InternalError(f"node {node.name} uses {sorted(unknown)}, which the plan does not hold")
        written = {name for node in self.nodes for name in node.writes}
        if wrong := sorted(written & {buffer.name for buffer in self.weights}):
            raise InternalError(f"nodes write to {wrong}, which the plan holds as weights")
        self._refuse_aliases()

    @cached_property
    def text(self) -> str:
        """The plan as text, to read and to hash: the same in every process."""
        head = [self.constants, f"on {self.device.partition(':')[0]}, pages of {self.page_tokens} positions"]
        return "\n".join([*head, *(b.text for b in self.buffers), *(n.text for n in self.nodes)])

    @cached_property
    def hash(self) -> int:
        """63 bits of the plan's text."""
        return int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:8], "little") >> 1

    @property
    def weight_bytes(self) -> int:
        return sum(node.weight_bytes for node in self.nodes)

    def read_bytes(self, n_rows: int) -> float:
        """Bytes of weights that a step of so many rows must read."""
        return sum(node.read_bytes(n_rows) for node in self.nodes)

    @property
    def n_launches(self) -> int | None:
        """Kernels of a step up to its step boundary; None where some node leaves that to torch."""
        counts = [node.n_launches for node in self.nodes]
        return None if None in counts else sum(count for count in counts if count is not None)

    def buffer(self, name: str) -> Buffer:
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def check(self) -> None:
        """PlanStale where a buffer is no longer where the plan says (I-6, I-10)."""
        for buffer in self.buffers:
            buffer.check()

    def guarded(self, guard: Guard) -> Plan:
        """The same plan for the host, which may run its nodes outside decode mode only (I-8)."""
        return replace(self, nodes=tuple(node.guarded(guard) for node in self.nodes))

    @cached_property
    def weights(self) -> tuple[Buffer, ...]:
        """The model's tensors and what a backend has made of them: nothing writes to these buffers."""
        return tuple(buffer for buffer in self.buffers if buffer.is_weight)

    def _refuse_aliases(self) -> None:
        """Refuse a node that writes a buffer which overlaps another of its buffers: it could read half-written data."""
        by_name = {buffer.name: buffer for buffer in self.buffers}
        for node in self.nodes:
            for written in node.writes:
                for other in {*node.reads, *node.writes} - {written}:
                    if _overlap(by_name[written], by_name[other]):
                        raise InternalError(f"node {node.name} writes {written}, which overlaps {other}")


def _overlap(a: Buffer, b: Buffer) -> bool:
    return bool(a.n_bytes and b.n_bytes) and a.address < b.address + b.n_bytes and b.address < a.address + a.n_bytes


def without_repeats(buffers: list[Buffer]) -> list[Buffer]:
    """The buffers without repeated addresses: a tied head is the embedding, and is listed once."""
    seen: dict[int, Buffer] = {}
    for buffer in buffers:
        seen.setdefault(buffer.address, buffer)
    return list(seen.values())
