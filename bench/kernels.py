"""How near to the memory's speed are the step's products, and which tile is best? For machines with a GPU.

    python -m bench.kernels [--only NAME] [--rows 1,4,16,32] [--prepared] [--seconds 85]

Sections: `check-TYPE` compares every epilogue with its twin on fresh random inputs, at shapes of 1B and 8B models, and
the bits of a row at other places; `time-TYPE` times tiles for every product of those models; `gemm` times the products
of a prompt's chunk; `experts-TYPE` checks and times a step's routed experts. TYPE is bf16, f16, f32 or a packed type in
small letters. Weights rotate through more memory than the L2 cache has; a time is that of one node of a CUDA graph.
A section stops after --seconds and says what it left out. Needs torch, triton and numpy, nothing else.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.note import as_json, command, versions
from bench.replay import replayed_us
from ostinato.backends.cuda.launch import Launches, TritonLaunch
from ostinato.backends.cuda.packed import Packed, laid_out, put
from ostinato.backends.cuda.packed_types import PACKED_TYPES
from ostinato.backends.torch.ops.matmul import (
    Epilogue,
    InputNorm,
    PreparedInput,
    experts_down_torch,
    experts_gate_up_torch,
    matmul_torch,
    n_stats,
    stats_torch,
)
from ostinato.files.quants import BLOCKS

DEVICE = torch.device("cuda")
N_SLOTS = 32
DENSE = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
TYPES = (*DENSE, *(name.lower() for name in PACKED_TYPES))
ROTATE_BYTES = 160 << 20  # three times an H200's L2
SHAPES = {
    "1B": {
        "qkv": (3072, 2048, "store"),
        "out": (2048, 2048, "add"),
        "gate_up": (16384, 2048, "gated"),
        "down": (2048, 8192, "add"),
        "head": (128256, 2048, "store"),
    },
    "8B": {
        "qkv": (6144, 4096, "store"),
        "out": (4096, 4096, "add"),
        "gate_up": (28672, 4096, "gated"),
        "down": (4096, 14336, "add"),
        "head": (128256, 4096, "store"),
    },
}
Row = dict[str, Any]


class Clock:
    """How long a section may take."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end


def weight_of(type: str, n: int, k: int) -> Tensor | Packed:
    """A random weight of a size that models have."""
    if type in DENSE:
        return (torch.randn(n, k, device=DEVICE, dtype=torch.float16) * 0.03).to(DENSE[type])
    name = type.upper()
    block = BLOCKS[name]
    raw = torch.randint(0, 256, (n, k // block.elements, block.n_bytes), dtype=torch.uint8, device=DEVICE)
    places = (208,) if name == "Q6_K" else (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)
    for at in places:
        scale = torch.rand(n, k // block.elements, 1, device=DEVICE) * (1e-4 if block.elements == 256 else 5e-3)
        raw[:, :, at : at + 2] = scale.half().view(torch.uint8)
    if name == "MXFP4":
        raw[:, :, 0] = 120  # an exponent
    packed = laid_out(name, n, k, raw.device)
    put(packed, raw.view(n, -1), 0)
    return packed


def n_bytes(weight: Tensor | Packed) -> int:
    return sum(plane.nbytes for plane in (weight.planes if isinstance(weight, Packed) else (weight,)))


@dataclass
class Product:
    """One product with its buffers."""

    weight: Tensor | Packed
    epilogue: Epilogue
    x: Tensor
    out: Tensor
    n_rows: Tensor
    more: dict[str, Any]

    def bind(self, **over: Any) -> TritonLaunch | Launches:
        from ostinato.backends.cuda import gpu
        from ostinato.backends.cuda.triton.matmul import bind_matmul

        words = {"epilogue": self.epilogue, "chip": gpu.chip_of(DEVICE), **self.more, **over}
        return bind_matmul(self.x, self.weight, self.out, self.n_rows, **words)


def product_of(weight: Tensor | Packed, n: int, k: int, epilogue: Epilogue, rows: int, prepared: bool) -> Product:
    """A product as a step has it: a norm before all but "add", stats after "add"."""
    x = torch.randn(N_SLOTS, k, device=DEVICE)
    width = n // 2 if epilogue == "gated" else n
    out = torch.randn(N_SLOTS, width, device=DEVICE)
    more: dict[str, Any] = {}
    if epilogue == "add":
        more["stats"] = torch.zeros(N_SLOTS, n_stats(width), 2, device=DEVICE)
        more["prepared"] = (
            PreparedInput(torch.zeros_like(out, dtype=torch.bfloat16), torch.randn(width, device=DEVICE))
            if prepared
            else None
        )
        x = x.bfloat16() if prepared else x
    elif epilogue != "multiply":
        gain = torch.rand(k, device=DEVICE) + 0.5
        more["norm"] = InputNorm(stats_torch(x), None if prepared else gain, None, 1e-5)
        x = (x * gain).bfloat16() if prepared else x
    if epilogue in ("gated", "act"):
        more["activation"] = "silu"
    return Product(weight, epilogue, x, out, torch.tensor([rows], dtype=torch.int32, device=DEVICE), more)


# Compiling: a kernel takes seconds, and there are many; other processes fill Triton's cache side by side.


def _warm(spec: tuple[str, str, list[Any], dict[str, Any]]) -> str | None:
    module, name, args, constants = spec
    kernel = getattr(__import__(module, fromlist=[name]), name)
    try:
        kernel.warmup(*args, grid=(1,), **constants)
    except Exception as error:  # a tile that does not fit is reported where it is tried
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def compile_ahead(bound: Sequence[TritonLaunch | Launches], clock: Clock) -> None:
    """Fill the cache for these launches, as many at a time as there are cores to spare."""
    specs = []
    for launch in [part for one in bound for part in (one.parts if isinstance(one, Launches) else (one,))]:
        args = [arg.dtype if isinstance(arg, Tensor) else arg for arg in launch.args]
        specs.append((launch.kernel.fn.__module__, launch.kernel.fn.__name__, args, dict(launch.constants)))
    unique = list({repr(spec): spec for spec in specs}.values())
    workers = min(len(unique), max((os.cpu_count() or 2) - 2, 1))
    if workers < 2:
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(_warm, spec) for spec in unique]
        for future in waiting:
            if clock.is_over:
                future.cancel()
                continue
            error = future.result()
            if error:
                print("  does not compile:", error)


# Checking


def difference(ours: Tensor, theirs: Tensor) -> float:
    scale = theirs.float().abs().max().clamp(min=1e-6)
    return float((ours.float() - theirs.float()).abs().max() / scale)


def check(type: str, clock: Clock, prepared: bool) -> Iterator[Row]:
    """Every epilogue against the twin, and a row's bits wherever it stands."""
    cases: list[tuple[str, int, int, Epilogue]] = []
    for model, (hidden, ff) in {"1B": (2048, 8192), "8B": (4096, 14336)}.items():
        cases += [(f"{model} {e}", ff * 2 if e == "gated" else hidden, hidden, e) for e in ("store", "gated", "act")]
        cases += [(f"{model} add", hidden, ff, "add")]
    cases += [("1B multiply", 2048, 2048, "multiply"), ("1B head", 128256, 2048, "store")]
    made = [(name, product_of(weight_of(type, n, k), n, k, e, 1, prepared)) for name, n, k, e in cases]
    compile_ahead([product.bind() for _, product in made], clock)
    for name, product in made:
        if clock.is_over:
            print("  time ran out before", name)
            return
        yield {"case": name, **compare(product), "same_bits": has_same_bits(product)}


def compare(product: Product) -> Row:
    worst = 0.0
    for rows in (1, 5, 16, 17, N_SLOTS):
        product.n_rows.fill_(rows)
        before, stats = product.out.clone(), product.more.get("stats")
        product.bind()()
        ours, our_stats = product.out.clone(), None if stats is None else stats.clone()
        product.out.copy_(before)
        matmul_torch(product.x, product.weight, product.out, product.n_rows, epilogue=product.epilogue, **product.more)
        worst = max(worst, difference(ours[:rows], product.out[:rows]))
        assert torch.equal(ours[rows:], before[rows:]), "rows that are not live were written"
        if stats is not None and our_stats is not None:
            worst = max(worst, difference(our_stats[:rows], stats[:rows]))
        product.out.copy_(before)
    return {"difference": worst, "ok": worst < 2e-3}


def has_same_bits(product: Product) -> bool:
    """One row at several places, among other rows, with 1, 8, 9, 16 and more of them live."""
    row, start = product.x[0].clone(), product.out[0].clone()
    norm: InputNorm | None = product.more.get("norm")
    stats = None if norm is None else norm.stats[0].clone()
    seen = []
    for place, rows in ((0, 1), (0, 8), (7, 8), (7, 9), (3, 16), (15, 16), (16, 17), (20, N_SLOTS)):
        product.x.copy_(torch.randn_like(product.x, dtype=torch.float32).to(product.x.dtype))
        product.x[place] = row
        product.out[place] = start
        if norm is not None and stats is not None:
            norm.stats[place] = stats
        product.n_rows.fill_(rows)
        product.bind()()
        seen.append(product.out[place].clone())
    return all(torch.equal(seen[0], other) for other in seen)


# Timing


def tiles(type: str, epilogue: Epilogue) -> list[Any]:
    """What is tried, the table's own first."""
    from ostinato.backends.cuda.triton.tiles import Tile

    if type in ("bf16", "f16"):
        tried = [
            Tile(n, k, slices=s, num_warps=s, num_stages=stages)
            for n, k, s in ((16, 256, 4), (32, 256, 4), (64, 256, 4), (16, 512, 8), (16, 512, 4), (32, 128, 4))
            for stages in (3, 4, 6)
        ]
        tried += [Tile(64, 64, num_stages=4), Tile(128, 64, num_stages=4)]
    elif type == "f32":
        tried = [Tile(32, 128, slices=4, num_stages=3), Tile(16, 128, slices=4, num_stages=4), Tile(32, 32)]
    elif type == "q6_k":
        tried = [
            Tile(64 * w, k, split_k=s, num_warps=w, num_stages=4)
            for w, k in ((1, 128), (1, 64), (2, 128))
            for s in (1, 2, 4, 8)
        ]
    elif type in ("q4_k", "q5_k"):
        tried = [
            Tile(32, 512, slices=2, num_warps=2, num_stages=3),
            Tile(32, 512, slices=2, num_warps=2, num_stages=4),
            Tile(32, 1024, slices=4, num_stages=2),
            Tile(32, 1024, slices=4, num_stages=3),
            Tile(16, 1024, slices=4, num_stages=3),
            Tile(64, 256, num_warps=2, num_stages=3),
            Tile(64, 256, num_warps=2, num_stages=4),
            Tile(32, 256, num_warps=2, num_stages=4),
            Tile(32, 256, num_warps=1, num_stages=4),
            Tile(64, 256, num_warps=2, split_k=4, num_stages=3),
            Tile(32, 512, slices=2, num_warps=2, num_stages=3, max_registers=168),
        ]
    else:
        tried = [
            Tile(n, k, slices=s, num_warps=s, num_stages=stages)
            for n, k, s in ((32, 512, 4), (16, 512, 4), (64, 256, 4), (32, 256, 4), (32, 512, 8))
            for stages in (3, 4)
        ]
        tried += [Tile(64, 256, num_warps=2, num_stages=3), Tile(64, 256, num_warps=2, num_stages=4)]
    if epilogue == "gated" and type not in DENSE:
        # Gate and up at once take twice the registers: half the outputs, or one after the other where rows are many.
        whole = [replace(t, apart=True) for t in tried if t.split_k == 1 and t.max_registers is None]
        tried = [replace(t, block_n=max(t.block_n // 2, 16)) for t in tried if t.block_n > 16]
        tried += whole if type in ("q4_k", "q5_k") else []
    return list(dict.fromkeys(tried))


def time_type(type: str, clock: Clock, rows: tuple[int, ...], prepared: bool) -> Iterator[Row]:
    """The best tile of each product of both models, at each number of rows."""
    from ostinato.backends.cuda.triton.tiles import class_of, tile_for

    made = []
    for model, shapes in SHAPES.items():
        for name, (n, k, epilogue) in shapes.items():
            first = weight_of(type, n, k)
            copies = [first, *(weight_of(type, n, k) for _ in range(min(ROTATE_BYTES // n_bytes(first), 40)))]
            products = [product_of(w, n, k, epilogue, 1, prepared) for w in copies]  # type: ignore[arg-type]  # a literal
            made.append((f"{model} {name}", products, [tile_for(first, epilogue), *tiles(type, epilogue)]))  # type: ignore[arg-type]  # a literal
    compile_ahead([p[0].bind(tile=tile) for _, p, tried in made for tile in dict.fromkeys(tried)], clock)
    for name, products, tried in made:
        found: list[tuple[float, Any, list[float]]] = []
        for tile in dict.fromkeys(tried):
            if clock.is_over:
                print("  time ran out at", name, tile)
                break
            try:
                times = [time_rows(products, tile, r) for r in rows]
            except Exception as error:  # too much shared memory, for one: not a tile for this product
                print("  not this tile:", name, tile, str(error).splitlines()[0][:120])
                continue
            found.append((sum(times), tile, times))
        if not found:
            continue
        size, table = n_bytes(products[0].weight), found[0]
        _, best, times = min(found, key=lambda one: one[0])
        speeds = {f"GB/s at {r}": round(size / t / 1e3) for r, t in zip(rows, times, strict=True)}
        yield {
            "case": name, "class": class_of(products[0].weight, products[0].epilogue), "MB": round(size / 1e6, 1),
            "us": [round(t, 2) for t in times], **speeds, "best": str(best),
            "table": str(table[1]), "table_us": [round(t, 2) for t in table[2]],
        }  # fmt: skip


def time_rows(products: list[Product], tile: Any, rows: int) -> float:
    for product in products:
        product.n_rows.fill_(rows)
    launches: list[Callable[[], None]] = [product.bind(tile=tile) for product in products]
    return replayed_us(launches * (1 + 20 // len(launches)))


def time_gemm(clock: Clock) -> Iterator[Row]:
    """The products of a chunk of 512 rows, beside torch's."""
    from ostinato.backends.cuda.triton.gemm import GEMM_TILES, GemmTile, bind_gemm

    cuts = (
        (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 4), (64, 256, 64, 4, 4), (64, 128, 64, 4, 4),
        (256, 128, 64, 8, 3), (128, 128, 128, 8, 3), (128, 128, 64, 8, 3),
    )  # fmt: skip
    tried = [GemmTile(*cut) for cut in cuts]
    for type in ("bf16", "q4_k", "q6_k", "q8_0", "f16"):
        for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 4096)):
            x = torch.randn(512, k, device=DEVICE).bfloat16()
            weight, out = weight_of(type, n, k), torch.empty(512, n, device=DEVICE, dtype=torch.bfloat16)
            kind = type if type in DENSE else "packed"
            options = dict.fromkeys([GEMM_TILES[kind], *tried])
            bound = {tile: bind_gemm(x, weight, out, tile=tile) for tile in options}
            compile_ahead(list(bound.values()), clock)
            found = []
            for tile, launch in bound.items():
                if clock.is_over:
                    print("  time ran out at", type, n, k)
                    return
                try:
                    found.append((replayed_us([launch] * 4, rounds=10), tile))
                except Exception as error:  # too much shared memory
                    print("  not this tile:", type, tile, str(error).splitlines()[0][:120])
            table, (best_us, best) = found[0][0], min(found, key=lambda one: one[0])
            flops = 2 * 512 * n * k
            row = {"case": f"{type} {n} x {k}", "TFLOP/s": round(flops / best_us / 1e6), "best": str(best)}
            row |= {"table TFLOP/s": round(flops / table / 1e6)}
            if isinstance(weight, Tensor) and weight.dtype == torch.bfloat16:
                plain = replayed_us([lambda: torch.mm(x, weight.T, out=out)] * 4, 10)  # noqa: B023 -- run at once
                row["torch TFLOP/s"] = round(flops / plain / 1e6)
            launch = bound[next(iter(options))]
            launch()
            from ostinato.backends.torch.ops.gemm import gemm_torch

            ours = out.clone()
            gemm_torch(x, weight, out)
            row["difference"] = difference(ours, out)
            yield row


# Experts, those that a row takes, widths of the model and of an expert, and types of gate and up, and of down.
EXPERTS: dict[str, tuple[int, int, int, int, Sequence[str], Sequence[str]]] = {
    "gpt-oss-20b": (32, 4, 2880, 2880, ("mxfp4",), ("mxfp4",)),
    "qwen3-30b-a3b": (128, 8, 2048, 768, TYPES, TYPES),
    "gemma4-26b-a4b": (128, 8, 2816, 704, ("q4_k",), ("q5_0", "q8_0")),
    "mixtral-8x7b": (8, 2, 4096, 14336, TYPES, TYPES),
}
N_CHOICES = 8  # of experts, one after the other, so that caches hold few of those that come next


@dataclass
class RoutedProduct:
    """One side of a step's experts with its buffers."""

    name: str
    weight: Tensor | Packed
    epilogue: Epilogue
    out: Tensor
    live: Tensor
    chosen: list[Tensor]  # the experts of each row, several times
    binder: Callable[..., TritonLaunch | Launches]
    twin: Callable[..., None]

    def bind(self, number: int = 0, tile: Any = None) -> TritonLaunch | Launches:
        return self.binder(out=self.out, experts=self.chosen[number], n_rows=self.live, tile=tile)

    def checked(self) -> Row:
        """How far two rows are from the twin's, and whether the first has the same bits alone and among all."""
        wanted, seen = self.out.clone(), []
        for rows in (1, 2, len(self.out)):
            self.live.fill_(rows)
            self.bind()()
            seen.append(self.out[0].clone())
        self.live.fill_(2)
        self.twin(out=wanted, experts=self.chosen[0], n_rows=self.live)
        apart, same = difference(self.out[:2], wanted[:2]), all(torch.equal(seen[0], other) for other in seen)
        return {"difference": apart, "same_bits": same, "ok": apart < 2e-3}


def routed_products(type: str, n_slots: int) -> Iterator[RoutedProduct]:
    from ostinato.backends.cuda import gpu
    from ostinato.backends.cuda.triton.experts import bind_experts_down, bind_experts_gate_up, experts_workspace

    for model, (n_experts, n_used, hidden, ff, into, out_of) in EXPERTS.items():
        live = torch.tensor([n_slots], dtype=torch.int32, device=DEVICE)
        choices = [torch.rand(n_slots, n_experts, device=DEVICE).argsort(1)[:, :n_used] for _ in range(N_CHOICES)]
        chosen = [choice.sort(1).values.int() for choice in choices]
        act, out = torch.randn(n_slots, n_used, ff, device=DEVICE), torch.zeros(n_slots, hidden, device=DEVICE)
        how: dict[str, Any] = {"workspace": experts_workspace(n_slots, n_used, ff, hidden, DEVICE)}
        how["chip"] = gpu.chip_of(DEVICE)
        if type in into:
            x, weight = torch.randn_like(out), weight_of(type, n_experts * 2 * ff, hidden)
            norm = InputNorm(stats_torch(x), torch.ones(hidden, device=DEVICE), None, 1e-5)
            more: dict[str, Any] = {"x": x, "weight": weight, "norm": norm, "activation": "silu"}
            binder: Callable[..., Any] = partial(bind_experts_gate_up, **more, **how)
            twin = partial(experts_gate_up_torch, **more)
            inner = torch.zeros_like(act)
            yield RoutedProduct(f"{model} gate_up", weight, "gated", inner, live, chosen, binder, twin)
        if type in out_of:
            shares, weight = torch.rand(n_slots, n_used, device=DEVICE), weight_of(type, n_experts * hidden, ff)
            more = {"x": act, "weight": weight, "shares": shares, "epilogue": "store"}
            binder, down = partial(bind_experts_down, **more, **how), partial(experts_down_torch, **more)
            yield RoutedProduct(f"{model} down", weight, "store", out, live, chosen, binder, down)


def expert_tiles(weight: Tensor | Packed, epilogue: Epilogue) -> list[Any]:
    """What is tried beside the rule's own: fewer outputs, other parts, other warps."""
    from ostinato.backends.cuda.triton.experts import MAX_PARTS, expert_tile

    own = expert_tile(weight, epilogue, spread=True)
    sizes = {16, 32} if isinstance(weight, Tensor) or weight.type != "Q6_K" else {64}
    tried = [
        replace(own, block_n=n, block_k=k, split_k=parts, num_stages=stages)
        for n in sorted(sizes)
        for k in (own.block_k // 2, own.block_k)
        for parts in (1, 2, MAX_PARTS)
        for stages in (2, 3)
    ]
    wider = [replace(cut, num_warps=2 * cut.num_warps) for cut in tried if cut.num_warps == 1 and cut.block_n > 16]
    return list(dict.fromkeys([own, *tried, *wider]))


def time_experts(type: str, clock: Clock, rows: tuple[int, ...]) -> Iterator[Row]:
    """A step's routed experts as known models have them: beside their twins, then by tile."""
    products = list(routed_products(type, max(rows)))
    tiles_of = {product.name: expert_tiles(product.weight, product.epilogue) for product in products}
    compile_ahead([one.bind(tile=tile) for one in products for tile in (None, *tiles_of[one.name])], clock)
    for product in products:
        cuts = (None, *tiles_of[product.name])
        yield {"case": f"{type} {product.name}"} | product.checked() | time_cuts(product, cuts, rows, clock)


def time_cuts(product: RoutedProduct, cuts: Sequence[Any], rows: tuple[int, ...], clock: Clock) -> Row:
    """Microseconds of a launch by the rule's tile (None) and by the best of those tried, at each number of rows."""
    found: list[tuple[float, Any, list[float]]] = []
    for tile in cuts:
        if clock.is_over:
            print("  time ran out at", product.name, tile)
            break
        try:
            times = []
            for r in rows:
                product.live.fill_(r)
                launches = [product.bind(number, tile) for number in range(N_CHOICES)]
                times.append(round(replayed_us(launches, rounds=5), 2))
            found.append((sum(times), tile, times))
        except Exception as error:  # too much shared memory
            print("  not this tile:", product.name, tile, str(error).splitlines()[0][:120])
    if not found:
        return {}
    best = sorted(found, key=lambda one: one[0])[:4]
    return {"us": found[0][2], "best": [(times, str(tile)) for _, tile, times in best]}


def sections(rows: tuple[int, ...], prepared: bool) -> dict[str, Callable[[Clock], Iterator[Row]]]:
    made: dict[str, Callable[[Clock], Iterator[Row]]] = {}
    for type in TYPES:
        made[f"check-{type}"] = lambda clock, type=type: check(type, clock, prepared)  # type: ignore[misc]  # bound early
    for type in TYPES:
        made[f"time-{type}"] = lambda clock, type=type: time_type(type, clock, rows, prepared)  # type: ignore[misc]  # bound early
    for type in TYPES:
        made[f"experts-{type}"] = lambda clock, type=type: time_experts(type, clock, rows)  # type: ignore[misc]  # bound early
    return made | {"gemm": time_gemm}


def show(rows: list[Row]) -> None:
    """A table, one line a row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *text]) for i in range(len(columns))]
    for line in [columns, *text]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def main() -> None:
    known = sections((1,), False)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help=f"a section, or its beginning: {', '.join(known)}")
    parser.add_argument("--rows", default="1,4,16,32")
    parser.add_argument(
        "--prepared", action="store_true", help="x comes multiplied and in bfloat16, as `PreparedInput` leaves it"
    )
    parser.add_argument("--seconds", type=float, default=85)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here; this bench is for machines with one")
    rows = tuple(int(r) for r in given.rows.split(","))
    wanted = sections(rows, given.prepared)
    if given.only:
        wanted = {n: run for n, run in wanted.items() if any(n.startswith(o) for o in given.only)}
    tables: dict[str, list[Row]] = {}
    for name, run in wanted.items():
        started = time.monotonic()
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
        print(f"{name} ...", flush=True)
        tables[name] = []
        for row in run(Clock(given.seconds)):
            tables[name].append(row)
            print(" ", row, flush=True)
        torch.cuda.empty_cache()
        print(f"  {time.monotonic() - started:.0f} s", flush=True)
    for name, table in tables.items():
        print(f"\n{name}")
        show(table)
    question, device = "how fast are the step's products, by tile?", torch.cuda.get_device_name()
    print(as_json(question, command("bench.kernels"), versions("torch", "triton"), device, sections=tables))
    bad = [row for table in tables.values() for row in table if row.get("ok") is False or row.get("same_bits") is False]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
