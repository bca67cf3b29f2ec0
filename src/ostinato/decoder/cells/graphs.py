"""When a graph is reserved, built or reused (GS-1..5).

A graph is what a backend builds for one shape of ubatch: on the eager CPU, a callable and the buffers for that shape.
Nothing here depends on its contents; the decoder and the encoder each use a `GraphScheduler` with a graph type of
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ostinato.backends.torch.allocate import is_out_of_memory
from ostinato.decoder.batch.ubatch import Ubatch
from ostinato.decoder.cells.settings import Settings
from ostinato.errors import AllocationFailed, ComputeFailed, DecodeError, InternalError

Graph = TypeVar("Graph")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a graph depends on besides shapes: settings, adapters, and the ids that have a backend sampler."""

    settings: Hashable = None
    adapters: Hashable = None
    samplers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Everything that a graph depends on: two ubatches with equal keys run in the same graph (GS-2)."""

    graph_type: str
    setup: Setup
    equal_seqs: bool
    n_tokens: int
    n_seq_tokens: int
    n_seqs: int
    n_seqs_unq: int
    has_token: bool
    has_embd: bool
    seq_id_unq: tuple[int, ...] | None  # only for equal ubatches
    n_outputs: int
    output: tuple[bool, ...] | None  # per token, only where there are samplers
    primary: tuple[int, ...] | None  # per token, only where there are samplers
    memory: Hashable  # visible cells after padding, streams, recurrent range


class PreparedGraph(NamedTuple, Generic[Graph]):
    """A graph for a ubatch, and whether it is the one that ran last."""

    graph: Graph
    reused: bool


class GraphScheduler(Generic[Graph]):
    """One stored graph, and the memory reserved for the largest one.

    `build` makes the graph of a key; `reserve` allocates what the worst case needs. Either may raise a DecodeError of
    its own; MemoryError becomes AllocationFailed and any other exception ComputeFailed.
    """

    def __init__(
        self, graph_type: str, build: Callable[[GraphKey], Graph], reserve: Callable[[GraphKey], object]
    ) -> None:
        self.graph_type = graph_type
        self.n_reserved = 0
        self.n_built = 0
        self.n_reused = 0
        self._build = build
        self._reserve = reserve
        self.reservation_due = True  # whether the worst case must be reserved before the next run
        self._stored: tuple[GraphKey, Graph] | None = None

    def key(self, ubatch: Ubatch, setup: Setup, *, n_outputs: int, memory: Hashable) -> GraphKey:
        """The key of the graph that runs this ubatch; `memory` is the shape that its cursor reports."""
        return GraphKey(
            graph_type=self.graph_type,
            setup=setup,
            equal_seqs=ubatch.equal_seqs,
            n_tokens=ubatch.n_tokens,
            n_seq_tokens=ubatch.n_seq_tokens,
            n_seqs=ubatch.n_seqs,
            n_seqs_unq=ubatch.n_seqs_unq,
            has_token=ubatch.token is not None,
            has_embd=ubatch.embd is not None,
            seq_id_unq=tuple(ubatch.seq_id_unq.tolist()) if ubatch.equal_seqs else None,
            n_outputs=n_outputs,
            output=tuple(ubatch.output.tolist()) if setup.samplers else None,
            primary=tuple(ubatch.primary.tolist()) if setup.samplers else None,
            memory=memory,
        )

    def worst_key(self, limits: Settings, setup: Setup, *, memory: Hashable) -> GraphKey:
        """The key of the largest possible ubatch: all tokens, all sequences, all outputs (GS-1)."""
        n_tokens, n_seqs = min(limits.n_ctx, limits.n_ubatch), limits.n_seq_max
        return GraphKey(
            graph_type=self.graph_type,
            setup=setup,
            equal_seqs=True,
            n_tokens=n_tokens,
            n_seq_tokens=-(-n_tokens // n_seqs),
            n_seqs=n_seqs,
            n_seqs_unq=n_seqs,
            has_token=True,
            has_embd=False,
            seq_id_unq=tuple(range(n_seqs)),
            n_outputs=min(n_tokens, limits.n_outputs_max),
            output=None,
            primary=None,
            memory=memory,
        )

    def request_reservation(self) -> None:
        """Make a reservation due: samplers, causal setting or adapters changed, or memory was updated (GS-1, UP-8)."""
        self.reservation_due = True
        self.invalidate()

    def invalidate(self) -> None:
        """Forget the stored graph: after a failed run, a reset or an update (GS-3)."""
        self._stored = None

    def ensure_reserved(self, worst: GraphKey) -> bool:
        """Reserve for the worst case if that is due; returns whether it was. After a failure it is still due."""
        if not self.reservation_due:
            return False
        self.invalidate()  # a new reservation moves the buffers
        classed("could not reserve the worst-case graph", lambda: self._reserve(worst))
        self.reservation_due = False
        self.n_reserved += 1
        return True

    def prepare(self, key: GraphKey) -> PreparedGraph[Graph]:
        """The stored graph if it was built for an equal key, else a new one."""
        if self.reservation_due:
            raise InternalError("a graph was asked for before the worst case was reserved")  # GS-1
        if self._stored is not None and self._stored[0] == key:
            self.n_reused += 1
            return PreparedGraph(self._stored[1], reused=True)
        self.invalidate()
        graph = classed("could not build a graph", lambda: self._build(key))
        self._stored = (key, graph)
        self.n_built += 1
        return PreparedGraph(graph, reused=False)


def classed(
    what: str, work: Callable[[], Result], *, failed: type[DecodeError] = ComputeFailed, reason: str = "graph"
) -> Result:
    """Run `work`; any exception becomes a decode error (G-1, CX-2), except an InternalError, which is a bug."""
    try:
        return work()
    except (DecodeError, InternalError):
        raise
    except Exception as error:
        kind = AllocationFailed if is_out_of_memory(error) else failed
        raise kind(f"{what}: {str(error) or 'no memory'}", reason=reason) from error
