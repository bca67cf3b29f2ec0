"""Where a model runs and what it needs there: device, dtype, KV type, context and pages, settled before a byte is read.

A default context that does not fit is lowered, and said; one that the user asked for is refused with the figures.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import torch

from ostinato.backends.cuda.chip import Chip
from ostinato.backends.cuda.load import stays_packed
from ostinato.backends.native.library import cpu_library, why_no_native
from ostinato.backends.native.plan import why_not_native
from ostinato.backends.native.tile_weights import tiled_bytes
from ostinato.backends.tape.pack import WEIGHT_TYPES
from ostinato.backends.tape.partition import WeightType, matrix_bytes
from ostinato.backends.tape.plan import why_no_tape_on, why_not_rows, why_not_shape
from ostinato.backends.torch.amx import make_bfloat16_safe
from ostinato.backends.torch.paged import PAGE_TOKENS, page_bytes
from ostinato.decoder.memories import context_bytes
from ostinato.engine.cores import default_threads
from ostinato.engine.memory_plan import Wanted, memory_plan
from ostinato.engine.open import why_no_while_graph
from ostinato.errors import BadOption, ContextTooLarge, HardwareCannot
from ostinato.files.checkpoint import Checkpoint, TensorInfo
from ostinato.models.shape import Shape
from ostinato.options import Activations, KVType, LoadOptions

# The rest is for activations, logits and whoever else lives on the machine.
USABLE_SHARE: Final = 0.9
LEAST_CONTEXT: Final = 128
FREE_WHEN_NOT_TOLD: Final = 8 * 2**30
# Of the families that the persistent kernel plays, in either format.
EMBEDDINGS: Final = ("token_embd.weight", "model.embed_tokens.weight")
HEADS: Final = ("output.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Placement:
    """The settled answer: where and how the model will run."""

    device: torch.device
    dtype: torch.dtype
    kv_type: KVType
    context: int
    mode: str = "auto"  # as asked for; what runs is the engine's to say
    n_slots: int = 1
    n_pages: int = 0  # of keys and values, for all slots together
    packed: bool = False  # matrices stay in the file's own type where kernels multiply it
    tiles: Activations | None = None  # matrices go into the native loop's tiles, to be multiplied with such activations
    threads: int | None = None  # on the CPU; None: as many as torch was told
    activations: Activations = "wide"  # of the native loop and of the persistent kernel
    prompts: Literal["plain", "tape"] = "plain"  # what they read
    room_for_tape: bool = True  # False: `auto` must do without the persistent kernel


def settle(
    checkpoint: Checkpoint, shape: Shape, options: LoadOptions, talk: Callable[[str], None], *, compiled: bool = True
) -> Placement:
    """Settle what the options leave open, and refuse what does not fit.

    `compiled`: native code that must be compiled is, here, before anything is read; else it is only asked for.
    """
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    if dtype == torch.bfloat16 and device.type == "cpu":
        make_bfloat16_safe(talk)
    kv_type: KVType = options.kv_type or ("f32" if dtype == torch.float32 else "bf16")
    packed = keeps_packed(options.dtype, device, shape)
    tiles = choose_tiles(options, device, shape, talk, compiled=compiled)
    may_have_tape = has_tape(options, shape, dtype, kv_type, device)
    if options.activations != "wide" and tiles is None and not may_have_tape:
        raise BadOption(
            f"--activations {options.activations} is for the CPU's native loop and for --mode persistent on a GPU, and "
            "neither will run here; leave it out"
        )
    weights = weight_bytes(checkpoint, dtype, packed=packed, tiled=tiles is not None)
    tape = tape_bytes(checkpoint, shape, dtype, packed=packed) if may_have_tape else 0
    free = int(free_bytes(device) * USABLE_SHARE)
    wanted = options.context or shape.default_context
    one = _pages_for(wanted, device)  # what more there is of them is made of what is left
    both = Wanted(shape, weights, device, dtype, kv_type, options.slots, wanted, one, tape_bytes=tape)
    asked_for = options.mode == "persistent" or options.prompts == "tape" or options.activations != "wide"
    room_for_tape = not may_have_tape or asked_for or memory_plan(both, free).fits
    if not room_for_tape:
        tape, both = 0, replace(both, tape_bytes=0)
    prompts = choose_prompts(options, both, free, talk)
    if prompts == "tape":
        _check_host(weights)
        weights = beside_tape_bytes(checkpoint, shape, dtype, packed=packed)
    weights += tape
    if weights > free:
        how = "packed" if tiles else f"as {str(dtype).removeprefix('torch.')}"
        if tape:
            how += f", {gib(tape)} of it {'once more ' if prompts == 'plain' else ''}for the persistent kernel,"
        advice = "try --prompts tape, or " if tape and prompts == "plain" else _narrower(dtype, tiles)
        raise HardwareCannot(
            f"the weights need {gib(weights)} {how} and {device} has {gib(free)} to give; {advice}take a smaller model"
        )
    left = free - weights
    context = choose_context(shape, kv_type, options.context, left, device, talk)
    n_pages = choose_pages(shape, kv_type, context, options.slots, left, device) if shape.causal else 0
    threads = threads_for(options, device)
    return Placement(
        device=device,
        dtype=dtype,
        kv_type=kv_type,
        context=context,
        mode=options.mode,
        n_slots=options.slots,
        n_pages=n_pages,
        packed=packed,
        tiles=tiles,
        threads=threads,
        activations=options.activations,
        prompts=prompts,
        room_for_tape=room_for_tape,
    )


def choose_prompts(
    options: LoadOptions, both: Wanted, free: int, talk: Callable[[str], None]
) -> Literal["plain", "tape"]:
    """What prompts read. The tape where that was asked for, or where it does not fit beside a plain copy of the
    weights, which is faster; `both` is an engine that has the two of them."""
    if both.tape_bytes == 0:
        if options.prompts == "tape":
            raise BadOption("--prompts tape is for --mode persistent on a GPU, which will not run here; leave it out")
        return "plain"
    if options.prompts != "auto":
        return options.prompts
    plan = memory_plan(both, free)
    if plan.fits:
        return "plain"
    talk(
        f"prompts read the persistent kernel's tape of {gib(both.tape_bytes)}: beside a plain copy of "
        f"{gib(both.weight_bytes)} this engine would need {gib(plan.device_bytes)}, and {both.device} has {gib(free)}"
    )
    return "tape"


def _check_host(weights: int) -> None:
    """Whether matrices can wait in the host's memory for their turn to be laid out on the tape."""
    free = free_host_bytes()
    if weights > free:
        raise HardwareCannot(
            f"{gib(weights)} of weights wait in the host's memory while they are laid out for --prompts tape, and it "
            f"has {gib(free)} to give; use --prompts plain, or --mode loop"
        )


def _narrower(dtype: torch.dtype, tiles: Activations | None) -> str:
    """Advice on how weights that were dequantised would be smaller."""
    return "try --dtype bfloat16, or " if dtype == torch.float32 and tiles is None else ""


def threads_for(options: LoadOptions, device: torch.device) -> int | None:
    """What the CPU computes with: as asked for, or its cores; None where a GPU does."""
    return options.threads or (default_threads() if device.type == "cpu" else None)


def use_threads(placement: Placement) -> None:
    """Tell torch, whose threads are one number for the whole process."""
    if placement.threads is not None:
        torch.set_num_threads(placement.threads)


def choose_tiles(
    options: LoadOptions, device: torch.device, shape: Shape, talk: Callable[[str], None], *, compiled: bool
) -> Activations | None:
    """The activations that tiles are multiplied with, where the CPU's native loop will run; else None.

    Where the mode is left open and the loop cannot run, what runs instead is said; where it was asked for, refused.
    """
    if device.type != "cpu" or not shape.causal or options.mode not in ("auto", "loop"):
        return None
    reason = why_not_tiles(options.dtype, shape)
    if reason is None:
        try:
            if compiled:
                cpu_library(talk)
            return options.activations
        except HardwareCannot as error:
            reason = str(error)
    if options.mode == "loop":
        raise HardwareCannot(f"mode 'loop' cannot run here: {reason}")
    if options.dtype == "auto":
        talk(f"the native loop cannot run here: {reason}; eager runs instead")
    return None


def why_not_tiles(wanted: str, shape: Shape) -> str | None:
    """Why matrices are not kept in the native loop's tiles, as far as that can be known without compiling it."""
    if wanted != "auto":
        return f"--dtype {wanted} asks for dense weights, and the native loop multiplies packed ones: leave it out"
    return why_not_native(shape) or why_no_native()


def choose_device(wanted: str) -> torch.device:
    """The device of that name; `auto` is the first GPU where there is one, else the CPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise HardwareCannot(f"device {wanted}: {why_no_cuda()}; use --device cpu")
    device = torch.device("cuda" if wanted == "auto" else wanted)
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise HardwareCannot(f"device {wanted}: this machine has {torch.cuda.device_count()} GPU(s), numbered from 0")
    return torch.device("cuda", index)


def why_no_cuda() -> str:
    """Why no CUDA device can be used here."""
    if torch.version.cuda is None:
        return "this build of torch has no CUDA"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA driver or no GPU"
    return "a CUDA device is there"


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.float32 if wanted == "float32" else torch.bfloat16


def choose_context(
    shape: Shape,
    kv_type: KVType,
    wanted: int | None,
    free: int,
    device: torch.device,
    talk: Callable[[str], None],
) -> int:
    """The context asked for, or as much of the model's own as fits."""

    def needed(context: int) -> int:
        paged = _pages_for(context, device) * page_bytes(shape, kv_type, PAGE_TOKENS[device.type])
        return max(context_bytes(shape, kv_type, context), paged)

    most = bisect_right(range(shape.context + 1), free, key=needed) - 1
    if wanted is not None:
        if wanted > shape.context:
            raise ContextTooLarge(f"--context {wanted}: this model was trained for {shape.context} positions at most")
        if wanted > most:
            raise ContextTooLarge(
                f"--context {wanted} needs {gib(needed(wanted))} for keys and values as {kv_type}, and {device} "
                f"has {gib(free)} left; at most {most} fit"
            )
        return wanted
    if most < LEAST_CONTEXT:
        raise HardwareCannot(f"{device} has {gib(free)} left beside the weights: too little for keys and values")
    if most < shape.default_context:
        talk(
            f"the model's context of {shape.default_context} tokens needs {gib(needed(shape.default_context))} and "
            f"{gib(free)} are left on {device}; using {most}"
        )
    return min(most, shape.default_context)


def choose_pages(shape: Shape, kv_type: KVType, context: int, n_slots: int, free: int, device: torch.device) -> int:
    """Pages for every slot's whole context, or what fits the free memory; at least one whole context."""
    one = _pages_for(context, device)
    size = page_bytes(shape, kv_type, PAGE_TOKENS[device.type])
    return n_slots * one if not size else min(n_slots * one, max(one, free // size))


def _pages_for(context: int, device: torch.device) -> int:
    return -(-context // PAGE_TOKENS[device.type])


def keeps_packed(wanted: str, device: torch.device, shape: Shape) -> bool:
    """Whether matrices stay as the file has them: on a GPU, unless a dtype was asked for or the layers recur."""
    return wanted == "auto" and device.type == "cuda" and shape.recurrent is None


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, *, packed: bool = False, tiled: bool = False) -> int:
    """Bytes of the weights once they are laid out: in dtype, as the file has them where that can be, or in tiles."""

    def laid_out(tensor: TensorInfo) -> int:
        if tiled:
            return tiled_bytes(tensor)
        return (
            tensor.n_bytes if packed and stays_packed(tensor.type, tensor.shape) else tensor.n_elements * dtype.itemsize
        )

    return sum(map(laid_out, checkpoint.tensors.values()))


def has_tape(options: LoadOptions, shape: Shape, dtype: torch.dtype, kv_type: KVType, device: torch.device) -> bool:
    """Whether the weights are laid out a second time, on the persistent kernel's tape: where that was asked for, and
    where `auto` will choose it, as far as that can be known before there is a model."""
    if device.type != "cuda" or not shape.causal:
        return False
    if options.mode != "auto":
        return options.mode == "persistent"
    if not torch.cuda.is_available() or why_no_while_graph() is not None:
        return False
    reason = why_not_shape(shape) or why_not_rows(options.slots, dtype, kv_type)
    return reason is None and why_no_tape_on(Chip.of(device).capability) is None


def tape_bytes(checkpoint: Checkpoint, shape: Shape, dtype: torch.dtype, *, packed: bool) -> int:
    """Bytes of the tape, and of the plain embedding that its kernel reads where the weights have a packed one."""
    total = 0
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) != 2:
            continue
        stays = packed and stays_packed(tensor.type, tensor.shape)
        if name in EMBEDDINGS:
            total += tensor.n_elements * dtype.itemsize if stays else 0
            if not shape.tied_head:
                continue
        elif shape.tied_head and name in HEADS:
            continue  # the embedding once more, which is passed over
        kind = WEIGHT_TYPES.get(tensor.type, WeightType.HALF) if stays else WeightType.HALF
        rows, columns = tensor.shape
        total += matrix_bytes(kind, rows, columns)
    return total


def beside_tape_bytes(checkpoint: Checkpoint, shape: Shape, dtype: torch.dtype, *, packed: bool) -> int:
    """Bytes of what lies beside the tape where prompts read it: the embedding (of packed weights it is counted with the
    tape), all that is no matrix, and room for one matrix: each comes alone when it is loaded, and before its product.
    """
    rows = max((shape.n_heads + 2 * shape.n_kv_heads) * shape.head_width, 2 * shape.ff_width)
    room = max(rows, 0 if shape.tied_head else shape.vocab) * shape.hidden
    for name, tensor in checkpoint.tensors.items():
        is_embedding = name in EMBEDDINGS and not (packed and stays_packed(tensor.type, tensor.shape))
        room += tensor.n_elements if len(tensor.shape) != 2 or is_embedding else 0
    return room * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()


def free_host_bytes() -> int:
    """Memory that the system can give without swapping; the control group's limit where that is lower."""
    free = FREE_WHEN_NOT_TOLD
    try:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return free if limit == "max" else min(free, max(0, int(limit) - used))
    except (OSError, ValueError, AttributeError, StopIteration):
        return free  # this system does not tell, or not all of it


def gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"
