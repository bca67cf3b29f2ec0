"""The contract of a backend: what the engine asks of the code that computes.

`Backend` says what each of them offers, `Settled` is what the chooser hands to the one that will run, and `Chunks` is
how prompts go through it. Nothing here imports torch. docs/add-a-backend.md lists what a new one needs.

A chunk carries rows of one or several sequences into their pages. It is run as work beside the decode loop
(`Start.beside`): on a GPU `run` only enqueues, and what it returns is filled when that work is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ostinato.backends.loading import Progress
from ostinato.backends.machine import Chip, DeviceKind, Machine, kind_of
from ostinato.cache.groups import PageGroup, page_groups
from ostinato.cache.state_block import CellForm
from ostinato.errors import InternalError
from ostinato.files.unpack import Bytes, Floats
from ostinato.loop.layout import OUTBOX_ENTRIES, Layout
from ostinato.models.header import HeaderTensors
from ostinato.options import Activations, KVType, LoadOptions

if TYPE_CHECKING:
    from ostinato.backends.runner import Runner
    from ostinato.loop.plan import Buffer
    from ostinato.models.blocks import LoadedModel, ModelBlocks
    from ostinato.models.shape import Shape
    from ostinato.models.tensors import TensorTable

# Positions of a page: what a GPU reads at once, and a smaller page where memory is scarce.
PAGE_TOKENS: Final[Mapping[str, int]] = {"cuda": 64, "cpu": 16}
# Rows of a chunk, at most: products are at full speed, and a running loop waits for no more. Torch's own chunks have as
# many on a GPU as on the CPU.
CHUNK_ROWS: Final[Mapping[str, int]] = {"cuda": 512, "cpu": 256}
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
PageTables = Sequence[Sequence[int]]  # of one sequence, one for each group of layers
WeightLayout = Literal["dense", "packed", "tiles"]
PromptWeights = Literal["plain", "tape"]
OutputKind = Literal["hidden", "logits", "logprobs"]
LOGITS_BYTES: Final = 64 << 20  # of logits that are there at once: those given, or those behind log-probabilities


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Consecutive positions of one sequence: those of `tokens`, from `start` on, into the pages of its page tables,
    of which there is one for each group of layers.

    `slot`: the slot whose first token is sampled from the last row (`Chunks.first`), or whose recurrent state advances;
    None for a sequence that holds no slot. `outputs`: which rows are asked for, by their index in `tokens`.
    `rope_set`: of the frequencies that rotate the sequence (`Shape.rope_set`). `segments`: of an encoder's pair of
    texts, which of the two each token is of; empty where all are of the first.
    """

    tokens: Sequence[int]
    start: int
    page_tables: PageTables
    slot: int | None = None
    outputs: Sequence[int] = ()
    rope_set: int = 0
    segments: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ChunkWant:
    """What is computed of the output rows of a chunk.

    `hidden`: the rows after the final norm. `logits`: float32 logits. `logprobs`: the log-probability of each row's
    target, and the `top` most likely tokens among the first `n_tokens` ids.
    """

    kind: OutputKind
    targets: Sequence[int] = ()
    top: int = 0
    n_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """The output rows of a chunk, in the order of its parts; what was not asked for is None. The arrays are the
    caller's own, and hold their values when the chunk's work is done."""

    hidden: Floats | None = None  # [rows, hidden]
    logits: Floats | None = None  # [rows, vocab]
    logprobs: Floats | None = None  # [rows]
    top_ids: NDArray[np.int32] | None = None  # [rows, top]
    top_logprobs: Floats | None = None  # [rows, top]


class Chunks(Protocol):
    """Runs chunks of prompts and of texts that are scored or embedded. A row's bits are those it has alone."""

    rows: int  # of any chunk, at most
    max_outputs: int  # rows of logits of one chunk, at most; hidden rows and log-probabilities are given of every row
    failures: Mapping[int, str]  # chunks, by their rows, that could not be captured, and why
    any_cut: bool  # a prompt has the same bits wherever it is cut

    @property
    def captured(self) -> Sequence[Buffer]:
        """What graphs of chunks are bound to; nothing where every launch takes its memory anew."""

    @property
    def n_copies(self) -> int:
        """Copies between host and device, so far."""

    def rows_for(self, n_prompt: int) -> int:
        """Rows of every chunk of a prompt of this length; prompts with the same number share what was computed."""

    def run(self, parts: Sequence[ChunkPart], rows: int, want: ChunkWant | None = None) -> ChunkOutput:
        """Compute the parts into their pages, as a chunk of so many rows."""

    def first(self, slot: int) -> None:
        """Sample the first token from the last row that ran for this slot, by its staged admission."""


def rows_of_logits(vocab: int, rows: int) -> int:
    """How many rows of logits are there at once, of a chunk of so many rows.

    >>> rows_of_logits(49_152, 256), rows_of_logits(262_144, 256)
    (256, 64)
    """
    return max(1, min(rows, LOGITS_BYTES // (4 * vocab)))


def output_rows(parts: Sequence[ChunkPart], want: ChunkWant | None, max_outputs: int, vocab: int) -> list[int]:
    """The rows that are asked for, by their index in the chunk; InternalError where they cannot be given so.

    >>> parts = [ChunkPart([7, 8, 9], 0, [[0]], outputs=[2]), ChunkPart([5, 6], 0, [[1]], outputs=[0, 1])]
    >>> output_rows(parts, ChunkWant("hidden"), 1, 100)
    [2, 3, 4]
    """
    found: list[int] = []
    n_before = 0
    for part in parts:
        if any(not 0 <= row < len(part.tokens) for row in part.outputs):
            raise InternalError(f"rows {list(part.outputs)} are asked for of a part that has {len(part.tokens)}")
        found += [n_before + row for row in part.outputs]
        n_before += len(part.tokens)
    if want is None:
        if found:
            raise InternalError(f"{len(found)} rows are asked for, and nothing is wanted of them")
    elif want.kind == "logits" and len(found) > max_outputs:
        raise InternalError(f"logits of {len(found)} rows are asked for; at most {max_outputs} are given at once")
    elif want.kind == "logprobs":
        if len(want.targets) != len(found) or any(not 0 <= target < vocab for target in want.targets):
            raise InternalError(f"{len(found)} rows are asked for, and their targets are {list(want.targets)}")
        if not 0 <= want.top <= (want.n_tokens or vocab) <= vocab:
            raise InternalError(f"the {want.top} most likely of {want.n_tokens} tokens of {vocab} are asked for")
    return found


class SequenceCopy(Protocol):
    """Copies one sequence between a backend's memory and the host, its positions in order. Rows are bytes
    [positions, bytes of a cell]: keys of every layer, then values of every layer, then states, which have one row.

    Run as work beside the loop: what is read from a GPU is there when that work is done, and what is written is kept
    until then.
    """

    def kv_cells(self, layers: Sequence[int]) -> tuple[CellForm, ...]:
        """One cell of each tensor of `read_kv`."""

    def state_cells(self) -> tuple[CellForm, ...]:
        """The same of `read_states`."""

    def read_kv(self, layers: Sequence[int], pages: PageTables, positions: range) -> list[Bytes]:
        """Keys and values of these layers; scales follow each where there are some."""

    def write_kv(self, layers: Sequence[int], pages: PageTables, positions: range, rows: Sequence[Bytes]) -> None:
        """Write what `read_kv` gave."""

    def read_states(self, slot: int) -> list[Bytes]:
        """The recurrent states of a slot, layer by layer."""

    def write_states(self, slot: int, rows: Sequence[Bytes]) -> None:
        """Write what `read_states` gave."""

    def staged(self, rows: Bytes) -> Bytes:
        """The same rows in memory that can be written from without waiting."""


# What is settled, and by whom it can be run


@dataclass(frozen=True, slots=True)
class Settled:
    """Where and how a model runs: made by the chooser, read by the backends."""

    device: str  # cpu, or cuda:N
    backend: str
    mode: str
    dtype: str  # float32, bfloat16 or float16
    kv_type: KVType
    context: int
    n_slots: int = 1
    n_pages: int = 0  # for all slots together, of keys and values of layers that see everything
    n_tokens: int | None = None  # ids that the tokenizer knows, those beyond are never chosen; None: the vocabulary
    weights: WeightLayout = "dense"  # packed: as in the file where kernels multiply that type; tiles: the native loop's
    activations: Activations = "wide"  # of the native loop and of the persistent kernel
    prompts: PromptWeights = "plain"  # what they read
    threads: int | None = None  # on the CPU; None on a GPU
    grammar_bytes: int = 0  # of the memory from which the loop reads grammars; 0 where the host follows them
    other_sums: str | None = None  # what this chip sums to other bits than where kernels were tuned
    why_not: tuple[str, ...] = ()  # for each mode above this one, its name and why it does not run
    fallback: str | None = None  # the mode that takes its place, once, where it cannot be built (E-57)
    fell_back: str | None = None  # why this one took another's place

    @property
    def kind(self) -> DeviceKind:
        return kind_of(self.device)

    @property
    def page_tokens(self) -> int:
        return PAGE_TOKENS[self.kind]

    @property
    def max_pages(self) -> int:
        """Of one sequence."""
        return self.pages_for(self.context)

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_tokens)

    def groups(self, shape: Shape) -> tuple[PageGroup, ...]:
        """The groups of layers that share a page table, and the pages that each has."""
        return page_groups(
            shape,
            context=self.context,
            n_pages=self.n_pages,
            page_tokens=self.page_tokens,
            chunk_rows=CHUNK_ROWS[self.kind],
        )

    def tables_layout(self, shape: Shape, outbox_entries: int = OUTBOX_ENTRIES) -> Layout:
        """Of the loop's tables."""
        n_groups = len(self.groups(shape))
        return Layout(self.n_slots, self.max_pages, shape.vocab, outbox_entries=outbox_entries, n_groups=n_groups)

    def tokens_of(self, shape: Shape) -> int:
        """Ids that may be chosen: the first so many of the vocabulary."""
        return shape.vocab if self.n_tokens is None else self.n_tokens

    def instead(self, mode: str, backend: str, why: str) -> Settled:
        """The same with the mode that takes this one's place."""
        said = f"{self.mode}: {why} (tried once; {mode} runs instead)"
        return replace(self, mode=mode, backend=backend, fallback=None, fell_back=said, why_not=(said, *self.why_not))


def dtype_of(options: LoadOptions, kind: DeviceKind) -> str:
    """What is computed in: as asked for, or the device's own."""
    if options.dtype != "auto":
        return options.dtype
    return "bfloat16" if kind == "cuda" else "float32"


def kv_type_of(options: LoadOptions, dtype: str) -> KVType:
    """How keys and values are kept: as asked for, or as wide as the rest."""
    return options.kv_type or ("f32" if dtype == "float32" else "bf16")


def why_not_kept(keeper: str, known: Sequence[KVType], kv_type: KVType) -> str | None:
    """Why keys and values cannot be kept so by something that keeps them in the known types; None where they can."""
    return None if kv_type in known else f"{keeper} keeps keys and values as {', '.join(known)}, not {kv_type}"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One thing that takes memory. `on_host` where that is not the model's device: pinned memory beside a GPU.
    `on_demand`: reserved, and used only as sequences grow or from a first request on; the rest is used when an engine
    is open."""

    name: str
    n_bytes: int
    on_host: bool = False
    on_demand: bool = False


class Backend(Protocol):
    """Runs models on one kind of device. Its requirements on a model name blocks, sizes and weight types, never a
    family, and can be checked from the header alone."""

    name: str
    device: DeviceKind
    modes: tuple[str, ...]  # from high to low
    activations: tuple[Activations, ...]  # that it multiplies weights with
    kv_types: tuple[KVType, ...]  # that it keeps keys and values in
    alone: bool  # while it runs, nothing else runs on its device
    opens_encoders: bool  # texts of an encoder are chunks of its runner; else torch's decoder takes them

    def why_not_here(self, mode: str, machine: Machine) -> str | None:
        """Why a machine cannot run a mode, whatever the model; None where it can."""

    def why_not(
        self, mode: str, shape: Shape, tensors: HeaderTensors, options: LoadOptions, machine: Machine
    ) -> str | None:
        """Why a mode cannot run such a model, opened with these options on this machine; None where it can. Asked
        before any weight is read; the backend's limits are known only here."""

    def layout(self, shape: Shape, options: LoadOptions, kind: DeviceKind) -> WeightLayout:
        """How it keeps matrices on such a device."""

    def other_sums(self, shape: Shape, settled: Settled, chip: Chip | None) -> str | None:
        """What a chip sums to other bits than the one where the kernels were tuned, for the digest; None if nothing."""

    def needs(self, shape: Shape, tensors: HeaderTensors, settled: Settled) -> tuple[MemoryRow, ...]:
        """Everything that it takes of memory; the rows of weights are called `weights` and `tape`."""

    def prepare(self, settled: Settled, talk: Callable[[str], None]) -> None:
        """Have what must be there before weights are read, native code above all; HardwareCannot where it cannot be
        had. `talk` is called with a message before long work."""

    def compile(self, blocks: ModelBlocks, table: TensorTable, settled: Settled) -> None:
        """Compile every kernel that an engine of these settings will run and that `prepare` could not know, before
        `load` takes memory for weights (E-9); HardwareCannot, with the kernel's name, where one cannot be had."""

    def load(
        self, blocks: ModelBlocks, table: TensorTable, settled: Settled, progress: Progress | None = None
    ) -> LoadedModel:
        """A model's blocks over their weights in this backend's layout; `progress` gets bytes read, and in all."""

    def open(self, model: ModelBlocks, settled: Settled, *, outbox_entries: int | None = None) -> Runner:
        """Tables, memory, plan, start and chunks of a model that was loaded, built: a mode that fails at that raises
        HardwareCannot here."""
