"""The step of one model on the tape: its weights, the buffers between blocks, and the kernel's one argument.

`backend.py` says what the kernel cannot express, `sizes.py` how a block's shared memory is shared out, `program.py`
what the kernel is compiled from. `TapeStep` packs the weights, owns the buffers between blocks, and fills the argument,
field by field as `parts.h` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int, c_uint64, c_void_p
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from ostinato.backends.cuda.launch import checked
from ostinato.backends.cuda.scratch import scratch_elements
from ostinato.backends.tape.matrices import attention_of, has_after_norms, on_tape, plain_embedding
from ostinato.backends.tape.pack import TapeSource, tape_of
from ostinato.backends.tape.partition import Segment, TapeMatrix, matrix_bytes
from ostinato.backends.tape.program import TapeProgram, n_clocked
from ostinato.backends.tape.sizes import QKV_SEGMENTS, SPLITS, heads_of
from ostinato.backends.tape.tape_weight import Tape
from ostinato.backends.torch.allocate import zeros
from ostinato.backends.torch.arrays import as_tensor
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.paged import PagedMemory
from ostinato.backends.torch.plan import memory_tensors, tensors_of
from ostinato.errors import BadPointer, InternalError
from ostinato.loop.layout import Tables
from ostinato.loop.memory import version_of
from ostinato.loop.plan import Buffer, Node, Plan, without_repeats
from ostinato.models.blocks import Layer, Norm

SUMMARY_WORDS: Final = 8  # of a block's summary of a row's logits

_VIEW: Final = ("table", "admissions", "rings", "grammars")
_POINTERS: Final = (
    *("tape", "tape_at", "segments", "norms", "qkv_bias", "qk_norms"),
    *("frequencies", "embedding", "caches", "windows", "groups"),
    *("x", "qkv", "parts", "attended", "inside", "summaries", "marks"),
    *("logits", "scaled", "state", "after_norms", "squares", "clock"),
)


class _TapeView(Structure):
    _fields_ = tuple((name, c_void_p) for name in _VIEW)


class Argument(Structure):
    """What the kernel is launched with: `struct Tape`."""

    _fields_ = (
        ("view", _TapeView),
        *((name, c_uint64) for name in ("plan_hash", "epoch")),
        *((name, c_void_p) for name in _POINTERS),
        ("single", c_int),
    )


class TapeStep:
    """Weights on the tape, the buffers between blocks, and the argument over them.

    `model` is the one that prompts go through: that which was given, or with `on_tape` one that has its matrices on the
    tape alone, so that a caller that frees the first keeps one copy of them.
    """

    def __init__(
        self, model: Model, memory: PagedMemory, tables: Tables, program: TapeProgram, *, on_tape: bool = False
    ) -> None:
        self.sizes, self.partition, self.header = program.sizes, program.partition, program.header
        self.buffers = self._weights(model, program.sources, [name.endswith("qkv") for name in program.names])
        between = self._between(model, tables.layout.vocab)
        self.buffers |= between
        self.written = tuple(between)
        self._caches(model, memory)
        self._device, self._notes_times = model.device, False
        self._viewed = viewed_memory(tables)
        self.argument = self._argument(tables)
        self.n_plain_bytes = sum(b.n_bytes for b in without_repeats(_weight_buffers(model)))  # what prompts could read
        self.n_scratch_bytes = scratch_elements(model) * model.dtype.itemsize
        named = zip(program.names, program.sources, strict=True)
        layers = [source.matrix for name, source in named if name != "head"]
        self.prompts = self._read_and_written(layers, model.dtype) if on_tape else self._read_plain()
        self.model = self.on_tape(model) if on_tape else model

    @property
    def n_bytes(self) -> int:
        """Of the tape itself."""
        return self.partition.n_bytes

    def _read_plain(self) -> str:
        return (
            f"a plain copy of {self.n_plain_bytes} bytes for prompts, "
            f"which could read the tape through {self.n_scratch_bytes} bytes of scratch"
        )

    def _read_and_written(self, layers: Sequence[TapeMatrix], dtype: torch.dtype) -> str:
        read = sum(matrix_bytes(m.weight_type, m.rows, m.columns, self.sizes.grid.n_compute_warps) for m in layers)
        written = sum(m.rows * m.columns for m in layers) * dtype.itemsize
        return (
            f"prompts read it through {self.n_scratch_bytes} bytes of scratch, in place of a plain copy of "
            f"{self.n_plain_bytes} bytes: a chunk reads {read} bytes and writes {written} before it multiplies"
        )

    def on_tape(self, model: Model) -> Model:
        """The model as prompts read it from this tape."""
        tape = Tape(self.buffers["tape"], self.partition, model.dtype)
        return on_tape(model, tape, self.buffers["embedding"])

    def built(self, plan_hash: int, executable: int) -> None:
        """What the step boundary compares at every step (I-10)."""
        self.argument.plan_hash, self.argument.epoch = plan_hash, executable

    def checked_argument(self, *, single: bool) -> Argument:
        """The argument of one launch, with every address through the gate of launches (E-1): BadPointer, by name, where
        it is not that of the tensor that it was made of, or where that tensor is no longer there."""
        expected = {name: _address(name, tensor, self._device) for name, tensor in self.buffers.items()}
        if not self._notes_times:
            expected["clock"] = 0
        expected |= {f"view.{name}": _address(name, memory, memory.device) for name, memory in self._viewed.items()}
        given = {name: getattr(self.argument, name) for name in _POINTERS}
        given |= {f"view.{name}": getattr(self.argument.view, name) for name in _VIEW}
        for name, address in given.items():
            if (address or 0) != expected.get(name, 0):
                raise BadPointer(
                    f"{name} of the persistent kernel is {address or 0:#x}, and its memory is at "
                    f"{expected.get(name, 0):#x}; it is not launched"
                )
        self._check_caches()
        copied = Argument.from_buffer_copy(self.argument)
        copied.single = single
        return copied

    def _check_caches(self) -> None:
        """The same for keys and values, whose addresses the kernel reads from a table in the device's memory."""
        if version_of(self.buffers["caches"]) != self._caches_version:
            raise BadPointer("the table of addresses of keys and values was written to; the kernel is not launched")
        for number, (part, address) in enumerate(self._kept):
            if part.data_ptr() != address:
                raise BadPointer(
                    f"part {number} of keys and values is at {part.data_ptr():#x}, and the persistent kernel has "
                    f"{address:#x}; it is not launched"
                )

    def note_times(self) -> None:
        """From the next launch on, every block notes when it begins each phase: for the timeline (`lab/tape.py`)."""
        self._notes_times = True
        self.argument.clock = self.buffers["clock"].data_ptr()

    def _weights(self, model: Model, sources: Sequence[TapeSource], of_qkv: Sequence[bool]) -> dict[str, Tensor]:
        s, device = model.shape, model.device
        attention = [attention_of(model, number) for number in range(s.n_layers)]
        assert model.norm is not None
        norms = [norm for layer in model.layers for norm in (layer.attention_norm, layer.mlp_norm) if norm is not None]
        made = {
            "tape": tape_of(sources, self.partition, device, model.dtype),
            "tape_at": torch.tensor(self.partition.begins, dtype=torch.int64, device=device),
            "segments": torch.tensor(self._segments(of_qkv), dtype=torch.int32, device=device),
            "norms": _stacked([*norms, model.norm]),
            "frequencies": torch.stack([model.frequencies[rope].float() for rope in s.rope_kinds]),
            "windows": torch.tensor([one.shape.window or 0 for one in attention], dtype=torch.int32, device=device),
            "embedding": plain_embedding(model),
        }
        biases = [one.qkv.bias for one in attention]
        if biases[0] is not None:
            made["qkv_bias"] = torch.stack([bias.float() for bias in biases if bias is not None]).contiguous()
        pairs = [(one.q_norm, one.k_norm) for one in attention]
        if pairs[0][0] is not None:
            made["qk_norms"] = _stacked([norm for pair in pairs for norm in pair if norm is not None])
        if has_after_norms(model):
            layers = [layer for layer in model.layers if isinstance(layer, Layer)]
            after = [norm for layer in layers for norm in (layer.after_attention, layer.after_mlp) if norm is not None]
            made["after_norms"] = _stacked(after)
        return made

    def _segments(self, of_qkv: Sequence[bool]) -> list[Segment]:
        """As the kernel counts them: three for q, k and v, of which those after the last part are empty."""
        listed: list[Segment] = []
        for is_qkv, run in groupby(zip(of_qkv, self.partition.segments, strict=True), key=lambda pair: pair[0]):
            found = [segment for _, segment in run]
            listed += found
            if is_qkv:
                listed += [found[-1]._replace(n_tiles=0)] * (QKV_SEGMENTS - len(found))
        return listed

    def _between(self, model: Model, vocab: int) -> dict[str, Tensor]:
        """What blocks hand each other: a word has a value and its tag. Zeroed: no tag is 0."""
        s, n, device, n_blocks = model.shape, self.sizes.n_slots, model.device, self.sizes.grid.n_blocks
        heads = heads_of(s)
        words = {
            "x": (4, n, s.hidden),
            "qkv": (2, n, heads.qkv_width),
            "parts": (2, n, heads.n_heads, SPLITS, heads.head_width + 2),
            "attended": (2, n, heads.out_width // 2),
            "inside": (2, n, s.widest_ff // 2),
            "summaries": (n, n_blocks, SUMMARY_WORDS),
            "marks": (n_blocks + 2 * n + 1,),
            "clock": (n_blocks, n_clocked(s)),
            **({"squares": (4, n, s.hidden // 16)} if has_after_norms(model) else {}),
        }
        made = {name: zeros(shape, torch.int64, device) for name, shape in words.items()}
        for name in ("logits", "scaled"):
            made[name] = zeros((n, vocab), torch.float32, device)
        made["state"] = zeros((2,), torch.int32, device)
        return made

    def _caches(self, model: Model, memory: PagedMemory) -> None:
        assert memory.kv is not None
        # Of a layer: keys and values, then where they are quantised the scales of both.
        kept = [(memory.kv.keys[i].parts, memory.kv.values[i].parts) for i in range(model.shape.n_layers)]
        parts = [part for both in kept for pair in zip(*both, strict=True) for part in pair]
        self._kept = [(part, part.data_ptr()) for part in parts]
        caches = torch.tensor([address for _, address in self._kept], dtype=torch.int64, device=model.device)
        self.buffers["caches"], self._caches_version = caches, version_of(caches)
        self.buffers["groups"] = torch.tensor([*memory.group_of.values()], dtype=torch.int32, device=model.device)

    def _argument(self, tables: Tables) -> Argument:
        argument = Argument(_TapeView(*tables.addresses, tables.grammar_address or None))
        for name, tensor in self.buffers.items():
            setattr(argument, name, tensor.data_ptr())
        argument.clock = None  # marks cost a little: `note_times` turns them on
        return argument


def viewed_memory(tables: Tables) -> dict[str, Tensor]:
    """What the kernel has of the tables, by name: the arenas, and the grammar memory where there is one."""
    grammars = {} if tables.grammars is None else {"grammars": as_tensor(tables.grammars.plain_words)}
    return {
        "table": tables.table.memory,
        "admissions": tables.admissions.memory,
        "rings": tables.rings.memory,
    } | grammars


def _stacked(norms: Sequence[Norm]) -> Tensor:
    return torch.stack([norm.weight.float() for norm in norms]).contiguous()


def _address(name: str, tensor: Tensor, device: torch.device) -> int:
    """Of a tensor that a kernel may be launched on; BadPointer where it may not."""
    return checked(name, tensor, dtype=tensor.dtype, shape=[None] * tensor.dim(), device=device).data_ptr()


def tape_plan(model: Model, memory: PagedMemory, tables: Tables, step: TapeStep) -> Plan:
    """Everything that the kernel reads and writes, as one node: it runs the whole step. Its text says how many bytes
    the tape has, and what prompts read. `model` is the step's own."""
    viewed = viewed_memory(tables)
    own = [Buffer.of(name, memory) for name, memory in viewed.items()]
    own += [Buffer.of(name, part, is_weight=name not in step.written) for name, part in step.buffers.items()]
    kept = [Buffer.of(name, tensor) for name, tensor in memory_tensors(memory)]
    known = {buffer.address for buffer in own}
    plain = [b for b in without_repeats(_weight_buffers(model)) if b.address not in known]
    written = (*(name for name in viewed if name != "admissions"), *step.written, *(buffer.name for buffer in kept))
    read = (*written, "admissions", *(name for name in step.buffers if name not in step.written))
    node = Node("step", "tape", _run_whole, read, written, step.n_bytes, 1)
    constants = f"{step.header}tape of {step.n_bytes} bytes for {step.sizes.grid.n_blocks} blocks; {step.prompts}"
    return Plan(str(model.device), (*own, *kept, *plain), (node,), memory.page_tokens, constants)


def _run_whole() -> None:
    raise InternalError("only the kernel of the tape can run its step; use Start.step")


def _weight_buffers(model: Model) -> list[Buffer]:
    return [Buffer.of(name, tensor, is_weight=True) for name, tensor in tensors_of(model, "model")]
