"""GPU checks of single lessons (E, docs/rules.md), beside those of exactness, speed and stress of the whole loop.

Kernels compiled before weights are read (E-9), captures that fail (E-59) and the nodes of those that do not (E-61),
compute-sanitizer (E-34), the upload of weights (E-33) and where they lie (E-16, E-22), memory of a long prompt (E-36),
keys and values of 8 bits (E-47), bandwidth of attention and of packed products (E-48, E-74), graphs of prompts beside
their launches (E-60), times inside a loop (E-63), first tokens (E-65) and fusions (E-81). They belong to the parts that
they are named under.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.gpu_frame import MARK, ROOT, Check, Ended, Job, Outcome, Record, Setting, Verdict, child_environment
from bench.gpu_models import TAPE, kv_type_of, model_on, modes_of, place, random_ids, settled_for
from ostinato.backends.base import PAGE_TOKENS, ChunkPart, Settled
from ostinato.backends.machine import kind_of
from ostinato.backends.runner import Runner
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.plan import tensors_of
from ostinato.backends.torch.upload import THREADS, WINDOW_BYTES
from ostinato.cache.kv_bytes import cell_bytes, page_bytes
from ostinato.engine.choose import backend_for, settle_model
from ostinato.engine.driver import GREEDY, LoopDriver
from ostinato.engine.engine import Engine
from ostinato.engine.load import load_blocks
from ostinato.engine.open import open_runner
from ostinato.errors import HardwareCannot
from ostinato.files.checkpoint import open_checkpoint
from ostinato.lab.bench import Bench, read_bandwidth, why_not_profiled
from ostinato.lab.random_weights import RandomFile
from ostinato.loop.guard import Guard
from ostinato.loop.memory import ALIGNMENT
from ostinato.loop.plan import Node, Plan
from ostinato.models.named_shapes import SHAPES
from ostinato.models.registry import read_shape
from ostinato.models.tensors import TensorTable
from ostinato.options import KVType
from tests.built import build_model

MB: Final = 1 << 20
PACE_SHARE: Final = 0.02  # that a failed capture may cost the steps after it
LAID_SHARE: Final = 1.01  # of a file in the model's own type
UPLOAD_SHARE: Final = 0.7  # of what one pinned copy reaches
LONG_MB: Final = 64.0  # that a long prompt may take beside its keys and values
PERPLEXITY_SHARE: Final = 0.005
ATTENTION_SHARE, PRODUCT_SHARE, SM_SHARE = 0.6, 0.6, 0.9
GRAPH_SHARE: Final = 1.03
PHASES_SHARE: Final = 0.05
FIRST_SHARE: Final = 1.3
N_FIRST: Final = 200
SHARPER: Final = 4.0  # logits of random weights are flat; a text drawn from sharper ones is worth predicting


def _engine(model: Model, type: str, *, mode: str = "loop", context: int = 2048) -> Engine:
    return Engine(model, settled_for(model, mode, n_slots=8, context=context, kv_type=kv_type_of(type)))


def by_hand(
    model: Model, type: str, *, mode: str, context: int, n_slots: int = 8, kv_type: KVType | None = None
) -> LoopDriver:
    """A driver of a new loop, which the caller closes."""
    n_pages = n_slots * -(-context // PAGE_TOKENS[model.device.type])
    kv = kv_type or kv_type_of(type)
    settled = settle_model(model, mode, context=context, n_pages=n_pages, n_slots=n_slots, kv_type=kv)
    return LoopDriver(open_runner(model, settled))


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _first(ended: Sequence[Ended], what: str) -> Record | None:
    return next((record for one in ended for record in one.of(what)), None)


def _broken(ended: Sequence[Ended], name: str) -> list[Outcome]:
    return [Outcome("FAIL", name, (ended[0].error if ended else None) or "it said nothing")]


# Kernels compiled before weights are read (E-9)


def ahead(device: str, *, name: str, type: str) -> Iterator[Record]:
    """Memory that the kernels took, and how many programs were not ready when the engine was opened."""
    file, context = RandomFile(SHAPES[name], type), 1024
    table = TensorTable(file, {name: name for name in file.tensors})
    for mode in ("loop", TAPE):
        backend = backend_for(mode, "cuda")
        more: dict[str, Any] = {"n_slots": 2, "n_pages": 2 * context // PAGE_TOKENS["cuda"], "weights": "packed"}
        more["grammar_bytes"] = 1 << 24  # the module that masks is compiled ahead with the rest
        settled = Settled(str(place(device)), backend.name, mode, "bfloat16", "bf16", context, **more)
        before, started = torch.cuda.mem_get_info()[0], time.perf_counter()
        backend.compile(file.blocks, table, settled)
        took = {"s": time.perf_counter() - started, "bytes": before - torch.cuda.mem_get_info()[0]}
        with closing(open_runner(load_blocks(file.blocks, table, settled), settled)) as runner:
            yield {"what": "ahead", "mode": mode, "late": getattr(runner, "n_compiled_late", None), **took}


def judge_ahead(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    if not ended:
        return [Outcome("SKIP", "ahead", "runs on a GPU only")]
    records = [record for one in ended for record in one.of("ahead")]
    outcomes = []
    for record in records:
        value = f"{record['late']} programs compiled late; ahead {record['s']:.1f} s and {record['bytes'] / MB:.0f} MB"
        verdict: Verdict = "PASS" if record["late"] == 0 else "FAIL"
        outcomes.append(Outcome(verdict, f"ahead-{record['mode']}", value, "none late", record))
    if not outcomes or ended[0].error is not None:
        outcomes += _broken(ended, "ahead")
    return outcomes


# Captures (E-59, E-61)


def captures(device: str, *, name: str, type: str, n_tokens: int, runs: int) -> Iterator[Record]:
    """The nodes of captured steps; then captures that break, in two ways, and the pace of `eager` around them."""
    model = model_on(name, type, device)
    for mode in modes_of(device)[1:]:
        with closing(by_hand(model, type, mode=mode, context=256)) as driver:
            start, plan = driver.runner.start, driver.runner.plan
            n_nodes = getattr(start, "n_nodes", None)
            yield {"what": "nodes", "mode": mode, "n_nodes": n_nodes, "n_launches": plan.n_launches}
    with closing(by_hand(model, type, mode="eager", context=n_tokens + 64, n_slots=1)) as driver:
        before = _pace(driver, model, n_tokens, runs)
        driver.runner.decode_mode.exit()  # inside, a plan's nodes refuse
        errors = [_broken_capture(driver.runner, how) for how in ("raises", "asks")] if device != "cpu" else []
        after = _pace(driver, model, n_tokens, runs)
    yield {"what": "captures", "errors": errors, "before": before, "after": after}


def _pace(driver: LoopDriver, model: Model, n_tokens: int, runs: int) -> list[float]:
    """Tokens a second of some generations, by the host's clock; the first warms."""
    rates, tokens = [], None
    for _ in range(runs + 1):
        driver.forget()
        driver.admit(0, random_ids(model, 16), most=n_tokens)
        driver.synchronize()
        started = time.perf_counter()
        driver.run()
        rates.append(n_tokens / (time.perf_counter() - started))
        heard = [entry.token for entry in driver.entries]
        if tokens is not None and heard != tokens:
            raise RuntimeError("the same prompt gave other tokens")
        tokens = heard
    return rates[1:]


def broken_node(plan: Plan, how: str) -> Plan:
    """A plan with a node in its middle that may not be captured: it `raises`, or `asks` what the driver refuses."""

    def breaks() -> None:
        if not torch.cuda.is_current_stream_capturing():
            return
        if how == "raises":
            raise RuntimeError("broken on purpose")
        torch.cuda.current_stream().synchronize()  # which the driver refuses, and the capture is spoiled

    nodes = list(plan.nodes)
    nodes.insert(len(nodes) // 2, Node("breaks", "test", breaks, (), ()))
    return replace(plan, nodes=tuple(nodes))


def _broken_capture(runner: Runner, how: str) -> Record:
    """A capture of this loop's own step with a node in its middle that may not be captured; both kinds of graphs."""
    from ostinato.backends.cuda.graph import CudaGraph
    from ostinato.backends.cuda.while_graph import WhileGraph

    plan = broken_node(runner.plan, how)
    said: Record = {}
    for kind in (CudaGraph, WhileGraph):
        start = kind(plan, runner._shared, Guard())
        try:
            start.build()
            said[kind.name] = "nothing was wrong"
        except (HardwareCannot, RuntimeError) as error:
            said[kind.name] = f"{error.__class__.__name__}: {error}"[:160]
        finally:
            start.close()
    return {"how": how, **said}


def judge_captures(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    nodes = [record for one in ended for record in one.of("nodes")]
    missing = [r["mode"] for r in nodes if setting.on_gpu and r["n_nodes"] != (r["n_launches"] or 0) + 1]
    said = ", ".join(f"{r['mode']} {r['n_nodes']} nodes for {r['n_launches']} launches" for r in nodes)
    outcomes = [Outcome("FAIL" if missing or not nodes else "PASS", "nodes", said, "the plan's and a step boundary")]
    found = _first(ended, "captures")
    if found is None:
        return [*outcomes, *_broken(ended, "captures")]
    before, after = (statistics.median(found[key]) for key in ("before", "after"))
    slower = 1 - after / before
    wrong = [
        f"{mode} {record['how']}: {record[mode]}"
        for record in found["errors"]
        for mode in ("graph", "loop")
        if not str(record[mode]).startswith("HardwareCannot")
    ]
    value = f"eager {before:,.0f} tok/s before, {after:,.0f} after {2 * len(found['errors'])} captures that broke"
    if wrong:
        return [*outcomes, Outcome("FAIL", "captures", "; ".join(wrong), "", found)]
    # Half the pace would be a poisoned context; a little more than two runs differ by is a figure.
    verdict: Verdict = "PASS" if slower <= PACE_SHARE or not setting.on_gpu else "FAIL" if slower > 0.2 else "MISS"
    return [*outcomes, Outcome(verdict, "captures", value, f"at most {PACE_SHARE:.0%} slower", found)]


# compute-sanitizer (E-34)


def small_job(device: str, *, mode: str, name: str = "llama", watched: bool = False) -> Iterator[Record]:
    """Something of everything, small enough for a tool that slows kernels down a hundredfold. `watched` for races: the
    persistent kernel's lanes tell themselves what they have done (backends/tape/src/ring.h)."""
    if watched and mode == "persistent":
        from ostinato.backends.tape.start import TapeLoop

        TapeLoop.defines = {"ARRIVALS_A_WARP": 32}
    model = model_on(name, "bf16" if device != "cpu" else "f32", device)
    with _engine(
        model, "bf16" if device != "cpu" else "f32", mode=mode, context=min(256, model.shape.context)
    ) as engine:
        drawn = replace(GREEDY, temperature=0.8, top_k=20, top_p=0.9, seed=5, max_tokens=6, ignore_eos=True, logprobs=3)
        requests = [engine.submit(random_ids(model, n, n), drawn) for n in (1, 40, 70)]
        n_tokens = sum(len(list(request)) for request in requests)
    yield {"what": "small_job", "mode": mode, "n_tokens": n_tokens}


def run_sanitized(setting: Setting, job: Job) -> Ended:
    """The job in a child under compute-sanitizer; where there is none, a record that says so."""
    tool, mode = str(job.words["tool"]), str(job.words["mode"])
    began = time.monotonic()
    sanitizer = _sanitizer() if setting.on_gpu else None
    words = [] if sanitizer is None else [sanitizer, "--tool", tool, "--print-limit", "20"]
    # Our code handles errors that calls return, as at a capture. Child processes, such as compilers, are not watched.
    words += ["--report-api-errors", "no", "--target-processes", "application-only"] if words else []
    small = {key: value for key, value in job.words.items() if key != "tool"} | {"watched": tool == "racecheck"}
    asked = json.dumps({"device": setting.device, "work": "small_job", "words": small, "farewell": True})
    try:
        done = subprocess.run(
            [*words, sys.executable, "-m", "bench.gpu_check", "--child", asked],
            cwd=ROOT,
            env=child_environment(setting),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(1.0, min(job.seconds, setting.left)),
            check=False,
        )
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        code, said = 124, "".join(t.decode() if isinstance(t, bytes) else t or "" for t in (late.stdout, late.stderr))
    lines = said.splitlines()
    records = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    complaints = [line for line in lines if line.startswith("=========") and len(line.strip("= ")) > 0]
    summary = [line for line in complaints if "SUMMARY" in line]
    found = {
        "what": "sanitized",
        "tool": tool,
        "mode": mode,
        "there": sanitizer is not None,
        "code": code,
        "summary": summary[-1].strip("= ") if summary else None,
        "first": [line.strip("= ")[:160] for line in complaints[1:9]],
        "n_tokens": records[0]["n_tokens"] if records else 0,
        "tail": " | ".join(line for line in lines[-4:])[-400:],
    }
    return Ended(job, (found,), None, time.monotonic() - began)


def _sanitizer() -> str | None:
    """The tool, on the path or where CUDA is put."""
    known = [
        shutil.which("compute-sanitizer"),
        *map(str, sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))),
    ]
    packed = Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/compute-sanitizer")
    return next((path for path in (*known, *map(str, packed)) if path and os.access(path, os.X_OK)), None)


def _has_no_errors(summary: str | None) -> bool:
    """Memcheck counts errors; racecheck counts them and warnings among its hazards."""
    said = summary or ""
    return re.search(r"\b0 errors", said) is not None and re.search(r"\b[1-9]\d* warning", said) is None


def judge_sanitized(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    outcomes = []
    for one in ended:
        found = one.of("sanitized")[0]
        name = f"sanitizer-{found['tool']}-{found['mode']}"
        value = f"{found['summary']}; {found['n_tokens']} tokens in {one.seconds:.0f} s"
        if not found["there"]:
            verdict: Verdict = "SKIP" if found["n_tokens"] else "FAIL"
            why = "there is no compute-sanitizer here; the job itself"
            outcomes.append(Outcome(verdict, name, f"{why}: {found['n_tokens']} tokens, {found['tail'][-200:]}"))
        elif found["code"] == 124:
            outcomes.append(
                Outcome("MISS", name, f"not over within its time; it said: {found['first'] or found['tail']}")
            )
        elif found["n_tokens"] and _has_no_errors(found["summary"]):
            outcomes.append(Outcome("PASS", name, value, "no errors", found))
        elif (found["tool"], found["mode"]) == ("memcheck", "loop") and _has_no_errors(found["summary"]):
            # On two of three days the launch of the WHILE graph failed under the tool, which reported nothing.
            text = f"its launch failed under the tool, which reports no error: {found['tail'][-200:]}"
            outcomes.append(Outcome("MISS", name, text, "a launch that succeeds", found))
        else:
            text = f"{value}; {' || '.join(found['first'])}; {found['tail']}"
            outcomes.append(Outcome("FAIL", name, text, "no errors", found))
    return outcomes


# The upload of weights (E-33)


def upload(device: str, *, shape: str, runs: int = 3) -> Iterator[Record]:
    """A file of a model's size from the page cache onto the device, beside one large copy from pinned memory."""
    with tempfile.TemporaryDirectory(dir=_roomy()) as folder:
        path = Path(folder)
        n_bytes = _write_checkpoint(path, shape, torch.float32 if device == "cpu" else torch.bfloat16)
        checkpoint = open_checkpoint(path)
        facts = read_shape(checkpoint)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        rates = []
        for _ in range(runs + 1):  # the first warms the page cache, and pins
            started = time.perf_counter()
            model = build_model(checkpoint, facts, dtype=dtype, device=place(device), context=256)
            _synchronize(device)
            rates.append(n_bytes / (time.perf_counter() - started))
            yield {"what": "loaded", "file_bytes": n_bytes, **_laid(model)}
            del model
        checkpoint.close()
        parts = {} if device == "cpu" else _upload_parts(path / "model.safetensors")
    yield {"what": "upload", "bytes": n_bytes, "bytes_s": rates[1:], "pinned_bytes_s": _pinned_rate(device), **parts}


def _laid(model: Model) -> Record:
    """In how many pieces of memory weights lie, whether each is aligned, and how many bytes they take."""
    weights = {t.data_ptr(): t for name, t in tensors_of(model, "") if "frequencies" not in name}
    return {
        "pieces": len({tensor.untyped_storage().data_ptr() for tensor in weights.values()}),
        "aligned": all(address % ALIGNMENT == 0 for address in weights),
        "bytes": sum(tensor.nbytes for tensor in weights.values()),
    }


def _roomy() -> str | None:
    """Memory rather than a disk, where there is room in it for a model."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 8 << 30 else None


def _write_checkpoint(folder: Path, shape: str, dtype: torch.dtype) -> int:
    """A safetensors folder with the sizes of a known shape, and chance for weights; by hand: no package is needed."""
    s = SHAPES[shape]
    made: dict[str, Any] = {}
    at_byte = 0

    def add(name: str, *size: int) -> None:
        nonlocal at_byte
        end = at_byte + math.prod(size) * dtype.itemsize
        kind = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
        made[name] = {"dtype": kind, "shape": list(size), "data_offsets": [at_byte, end]}
        at_byte = end

    add("model.embed_tokens.weight", s.vocab, s.hidden)
    add("model.norm.weight", s.hidden)
    heads = s.attention[0]
    q, kv, _ = heads.qkv_widths
    for layer in range(s.n_layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{at}{norm}.weight", s.hidden)
        for part, rows, columns in (("q", q, s.hidden), ("k", kv, s.hidden), ("v", kv, s.hidden), ("o", s.hidden, q)):
            add(f"{at}self_attn.{part}_proj.weight", rows, columns)
        for part, rows, columns in (
            ("gate", s.widest_ff, s.hidden),
            ("up", s.widest_ff, s.hidden),
            ("down", s.hidden, s.widest_ff),
        ):
            add(f"{at}mlp.{part}_proj.weight", rows, columns)
    if not s.tied_head:
        add("lm_head.weight", s.vocab, s.hidden)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.widest_ff,
        "num_hidden_layers": s.n_layers,
        "num_attention_heads": heads.n_heads,
        "num_key_value_heads": heads.n_kv_heads,
        "head_dim": heads.head_width,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": s.tied_head,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps(made).encode()
    header += b" " * (-len(header) % 8)
    piece = os.urandom(16 * MB)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, at_byte, len(piece)):
            file.write(piece[: at_byte - start])
    return at_byte


def _pinned_rate(device: str) -> float | None:
    """Bytes a second of one copy from pinned memory."""
    if device == "cpu":
        return None
    n_bytes = 1 << 30
    pinned, out = (
        torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(n_bytes, dtype=torch.uint8, device=device),
    )
    best = 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        started = time.perf_counter()
        out.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, n_bytes / (time.perf_counter() - started))
    return best


def _upload_parts(path: Path) -> Record:
    """What an upload takes of the host: seconds to pin its windows, and bytes a second that its threads copy into them
    without a device."""
    started = time.perf_counter()
    windows = [torch.empty(WINDOW_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2 * THREADS)]
    pinned_s = time.perf_counter() - started
    file = np.memmap(path, np.uint8, "r")
    cuts = [len(file) * thread // THREADS for thread in range(THREADS + 1)]
    shares = [(file[a:b], window.numpy()) for (a, b), window in zip(pairwise(cuts), windows, strict=False)]

    def copy(share: tuple[Any, Any]) -> None:
        own, window = share
        for start in range(0, len(own), len(window)):
            piece = own[start : start + len(window)]
            window[: len(piece)] = piece

    rates = []
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(4):
            started = time.perf_counter()
            list(pool.map(copy, shares))
            rates.append(len(file) / (time.perf_counter() - started))
    return {"threads": THREADS, "host_bytes_s": max(rates), "windows_s": pinned_s}


def judge_upload(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    found = _first(ended, "upload")
    if found is None:
        return _broken(ended, "upload")
    rate, pinned = statistics.median(found["bytes_s"]), found["pinned_bytes_s"]
    value = f"{rate / 1e9:.1f} GB/s for {found['bytes'] / 1e9:.2f} GB from the page cache"
    bar = f"at least {UPLOAD_SHARE:.0%} of a pinned copy"
    laid = [_judge_laid(record) for record in ended[0].of("loaded")[:1]]
    if pinned is None:
        return [Outcome("PASS", "upload", value, "", found), *laid]
    value += f"; a pinned copy {pinned / 1e9:.1f} GB/s ({rate / pinned:.0%}); {found['threads']} threads copy "
    value += f"{found['host_bytes_s'] / 1e9:.1f} GB/s into pinned windows, which take {found['windows_s'] * 1e3:.0f} ms"
    return [Outcome("PASS" if rate >= UPLOAD_SHARE * pinned else "MISS", "upload", value, bar, found), *laid]


def _judge_laid(found: Record) -> Outcome:
    """One aligned piece (E-16), in which weights take what they take in the file (E-22); norms are wider."""
    share = found["bytes"] / found["file_bytes"]
    good = found["pieces"] == 1 and found["aligned"] and 1 <= share < LAID_SHARE
    aligned = "all aligned" if found["aligned"] else "NOT all aligned"
    value = f"weights in {found['pieces']} pieces of memory, {aligned}, {share:.4f} of the file's bytes"
    return Outcome("PASS" if good else "FAIL", "upload-laid", value, f"one piece, under {LAID_SHARE}", found)


# Memory of a long prompt (E-36)


def long_prompt(device: str, *, name: str, type: str, lengths: Sequence[int]) -> Iterator[Record]:
    """The most that torch holds while a prompt of each length runs, without the keys and values it was opened with."""
    model = model_on(name, type, device)
    for n in lengths:
        with closing(by_hand(model, type, mode="eager", context=n + 64, n_slots=1)) as driver:
            runner = driver.runner
            n_pages = runner.settled.n_pages
            kv = n_pages * page_bytes(model.shape, kv_type_of(type), runner.page_tokens)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            opened = torch.cuda.memory_allocated()
            driver.prefill(0, random_ids(model, n), list(range(n_pages)))
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        del driver, runner
        torch.cuda.empty_cache()
        yield {"what": "long_prompt", "n": n, "peak": peak, "opened": opened, "kv": kv}


def judge_long_prompt(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    if not ended:
        return [Outcome("SKIP", "long-prompt", "torch counts memory on a GPU only")]
    records = [record for one in ended for record in one.of("long_prompt")]
    if len(records) < 2:
        return _broken(ended, "long-prompt")
    short, long = records[0], records[-1]
    more = ((long["peak"] - long["kv"]) - (short["peak"] - short["kv"])) / MB
    scratch = {record["n"]: round((record["peak"] - record["opened"]) / MB, 1) for record in records}
    value = f"{more:.1f} MB more for {long['n']} tokens than for {short['n']}, beside keys and values"
    value += f"; while they ran {scratch} MB"
    return [
        Outcome(
            "PASS" if more < LONG_MB else "FAIL", "long-prompt", value, f"under {LONG_MB:.0f} MB", {"records": records}
        )
    ]


# Keys and values of 8 bits (E-47)


def kv_error(device: str, *, name: str, type: str, n_tokens: int) -> Iterator[Record]:
    """How well a text is predicted with keys and values of 16 and of 8 bits, by steps through their memory."""
    model = model_on(name, type, device)
    assert model.head is not None
    model = replace(model, head=replace(model.head, scale=SHARPER))
    text = drawn_text(model, n_tokens)
    found = {kv: perplexity(model, kv, text) for kv in ("f16", "q8_0")}
    sizes = {kv: cell_bytes(model.shape.attention[0], kv) for kv in ("f16", "q8_0")}
    yield {"what": "kv_error", "perplexity": found, "bytes": sizes, "n_tokens": len(text)}


def drawn_text(model: Model, n_tokens: int) -> list[int]:
    """A text that the model itself has drawn, keys and values in full width."""
    with closing(by_hand(model, "f32", mode="eager", context=n_tokens + 16, n_slots=1, kv_type="f32")) as driver:
        driver.admit(0, [1], most=n_tokens - 1, sampling=replace(GREEDY, temperature=1.0, seed=11))
        driver.run()
        return [1, *(entry.token for entry in driver.entries if entry.token is not None)]


def perplexity(model: Model, kv_type: KVType, text: Sequence[int]) -> float:
    """Of a text, from its third token on: each step takes in the text's own token, whatever it chose itself."""
    losses = []
    with closing(by_hand(model, "f32", mode="eager", context=len(text) + 16, n_slots=1, kv_type=kv_type)) as driver:
        logits = driver.runner.plan.buffer("logits").tensor
        driver.admit(0, text[:1], most=len(text) + 8)
        driver.step()  # admits
        for taken, wanted in pairwise(text[1:]):
            with torch.inference_mode():
                driver.runner.tables.table["token"][0] = taken
            driver.synchronize()
            driver.step()
            losses.append(-float(logits[0].float().log_softmax(-1)[wanted]))
    return math.exp(statistics.fmean(losses))


def judge_kv_error(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    found = _first(ended, "kv_error")
    if found is None:
        return _broken(ended, "kv-error")
    wide, narrow = (found["perplexity"][kv] for kv in ("f16", "q8_0"))
    change, share = narrow / wide - 1, found["bytes"]["q8_0"] / found["bytes"]["f16"]
    value = (
        f"perplexity {wide:.4f} with f16 and {narrow:.4f} with q8_0 ({change:+.3%}) over {found['n_tokens']} tokens; "
        f"{share:.3f} of the bytes"
    )
    good = abs(change) < PERPLEXITY_SHARE and 0.53 <= share <= 0.57
    bar = f"within {PERPLEXITY_SHARE:.1%}, 0.53 to 0.57 of the bytes"
    return [Outcome("PASS" if good else "FAIL", "kv-error", value, bar, found)]


# Bandwidth (E-48, E-74)


def bandwidth(device: str, *, context: int = 32_768) -> Iterator[Record]:
    """Bytes a second of attention over a long past, and of packed products, beside a plain read of memory."""
    from bench import attention, kernels
    from bench.replay import replayed_us
    from ostinato.backends.cuda.triton.attend import MAX_SPLITS, attend_workspace, bind_attend

    plain = read_bandwidth(device)
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count
    yield {"what": "plain", "bytes_s": plain}
    for size in attention.SIZES:
        where = torch.device("cuda")
        heads, one = attention.heads_of(size, where), attention.cell_bytes(attention.store_of(size, "bf16", 1, where))
        rows = attention.rows_at([context], where)
        pool = attention.store_of(size, "bf16", 4 * context, where)
        layers = attention.layers_of(pool, context)
        qkv = torch.randn(attention.N_SLOTS, heads.n_columns, device=where)
        seen = torch.empty(attention.N_SLOTS, size.n_heads * size.width, device=where)
        workspace = attend_workspace(attention.N_SLOTS, [heads], where)
        us = replayed_us([bind_attend(qkv, seen, layer, rows, heads, workspace) for layer in layers] * 2)
        items = size.n_kv_heads * min(MAX_SPLITS, context // 64)
        yield {
            "what": "attention",
            "name": size.name,
            "us": us,
            "bytes_s": context * one / us * 1e6,
            "busy_sms": min(1.0, items / n_sms),
        }
        del pool, layers, rows, qkv, seen, workspace
        torch.cuda.empty_cache()
    for type in ("q4_k", "q8_0"):
        for n, k in ((4096, 4096), (14336, 4096)):
            first = kernels.weight_of(type, n, k)
            n_bytes = kernels.n_bytes(first)
            weights = [first, *(kernels.weight_of(type, n, k) for _ in range(kernels.ROTATE_BYTES // n_bytes))]
            bound = [kernels.product_of(weight, n, k, "store", 1, True).bind() for weight in weights]
            us = replayed_us(bound)
            yield {"what": "product", "name": f"{type} {n} x {k}", "us": us, "bytes_s": n_bytes / us * 1e6}
            del weights, bound, first
            torch.cuda.empty_cache()


def judge_bandwidth(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    if not ended:
        return [Outcome("SKIP", "bandwidth", "Triton's kernels are timed on a GPU only")]
    plain = _first(ended, "plain")
    if plain is None:
        return _broken(ended, "bandwidth")
    outcomes = []
    for what, bar in (("attention", ATTENTION_SHARE), ("product", PRODUCT_SHARE)):
        for record in ended[0].of(what):
            share = record["bytes_s"] / plain["bytes_s"]
            value = f"{record['bytes_s'] / 1e12:.2f} TB/s, {share:.0%} of a plain read, in {record['us']:.1f} us"
            good = share >= bar and record.get("busy_sms", 1.0) >= SM_SHARE
            if "busy_sms" in record:
                value += f"; {record['busy_sms']:.0%} of the multiprocessors have work"
            name = f"{what}-{record['name'].replace(' ', '-')}"
            outcomes.append(Outcome("PASS" if good else "MISS", name, value, f"at least {bar:.0%}", record))
    if ended[0].error is not None:
        outcomes.append(Outcome("FAIL", "bandwidth", ended[0].error))
    return outcomes


# Graphs of prompts beside their launches (E-60)


def prompt_graphs(device: str, *, name: str, type: str, n_tokens: int = 512, runs: int = 7) -> Iterator[Record]:
    """A prompt's chunk from its graph, and node by node; and a recurrent step in `graph` and in `eager`."""
    model = model_on(name, type, device)
    with closing(by_hand(model, type, mode="eager", context=n_tokens + 64, n_slots=1)) as driver:
        runner, cuda = driver.runner, _cuda()
        prefill: Any = runner.chunks
        tokens, pages = random_ids(model, n_tokens), list(range(runner.settled.n_pages))
        side: Any = runner.start.side  # type: ignore[attr-defined]  # a start on CUDA has one
        times: dict[str, float] = {}
        graphs = dict(prefill._graphs)
        for how, kept in (("graph", graphs), ("launches", {})):
            prefill._graphs = kept
            spent = []
            for _ in range(runs + 2):
                began, ended = (cuda.Event(enable_timing=True) for _ in range(2))
                with torch.inference_mode(), torch.cuda.stream(side):
                    cuda._sleep(20_000_000)  # the host has queued everything before it begins
                    began.record()
                    prefill.run([ChunkPart(tokens, 0, [pages], 0)], prefill.rows)
                    ended.record()
                ended.synchronize()
                spent.append(float(began.elapsed_time(ended)))
            times[how] = statistics.median(spent[2:])
        prefill._graphs = graphs
    yield {"what": "prompt_graphs", "ms": times, "failures": dict(runner.chunks.failures)}
    recurrent = model_on("mamba2", "f32", device)
    paces = {}
    for mode in ("eager", "graph"):
        with closing(by_hand(recurrent, "f32", mode=mode, context=128, n_slots=2)) as driver:
            paces[mode] = statistics.median(_pace(driver, recurrent, 64, 3))
    yield {"what": "recurrent", "tok_s": paces}


def _cuda() -> Any:
    """torch leaves its events untyped."""
    return torch.cuda


def judge_prompt_graphs(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    if not ended:
        return [Outcome("SKIP", "prompt-graphs", "graphs are CUDA's")]
    found = _first(ended, "prompt_graphs")
    if found is None:
        return _broken(ended, "prompt-graphs")
    ms, outcomes = found["ms"], []
    value = f"512 tokens {ms['graph']:.2f} ms from a graph, {ms['launches']:.2f} ms node by node"
    good = ms["graph"] <= GRAPH_SHARE * ms["launches"] and not found["failures"]
    outcomes.append(Outcome("PASS" if good else "MISS", "prompt-graphs", value, f"at most {GRAPH_SHARE} of it", found))
    paces = _first(ended, "recurrent")
    if paces is None:
        return [*outcomes, *_broken(ended, "recurrent-graph")]
    eager, graph = (paces["tok_s"][mode] for mode in ("eager", "graph"))
    value = f"mamba2 {graph:,.0f} tok/s from a graph with torch's products in it, {eager:,.0f} node by node"
    verdict: Verdict = "PASS" if graph * GRAPH_SHARE >= eager else "MISS"
    return [*outcomes, Outcome(verdict, "recurrent-graph", value, "not slower", paces)]


# First tokens (E-65)


def first_tokens(device: str, *, name: str, type: str, n: int, n_prompt: int) -> Iterator[Record]:
    """Requests one after the other: how long each waits for its first token, and what was instantiated meanwhile."""
    model = model_on(name, type, device)
    short = replace(GREEDY, max_tokens=3, ignore_eos=True)
    with _engine(model, type, context=min(1024, model.shape.context)) as engine:
        for seed in range(5):
            list(engine.submit(random_ids(model, n_prompt, seed), short))
        before, waits = engine.stats().instantiations, []
        for seed in range(n):
            prompt = random_ids(model, n_prompt, 100 + seed)
            started = time.perf_counter()
            request = engine.submit(prompt, short)
            next(request)
            waits.append((time.perf_counter() - started) * 1e3)
            list(request)
        made = engine.stats().instantiations - before
    yield {"what": "first_tokens", "ms": [round(wait, 3) for wait in waits], "instantiations": made}


def judge_first_tokens(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    found = _first(ended, "first_tokens")
    if found is None:
        return _broken(ended, "first-tokens")
    waits = sorted(found["ms"])
    middle, late = statistics.median(waits), waits[min(len(waits) - 1, len(waits) * 99 // 100)]
    spread = f"p99 {late:.2f} ms ({late / middle:.2f} times), longest {waits[-1]:.2f} ms"
    value = f"{len(waits)} requests: median {middle:.2f} ms, {spread}"
    facts = {"median": middle, "p99": late, "longest": waits[-1]}
    if found["instantiations"]:
        return [Outcome("FAIL", "first-tokens", f"{found['instantiations']} graphs were made; {value}", "none", facts)]
    verdict: Verdict = "PASS" if late <= FIRST_SHARE * middle or not setting.on_gpu else "MISS"
    return [Outcome(verdict, "first-tokens", value, f"p99 at most {FIRST_SHARE} medians, no graph made", facts)]


# Times inside graph and loop (E-63)


def phases(device: str, *, name: str, type: str, depth: int, n_steps: int) -> Iterator[Record]:
    """What the parts of a step take by the device's own stamps, beside the whole step without stamps, in every mode
    that has nodes to time."""
    model = model_on(name, type, device)
    bench = Bench(model, kv_type_of(type), 1e12, repeats=3)
    for mode in modes_of(device):
        if why_not_profiled(mode, kind_of(str(model.device))) is not None:
            continue
        found = bench.profile(batch=1, depth=depth, n_steps=n_steps, mode=mode)
        with _engine(model, type, mode=mode, context=depth + n_steps + 64) as engine:
            gaps = []
            for seed in range(3):
                asked = replace(GREEDY, max_tokens=n_steps + 2, ignore_eos=True)
                times = [token.time_ns for token in engine.submit(random_ids(model, depth, seed), asked)]
                gaps.append((times[-1] - times[1]) / (len(times) - 2) / 1e3)
        kinds = {kind.kind: round(kind.microseconds, 2) for kind in found.kinds}
        yield {
            "what": "phases",
            "mode": mode,
            "us": round(found.microseconds, 2),
            "between_us": None if found.between_us is None else round(found.between_us, 2),
            "wall_us": round(statistics.median(gaps), 2),
            "kinds": kinds,
        }


def judge_phases(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    outcomes = []
    for record in [record for one in ended for record in one.of("phases")]:
        whole = record["us"] + (record["between_us"] or 0.0)
        share = whole / record["wall_us"] - 1
        between = "" if record["between_us"] is None else f" and {record['between_us']:.0f} us between them"
        value = f"{record['us']:.0f} us of nodes{between}, of {record['wall_us']:.0f} us a token ({share:+.1%})"
        value += f": {record['kinds']}"
        # Node by node the host is what a step waits for: its nodes are told and held to nothing.
        held = setting.on_gpu and record["mode"] != "eager"
        verdict: Verdict = "PASS" if not held or abs(share) <= PHASES_SHARE else "MISS"
        bar = f"within {PHASES_SHARE:.0%}" if held else "reported"
        outcomes.append(Outcome(verdict, f"phases-{record['mode']}", value, bar, record))
    if not outcomes or ended[0].error is not None:
        outcomes += _broken(ended, "phases")
    return outcomes


# Fusions (E-81)


def fusions(device: str, *, name: str, type: str, depth: int, n_tokens: int, runs: int) -> Iterator[Record]:
    """The pace of a loop with every fusion, and with each of them switched off."""
    from ostinato.backends.cuda import gpu
    from ostinato.backends.cuda.kernels import triton_kernels
    from ostinato.backends.cuda.launch import launches_in
    from ostinato.backends.cuda.plan import FusedPlan, Fusions
    from ostinato.backends.cuda.ready import compile_missing

    model = model_on(name, type, device)
    kernels = triton_kernels(gpu.chip_of(device))
    for off in (None, *(field.name for field in fields(Fusions))):
        chosen = Fusions() if off is None else replace(Fusions(), **{off: False})
        with closing(by_hand(model, type, mode="loop", context=depth + n_tokens + 64, n_slots=1)) as driver:
            runner = driver.runner
            plan = FusedPlan(model, runner.memory, runner.tables, runner.n_tokens, kernels, chosen).plan()
            compile_missing(launches_in([node.run for node in plan.nodes]), model.device)
            kind: Any = runner.start.__class__
            start = kind(plan, runner.tables, runner.guard, runner.changed.set)
            runner.decode_mode.replace(plan, start)
            runner.plan, runner.start = plan, start
            gaps = []
            for _ in range(runs + 1):
                driver.forget()
                driver.admit(0, random_ids(model, depth), most=n_tokens)
                driver.run()
                times = [entry.time_ns for entry in driver.entries]
                gaps.append((times[-1] - times[1]) / (len(times) - 2) / 1e3)
        yield {"what": "fusions", "off": off, "us": gaps[1:], "n_nodes": len(plan.nodes)}


def judge_fusions(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    if not ended:
        return [Outcome("SKIP", "fusions", "the fused step is a GPU's")]
    records = {record["off"]: record for one in ended for record in one.of("fusions")}
    if None not in records or len(records) < 2:
        return _broken(ended, "fusions")
    base, outcomes = _interval(records[None]["us"]), []
    for off, record in records.items():
        if off is None:
            continue
        mean, half = _interval(record["us"])
        gain = mean - base[0]
        value = (
            f"{base[0]:.1f} +- {base[1]:.1f} us a token with it, {mean:.1f} +- {half:.1f} without "
            f"({record['n_nodes']} nodes for {records[None]['n_nodes']}): it gains {gain:+.1f} us, {gain / mean:+.1%}"
        )
        # What is slower than it would be without is a figure to act on.
        verdict: Verdict = "MISS" if gain < -(half + base[1]) else "PASS"
        outcomes.append(Outcome(verdict, f"fusion-{off}", value, "not slower than without", record))
    return outcomes


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its interval of 95 %."""
    return statistics.fmean(values), 2 * statistics.stdev(values) / math.sqrt(len(values))


# The checks


def _small(setting: Setting, large: str = "llama-1b") -> dict[str, Any]:
    return {"name": large, "type": "bf16"} if setting.on_gpu else {"name": "tiny", "type": "f32"}


def _ahead_jobs(setting: Setting) -> list[Job]:
    return [Job("ahead", {"name": "smollm2-135m", "type": "q4_1"}, 150)] if setting.on_gpu else []


def _capture_jobs(setting: Setting) -> list[Job]:
    sizes = {"n_tokens": 200, "runs": 5} if setting.on_gpu else {"n_tokens": 20, "runs": 2}
    return [Job("captures", {**_small(setting, "smollm2-135m"), **sizes}, 90)]


def _sanitizer_jobs(setting: Setting) -> list[Job]:
    tools = ("memcheck", "initcheck") if setting.on_gpu else ("memcheck",)
    modes = modes_of(setting.device) if setting.on_gpu else ("loop",)
    return [Job("small_job", {"tool": tool, "mode": mode}, 150) for tool in tools for mode in modes]


def _upload_jobs(setting: Setting) -> list[Job]:
    return [Job("upload", {"shape": "llama-1b" if setting.on_gpu else "tiny"}, 60)]


def _long_jobs(setting: Setting) -> list[Job]:
    return [Job("long_prompt", {**_small(setting), "lengths": [4096, 32_768]}, 60)] if setting.on_gpu else []


def _kv_jobs(setting: Setting) -> list[Job]:
    return [Job("kv_error", {**_small(setting, "smollm2-135m"), "n_tokens": 1_000 if setting.on_gpu else 200}, 60)]


def _bandwidth_jobs(setting: Setting) -> list[Job]:
    return [Job("bandwidth", {}, 60)] if setting.on_gpu else []


def _graph_jobs(setting: Setting) -> list[Job]:
    return [Job("prompt_graphs", _small(setting), 60)] if setting.on_gpu else []


def _first_jobs(setting: Setting) -> list[Job]:
    sizes = {"n": N_FIRST, "n_prompt": 64} if setting.on_gpu else {"n": 20, "n_prompt": 12}
    return [Job("first_tokens", {**_small(setting), **sizes}, 60)]


def _phase_jobs(setting: Setting) -> list[Job]:
    sizes = {"depth": 500, "n_steps": 128} if setting.on_gpu else {"depth": 20, "n_steps": 8}
    return [Job("phases", {**_small(setting), **sizes}, 60)]


def _fusion_jobs(setting: Setting) -> list[Job]:
    words = {**_small(setting), "depth": 500, "n_tokens": 200, "runs": 8}
    return [Job("fusions", words, 60)] if setting.on_gpu else []


WORKS: Final[Mapping[str, Callable[..., Iterator[Record]]]] = {
    "ahead": ahead,
    "captures": captures,
    "small_job": small_job,
    "upload": upload,
    "long_prompt": long_prompt,
    "kv_error": kv_error,
    "bandwidth": bandwidth,
    "prompt_graphs": prompt_graphs,
    "first_tokens": first_tokens,
    "phases": phases,
    "fusions": fusions,
}

CHECKS: Final = (
    Check("exact", "sanitizer", _sanitizer_jobs, judge_sanitized, run=run_sanitized),
    Check("exact", "kv-error", _kv_jobs, judge_kv_error),
    Check("stress", "long-prompt", _long_jobs, judge_long_prompt),
    Check("stress", "ahead", _ahead_jobs, judge_ahead, alone=True),
    Check("stress", "captures", _capture_jobs, judge_captures, alone=True),
    Check("speed", "upload", _upload_jobs, judge_upload, alone=True),
    Check("speed", "bandwidth", _bandwidth_jobs, judge_bandwidth, alone=True),
    Check("speed", "prompt-graphs", _graph_jobs, judge_prompt_graphs, alone=True),
    Check("speed", "first-tokens", _first_jobs, judge_first_tokens, alone=True),
    Check("speed", "phases", _phase_jobs, judge_phases, alone=True),
    Check("speed", "fusions", _fusion_jobs, judge_fusions, alone=True),
)
