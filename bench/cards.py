"""What every kernel takes of every chip, compiled without one: the table of docs/cards.md.

    python -m bench.cards [--arch sm_80,gfx942] [--models NAME,...] [--types q4_k_m,...] [--workers 2] [--out FILE]
    python -m bench.cards --rows FILE ... --out docs/cards.md    # from what earlier runs printed
    python -m bench.cards --default --fast --arch sm_80,sm_89    # the default model and a 1B, with their types

Kernels of a step, of prompts and of their outputs are bound as plans bind them (`bench/launches.py`), for models of
every family (`bench/card_models.py`), every weight type and every type of KV cache. Of launches that differ in sizes
alone, which decide neither the memory of a block nor its registers, the largest is compiled; the most different ones
come first. What NVRTC compiles, the step boundary and the laboratory, is compiled as well; the persistent kernel has
tests of its own (`tests/backends/tape/test_compiles.py`). Each kernel is a line of JSON; ends with 1 where one takes
more than the chip has. Triton keeps what it has compiled, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import chain
from math import gcd
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from bench.card_models import WELL_KNOWN, models, shortened, tiny_models
from bench.compiling import (
    LANES,
    Specialisation,
    chip_named,
    compile_fast,
    compiled_for,
    registers_of,
    specialisation_of,
)
from bench.launches import bound_kernels
from ostinato.backends.cuda.backend import why_not_latent
from ostinato.backends.cuda.launch import TritonLaunch
from ostinato.backends.cuda.packed_types import PACKED_TYPES
from ostinato.backends.machine import REGISTERS, Chip
from ostinato.backends.torch.ops.q8_0 import BLOCK as Q8_BLOCK
from ostinato.lab.random_weights import DTYPES
from ostinato.models.shape import Shape
from ostinato.options import KVType

NVIDIA: Final = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
ARCHS: Final = (*NVIDIA, *LANES)
TYPES: Final = ("f32", "f16", "bf16", *(type.lower() for type in PACKED_TYPES), "q4_k_m")
# Bytes that a thread spills at most, on NVIDIA's: what products of K types take with any Triton that was tried, and
# some room. Float32 has products and prompts' attention of its own, tuned for no chip.
MOST_SPILLED: Final = 2304
MOST_SPILLED_BY: Final = {
    ("matmul", "float32"): 3072,
    ("attend", "float32, heads of 256"): 4608,  # where the assembler keeps to 40 registers, as below to 168
    ("attend", "float32, heads of 512"): 6144,
    ("attend_chunk", "float32, heads of 80"): 3072,
    ("attend_chunk", "float32, heads of 96"): 3072,
    ("attend_chunk", "float32, heads of 128"): 3072,
    ("attend_chunk", "float32, heads of 256"): 6144,
}
KV_TYPES: Final[tuple[KVType, ...]] = ("bf16", "f32", "f16", "q8_0")
# Constants that decide how much there is to do, not how a program does it; of two activations none takes more.
COUNTS: Final = frozenset(
    ("N", "FIRST", "N_STATS", "K_STATS", "STATS_WIDE", "ACTIVATION", "RUN", "BLOCKS", "N_EXPERTS", "N_USED", "N_SCORES",
     "HEADS", "KEY_HEADS", "heads", "kv_heads", "slots", "group", "n_tokens", "words", "n_blocks", "n_subs", "wanted",
     "groups")
)  # fmt: skip
# Sizes of what is loaded and stored: code depends on whether it lies aligned, and on nothing else of them.
SIZES: Final = frozenset(
    ("OUT_STRIDE", "HIDDEN", "WIDTH", "INNER", "CHANNELS", "COLUMNS", "VALUE", "KEY", "STATE", "RANK",
     "STRIDE", "X_STRIDE", "Y_STRIDE", "GATE_STRIDE", "DT_STRIDE", "PART_STRIDE", "BIAS_FIRST", "BIAS_STRIDE",
     "keys_at", "columns", "vocab", "X_STEP", "OUT_STEP", "plain", "query", "key")
)  # fmt: skip
ALIGNED: Final = 16  # elements, beyond which nothing is loaded otherwise
WHETHER: Final = frozenset(("window", "WINDOW", "temperature_span"))  # of these, whether there is one
# Arguments that may be absent, each a line or two of a kernel's end.
_OPTIONAL: Final = frozenset(
    ("bias_ptr", "scale_ptr", "scale", "softcap", "prepared_ptr", "prepared_weight_ptr", "stats_ptr")
)


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel on a chip: what it takes of it, or why it could not be compiled."""

    kernel: str
    variant: str  # the type of weights, or of keys and values with the width of heads
    arch: str
    warps: int
    stages: int | None  # None where no loop has any
    shared_bytes: int = 0
    registers: int = 0
    spilled_bytes: int = 0
    error: str | None = None
    seconds: float = 0.0

    @property
    def problem(self) -> str | None:
        """What does not fit, with both numbers; None where all does."""
        limit, threads = chip_named(self.arch).shared_bytes, self.warps * LANES.get(self.arch, 32)
        if self.error is not None:
            return f"does not compile: {self.error}"
        if self.shared_bytes > limit:
            return f"needs {self.shared_bytes} bytes of shared memory, and a block of {self.arch} has {limit}"
        if self.arch not in LANES and self.registers * threads > REGISTERS:
            return f"needs {self.registers * threads} registers, and a block of {self.arch} has {REGISTERS}"
        most = MOST_SPILLED_BY.get((self.kernel, self.variant), MOST_SPILLED)
        if self.arch not in LANES and self.spilled_bytes > most:
            return f"spills {self.spilled_bytes} bytes of a thread, more than {most}"
        return None


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the type of its weights, and of its keys and values."""

    model: str
    type: str
    kv_type: KVType = "bf16"


# The default model, and a 1B in the types that it is mostly had in.
DEFAULT: Final = (Case("smollm2-135m", "q4_1"), *(Case("llama-1b", type) for type in ("q4_k_m", "q8_0", "bf16")))


def product_of(names: Sequence[str], types: Sequence[str]) -> list[Case]:
    """Every model with weights of every type, and with every type of keys and values that its heads can have; of the
    tiny ones, which are here for what they turn on, in bfloat16."""
    full = [name for name in names if name in models()]
    kept = [
        Case(name, type, kv_type)
        for name in full
        for type in types
        for kv_type in KV_TYPES
        if type in DTYPES and _keeps(models()[name], kv_type)
    ]
    tiny = [Case(name, "bf16") for name in names if name in tiny_models() and "bf16" in types]
    return [*kept, *(Case(name, type) for name in full for type in types if type not in DTYPES), *tiny]


def _keeps(shape: Shape, kv_type: KVType) -> bool:
    whole = all(one.head_width % Q8_BLOCK == 0 for one in shape.attention.values())
    return kv_type != "q8_0" or (whole and why_not_latent(shape, kv_type) is None)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is compiled, without the tensors that it was bound to."""

    name: str
    variant: str
    function: Any
    specialised: Specialisation
    size: int

    @property
    def code(self) -> tuple[str, ...]:
        """What decides the code, as far as it decides what the code takes of a chip."""
        names, specialised = self.function.arg_names, self.specialised
        signature = {name: str(type) for name, type in specialised.signature.items() if name not in _OPTIONAL}
        constants = {names[place[0]]: value for place, value in specialised.fixed.items() if len(place) == 1}
        kept = _without_sizes({name: value for name, value in constants.items() if name not in _OPTIONAL})
        if isinstance(layer := kept.get("S"), dict):  # which several kernels share
            kept["S"] = {name: value for name, value in layer.items() if name in _names_in(self.function)}
        return self.name, str(signature), str(kept), str(specialised.options)


Work = tuple[Kernel, tuple[str, ...]]  # what is compiled, and for which chips


def work_for(archs: Sequence[str], cases: Sequence[Case]) -> list[Work]:
    """Distinct kernels of these models; one that several chips of a generation launch alike is there once."""
    kernels, by_limits = dict[object, tuple[Kernel, list[str]]](), dict[object, dict[object, Kernel]]()
    for arch in archs:
        chip = chip_named(arch)
        limits = chip.capability[0], chip.shared_bytes
        if limits not in by_limits:
            by_limits[limits] = kernels_for(chip, cases)
        for code, kernel in by_limits[limits].items():
            kernels.setdefault((generation_of(arch), code), (kernel, []))[1].append(arch)
    return most_different_first([(kernel, tuple(archs)) for kernel, archs in kernels.values()])


def most_different_first(work: Sequence[Work]) -> list[Work]:
    """One of each kernel, type and choice of stages and warps, then another one: a run that is stopped has seen all."""
    seen, places = Counter[object](), list[int]()
    for kernel, archs in work:
        alike = kernel.name, kernel.variant, str(kernel.specialised.options), archs
        places.append(seen[alike])
        seen[alike] += 1
    return [one for _, one in sorted(zip(places, work, strict=True), key=lambda both: both[0])]


def generation_of(arch: str) -> str:
    """Chips of one are compiled for alike: those of a major number, or one of AMD's. Of 10.x each is its own: only 10.0
    finds the largest of a warp's floats in one instruction."""
    return arch if arch in LANES or arch in ("sm_100", "sm_103") else arch[:-1]


def kernels_for(chip: Chip, cases: Iterable[Case]) -> dict[object, Kernel]:
    """Distinct kernels of these models, by their code."""
    found = dict[object, Kernel]()
    for case in cases:
        for bound in bound_kernels(_shape_of(case.model), case.type, case.kv_type, chip):
            launch = bound.launch
            kernel = Kernel(bound.name, _variant(launch), launch.kernel, specialisation_of(launch), _size_of(launch))
            code = kernel.code
            if kernel.size > getattr(found.get(code), "size", -1):
                found[code] = kernel
    return found


def _shape_of(name: str) -> Shape:
    """Well-known ones first, which are there without a look at the others."""
    known = WELL_KNOWN.get(name)
    return shortened(known) if known is not None else {**models(), **tiny_models()}[name]


def _without_sizes(constants: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: _plain(value) for name, value in constants.items()}
    return {
        name: _without_sizes(value) if isinstance(value, dict) else _decisive(name, value, constants)
        for name, value in plain.items()
        if name not in COUNTS
    }


def _decisive(name: str, value: Any, beside: Mapping[str, Any]) -> object:
    """What of a constant decides the code."""
    if name in WHETHER:
        return bool(value)
    if name in SIZES:
        return gcd(value, ALIGNED)
    if name == "K":  # whether its last iteration is masked, and an odd block of Q8_0 left over
        return value % beside.get("BLOCK_K", 1) == 0, value % 64 == 0
    return value


@cache
def _names_in(kernel: Any) -> frozenset[str]:
    """What a kernel and the functions that it calls speak of, such as `width` of S.width."""
    found, left = set[str](), [kernel]
    while left:
        function = left.pop().fn
        fresh = set(function.__code__.co_names) - found
        found |= fresh
        left += [called for name in fresh if hasattr(called := function.__globals__.get(name), "fn")]
    return frozenset(found)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _size_of(launch: TritonLaunch) -> int:
    constants = launch.constants
    return int(constants.get("K", 0)) + int(constants.get("STATS_WIDE", 0))


def _variant(launch: TritonLaunch) -> str:
    """As docs/cards.md names it."""
    constants = launch.constants
    names = [name for name in launch.kernel.arg_names if not name.isupper()]
    given = dict(zip(names, launch.args, strict=True))
    if "kv" in given:
        name = str(given["kv"].key.dtype).removeprefix("torch.")
        latent = getattr(constants["S"], "key", None)  # of all heads, and its value
        of = f"heads of {constants['S'].width}" if latent is None else f"keys of {latent}"
        return f"{ {'int8': 'q8_0'}.get(name, name) }, {of}"
    if "TYPE" in constants:
        packed = {number: type for type, number in _weight_types().items()}
        return packed.get(constants["TYPE"], str(given["w_ptr"].dtype).removeprefix("torch."))
    return ""


def _weight_types() -> Mapping[str, int]:
    from ostinato.backends.cuda.triton.unpack import WEIGHT_TYPES

    return WEIGHT_TYPES


# Compiling


_work: list[Work] = []  # which the workers inherit: kernels cannot be sent to them


def compile_one(number: int) -> list[Row]:
    kernel, archs = _work[number]
    options, started = kernel.specialised.options, time.monotonic()
    made = [
        Row(kernel.name, kernel.variant, one, options.get("num_warps", 4), options.get("num_stages")) for one in archs
    ]
    try:
        taken = compiled_for(kernel.function, kernel.specialised, archs)
    except Exception as error:  # whatever a compiler raises: it is reported with the kernel's name
        return [replace(row, error=str(error).strip().splitlines()[-1][:300]) for row in made]
    seconds = round(time.monotonic() - started, 2)
    return [replace(row, **one._asdict(), seconds=seconds) for row, one in zip(made, taken, strict=True)]


def sweep(work: Iterable[Work], workers: int) -> Iterator[Row]:
    """These kernels, compiled for their chips, in no particular order."""
    _work[:] = work
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        for made in as_completed([pool.submit(compile_one, number) for number in range(len(_work))]):
            yield from made.result()


def by_nvrtc(arch: str) -> Iterator[Row]:
    """The step boundary, masks of grammars, marks of time, and the laboratory's kernels."""
    from ostinato.backends.cuda.start import source as cuda_source
    from ostinato.build import cubin
    from ostinato.lab import programs
    from ostinato.loop.layout import Layout
    from ostinato.loop.step_boundary import native_headers

    layout = Layout(n_slots=32, max_pages=512, vocab=128_256)
    headers = native_headers(layout, page_tokens=64)
    sources: dict[str, tuple[Any, Mapping[str, str], tuple[str, ...]]] = {
        "step_boundary.cu": (cuda_source, headers, ("step_boundary", "boundary_loop")),
        "step_masks.cu": (cuda_source, headers, ("step_masks",)),
        "stamp.cu": (cuda_source, {}, ("stamp",)),
        "kernels.h": (programs.source, {}, ("short_axpy", "short_tail", "hold", "persistent")),
        "while_condition.h": (programs.source, {}, ("count_down",)),
    }
    for name, (source, included, kernels) in sources.items():
        binary = cubin(source(name), name, arch=arch, headers=included)
        for kernel in kernels:
            yield Row(kernel, "NVRTC", arch, 1, None, 0, *registers_of(binary, kernel))


# docs/cards.md


def table(rows: Sequence[Row]) -> str:
    """The most that a kernel takes on each chip, over its launches, as Markdown."""
    archs = [arch for arch in ARCHS if any(row.arch == arch for row in rows)]
    most: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        of_kernel = most.setdefault((row.kernel, row.variant), {})
        have = of_kernel.get(row.arch, row)
        of_kernel[row.arch] = replace(
            row,
            shared_bytes=max(row.shared_bytes, have.shared_bytes),
            registers=max(row.registers, have.registers),
            spilled_bytes=max(row.spilled_bytes, have.spilled_bytes),
        )
    head = ["kernel", "of", *archs]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---', '---', *['---:'] * len(archs)])} |"]
    for (kernel, variant), found in sorted(most.items()):
        cells = [_cell(found.get(arch)) for arch in archs]
        lines.append(f"| {' | '.join([kernel, variant, *cells])} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    spilled = f" +{row.spilled_bytes}" if row.spilled_bytes else ""
    return f"{row.shared_bytes:,} / {row.registers}{spilled}"


def kept_rows(file: Path) -> list[Row]:
    """What an earlier run printed."""
    names = [field.name for field in fields(Row)]
    return [Row(**{name: line[name] for name in names}) for line in map(json.loads, file.read_text().splitlines())]


def main(words: Sequence[str] | None = None) -> int:
    asked = _asked(words)
    if asked.fast:
        compile_fast()
    cases = () if asked.rows else DEFAULT if asked.default else product_of(asked.models, asked.types)
    rows = [row for file in asked.rows for row in kept_rows(file)]
    work = work_for(asked.arch, cases)
    if asked.default:
        work = [(kernel, archs[:1]) for kernel, archs in work]
    plain = [] if asked.default or asked.rows else [arch for arch in asked.arch if arch in NVIDIA]
    for row in chain(sweep(work, asked.workers), *map(by_nvrtc, plain)):
        rows.append(row)
        print(json.dumps(asdict(row) | {"problem": row.problem}), flush=True)
    if asked.out is not None:
        page = asked.out.read_text("utf-8")
        before, mark, _ = page.partition(MARK)
        asked.out.write_text(f"{before}{mark}\n\n{table(rows)}", "utf-8")
    bad = [f"{row.kernel} {row.variant} for {row.arch} {row.problem}" for row in rows if row.problem is not None]
    print("\n".join(bad) or f"{len(rows)} kernels fit", file=sys.stderr)
    return 1 if bad else 0


MARK: Final = "<!-- generated by python -m bench.cards -->"


def _asked(words: Sequence[str] | None) -> argparse.Namespace:
    def listed(known: Sequence[str]) -> Any:
        def parse(text: str) -> list[str]:
            names = text.split(",")
            if unknown := [name for name in names if name not in known]:
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
            return names

        return parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=listed(ARCHS), default=list(ARCHS))
    parser.add_argument("--models", help="names with commas between them, as bench/card_models.py has them; all")
    parser.add_argument("--types", type=listed(TYPES), default=list(TYPES))
    parser.add_argument(
        "--default", action="store_true", help="the default model's plans and a 1B's alone, each kernel once"
    )
    parser.add_argument("--fast", action="store_true", help="without the pass that takes longest; see bench/compiling")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=Path, nargs="+", default=[], help="lines of earlier runs, and nothing compiled")
    parser.add_argument("--out", type=Path, help="the page whose table is written anew")
    asked = parser.parse_args(words)
    if not asked.default and not asked.rows:
        known = [*models(), *tiny_models()]
        try:
            asked.models = known if asked.models is None else listed(known)(asked.models)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    return asked


if __name__ == "__main__":
    sys.exit(main())
