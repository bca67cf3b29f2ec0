"""Speed: decode, prefill, the time to the first token and the memory of graphs, through the engine, beside their bars.

Weights are random, contexts 500, sampling is in the step and the outbox is on; 8 slots are configured unless more
sequences run. Tokens are timed by the device's own clock, medians of three runs. The limit beside a figure is what one
step must read over a bandwidth that was measured in the same run; what each kind of node takes is told after it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch

from bench.gpu_frame import Check, Ended, Job, Outcome, Record, Setting, Verdict
from bench.gpu_models import kv_type_of, model_on, modes_of, place, random_ids, settled_for
from ostinato.backends.base import PAGE_TOKENS, ChunkPart
from ostinato.backends.torch.model import Model
from ostinato.engine.choose import settle_model
from ostinato.engine.driver import GREEDY, LoopDriver
from ostinato.engine.engine import Engine
from ostinato.engine.open import open_runner
from ostinato.engine.request import Token
from ostinato.lab.bench import Bench, kv_read_bytes, read_bandwidth
from ostinato.models.named_shapes import SHAPES
from ostinato.options import Sampling

DEPTH, N_GEN, REPEATS, SLOTS = 500, 256, 3, 8
EAGER_GEN: Final = 48  # the slow one: fewer tokens tell as much
EAGER_RATIO: Final = 3.0
NOT_SLOWER: Final = 0.99  # the same within what two runs differ by
FIRST_TOKEN_S: Final = 2.0
GRAPH_MB: Final = 64.0
GRAPH_SLOTS: Final = (1, 8, 32)
MB: Final = 1 << 20
WARM: Final = replace(GREEDY, temperature=0.8, top_k=40, top_p=0.95, seed=7)


@dataclass(frozen=True, slots=True)
class Bars:
    """What one model must reach on an H200, in tok/s, and what llama.cpp does there."""

    shape: str
    type: str
    decode: float
    llama_cpp: float
    prefill: float | None = None
    llama_cpp_prefill: float | None = None
    batches: Mapping[int, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.shape.removeprefix('llama-')}-{self.type}"


MODELS: Final = (
    Bars("llama-1b", "bf16", 900, 763, 50_000, 70_900, {4: 2_800, 16: 9_000, 32: 14_000}),
    Bars("llama-8b", "bf16", 230, 207, 20_000, 22_400),
    Bars("llama-1b", "q4_k_m", 1_000, 860, None, 37_000),
    Bars("llama-8b", "q4_k_m", 330, 261, None, 9_000),
)
TINY: Final = Bars("tiny", "f32", 1, 1, 1, 1, {2: 1})  # for a dry run on the CPU: bars that anything meets


# Measuring, in a child


def _engine(model: Model, type: str, mode: str, n_slots: int, context: int) -> Engine:
    return Engine(model, settled_for(model, mode, n_slots=n_slots, context=context, kv_type=kv_type_of(type)))


def warm(device: str, *, shape: str, type: str, slots: Sequence[int]) -> Iterator[Record]:
    """Compile and keep every kernel that the measurements will need: a few tokens for each number of slots."""
    started = time.perf_counter()
    model = model_on(shape, type, device)
    for n_slots in slots:
        with _engine(model, type, "loop", n_slots, 1024) as engine:
            list(engine.submit(random_ids(model, 100, 1), replace(GREEDY, max_tokens=4, ignore_eos=True)))
    yield {"what": "warm", "model": f"{shape} {type}", "s": round(time.perf_counter() - started, 1)}


def speed(
    device: str, *, shape: str, type: str, prefill: bool, batches: Sequence[int], profile: bool = True
) -> Iterator[Record]:
    """Everything about one model; the figures that matter most come first."""
    small = device == "cpu"
    depth, n_gen, n_prompt = (40, 16, 48) if small else (DEPTH, N_GEN, 512)
    started = time.perf_counter()
    bandwidth = read_bandwidth(device)
    model = model_on(shape, type, device)
    yield {"what": "machine", "name": _device_name(device), "read_bytes_s": bandwidth}
    meter = Meter(model, type, bandwidth, depth)
    context = 2048 if not small else 256
    for mode in reversed(modes_of(device)):  # loop first, eager last
        n = EAGER_GEN if mode == "eager" and not small else n_gen
        with _engine(model, type, mode, SLOTS, context) as engine:
            yield meter.decode(engine, 1, n)
            if mode == "loop":
                yield {**meter.decode(engine, 1, n, WARM), "what": "sampled"}
                if prefill:
                    yield meter.prefill(engine, n_prompt)
                for batch in batches:
                    if batch <= SLOTS:
                        yield meter.decode(engine, batch, n)
        _tidy(device)
    for batch in batches:
        if batch > SLOTS:
            # The first sequence decodes while the prompts of the others are run: it needs room for that.
            with _engine(model, type, "loop", batch, 2 * context) as engine:
                yield meter.decode(engine, batch, n_gen)
            _tidy(device)
    if profile:
        for batch in dict.fromkeys((1, *(b for b in batches if b == max(batches)))):
            found = Bench(model, kv_type_of(type), bandwidth).profile(batch=batch, depth=depth, n_steps=8)
            kinds = [asdict(kind) for kind in found.kinds]
            yield {"what": "profile", "batch": batch, "us": found.microseconds, "kinds": kinds}
            _tidy(device)
    if prefill and not small:
        yield _prompt_profile(model, type, n_prompt)
    yield {"what": "done", "s": round(time.perf_counter() - started, 1)}


@dataclass(frozen=True, slots=True)
class Meter:
    """One model, and how its runs become figures: one run to warm, three that count."""

    model: Model
    type: str
    bandwidth: float
    depth: int

    def decode(self, engine: Engine, batch: int, n_tokens: int, sampling: Sampling = GREEDY) -> Record:
        """Tokens a second of all sequences together, from the last one's first token on."""
        prompts = [random_ids(self.model, self.depth, 100 + number) for number in range(batch)]
        rates, host, positions, short = [], [], [], 0
        for number in range(REPEATS + 1):
            tokens, device_s, host_s = _watch(engine, prompts, n_tokens, replace(sampling, seed=number))
            if number:
                rates.append(len(tokens) / device_s)
                host.append(len(tokens) / host_s)
                positions += [token.position for token in tokens]
                short += len(tokens) < batch * n_tokens  # a sequence came to the end of the context
        # A token at position p came of a step that took in the one before it.
        kv_type = kv_type_of(self.type)
        kept = statistics.fmean(kv_read_bytes(self.model.shape, kv_type, position - 1) for position in positions)
        n_bytes = engine.runner.plan.read_bytes(batch) / batch + kept
        more = {"slots": engine.runner.settled.n_slots, "short_runs": short}
        return {**self._figure("decode", engine.mode, batch, rates, n_bytes), "host_tok_s": _middle(host), **more}

    def prefill(self, engine: Engine, n_tokens: int) -> Record:
        """Tokens a second of one prompt, from its first chunk to its first token, by the host's clock."""
        sampling, rates = replace(GREEDY, max_tokens=1, ignore_eos=True), []
        for number in range(REPEATS + 2):
            request = engine.submit(random_ids(self.model, n_tokens, 1000 + number), sampling)
            list(request)
            rates.append((n_tokens - request.cached_tokens) / request.prefill_s)
        n_chunks = -(-n_tokens // engine.runner.chunks.rows)
        n_bytes = n_chunks * engine.runner.plan.read_bytes(engine.runner.chunks.rows) / n_tokens
        return self._figure("prefill", engine.mode, 1, rates[2:], n_bytes)

    def _figure(self, what: str, mode: str, batch: int, rates: Sequence[float], n_bytes: float) -> Record:
        return {
            "what": what,
            "mode": mode,
            "batch": batch,
            "tok_s": statistics.median(rates),
            "runs": [round(rate, 1) for rate in rates],
            "limit": self.bandwidth / n_bytes,
            "bytes_per_token": round(n_bytes),
        }


def _watch(
    engine: Engine, prompts: Sequence[Sequence[int]], n_tokens: int, sampling: Sampling
) -> tuple[list[Token], float, float]:
    """Ask for all prompts at once; watch from the last one's first token for `n_tokens` more of it, then cancel.

    The tokens made in between, of all sequences, and how long that was by the device's clock and by the host's.
    """
    endless = replace(sampling, ignore_eos=True)
    requests = [engine.submit(prompt, endless, wait=True) for prompt in prompts]
    last, heard, came = requests[-1], [], [0.0, 0.0]
    for token in last:
        heard.append(token)
        came[len(heard) > 1] = time.perf_counter()
        if len(heard) == n_tokens + 1:
            break
    for request in requests:
        request.cancel()
    list(last)
    begin, end = heard[0].time_ns, heard[-1].time_ns
    everything = [token for request in requests[:-1] for token in request] + heard
    within = [token for token in everything if begin < token.time_ns <= end]
    return within, (end - begin) / 1e9, came[1] - came[0]


def _prompt_profile(model: Model, type: str, n_tokens: int) -> Record:
    """What the device spends on a prompt without the engine around it, and on which kernels."""
    from torch.profiler import ProfilerActivity, profile

    n_pages = -(-n_tokens // PAGE_TOKENS[model.device.type]) + 1
    settled = settle_model(
        model, "loop", context=n_tokens + 64, n_pages=n_pages, n_slots=SLOTS, kv_type=kv_type_of(type)
    )
    tokens, times = random_ids(model, n_tokens, 1), []
    with closing(LoopDriver(open_runner(model, settled))) as driver:
        runner, event = driver.runner, _event()
        side: Any = getattr(runner.start, "side", None)

        def run() -> None:
            runner.chunks.run([ChunkPart(tokens, 0, [range(n_pages)], 0)], runner.chunks.rows)

        for _ in range(REPEATS + 2):
            began, ended = event(enable_timing=True), event(enable_timing=True)
            with torch.inference_mode(), torch.cuda.stream(side):
                began.record()
                run()
                ended.record()
            ended.synchronize()
            times.append(float(began.elapsed_time(ended)))
        kernels: list[tuple[str, float]] = []
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                runner.beside(run).result(30.0)
                torch.cuda.synchronize()
            rows: Any = profiled.key_averages()
            kernels = [(row.key[:60], float(row.self_device_time_total)) for row in rows]
        except (RuntimeError, AttributeError) as error:
            kernels = [(f"not profiled: {error}"[:200], 0.0)]
    kernels = sorted(kernels, key=lambda one: -one[1])[:8]
    return {"what": "prompt_profile", "n": n_tokens, "device_ms": statistics.median(times[2:]), "kernels": kernels}


def _event() -> Any:
    """torch leaves its events untyped."""
    return torch.cuda.Event


def _middle(values: Sequence[float]) -> float:
    return round(statistics.median(values), 1)


def _device_name(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name(0)


def _tidy(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


# From weights to the first token


def first_token(device: str, *, shape: str, type: str, n_slots: int = SLOTS) -> Iterator[Record]:
    """From weights on the device to the first token of a prompt, in a process that has compiled nothing itself."""
    model = model_on(shape, type, device)
    if device != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    if device != "cpu":
        _import_kernels()
    imported = time.perf_counter()
    context = 2048 if device != "cpu" else 256
    with _engine(model, type, "loop", n_slots, context) as engine:
        opened = time.perf_counter()
        prompt = random_ids(model, DEPTH if device != "cpu" else 40, 1)
        request = engine.submit(prompt, replace(GREEDY, max_tokens=2, ignore_eos=True))
        next(request)
        done = time.perf_counter()
        list(request)
    yield {
        "what": "first_token",
        "s": done - started,
        "imports_s": imported - started,
        "open_s": opened - imported,
        "prompt_s": done - opened,
    }


def _import_kernels() -> None:
    """What an engine on CUDA imports when it is opened, by name, so that its share is known."""
    import cuda.core  # noqa: F401

    from ostinato.backends.cuda.kernels import triton_kernels
    from ostinato.backends.machine import TUNED

    triton_kernels(TUNED)


# Memory of graphs


def graph_memory(device: str, *, shape: str, type: str, slots: Sequence[int] = GRAPH_SLOTS) -> Iterator[Record]:
    """What the card holds more of after graphs were made than before, by number of slots; code is loaded before."""
    from ostinato.backends.cuda.chunks import FusedChunks

    model = model_on(shape, type, device)
    taken: dict[str, int] = {}
    capture = FusedChunks.capture

    def watched(self: FusedChunks, *given: Any, **words: Any) -> None:
        before = _card_bytes()
        capture(self, *given, **words)
        taken["prompts"] = _card_bytes() - before

    FusedChunks.capture = watched  # type: ignore[method-assign]  # to look, for this process alone
    for number, n_slots in enumerate((*slots, *slots)):  # the first time round loads kernels
        context, page = 1024, PAGE_TOKENS["cuda"]
        n_pages = -(-context // page)
        settled = settle_model(
            model, "loop", context=context, n_pages=n_pages, n_slots=n_slots, kv_type=kv_type_of(type)
        )
        with closing(LoopDriver(open_runner(model, settled))) as driver:
            driver.admit(0, random_ids(model, 16, 1), most=8)
            before = _card_bytes()
            driver.run()  # builds, then plays
            step = _card_bytes() - before
        del driver
        _tidy(device)
        if number >= len(slots):
            yield {"what": "graph_memory", "slots": n_slots, "step": step, "prompts": taken["prompts"]}


def _card_bytes() -> int:
    """Bytes in use on the card, by any process, without what torch keeps for itself."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


# transformers


def transformers(device: str, *, shape: str, n_tokens: int = N_GEN, repeats: int = REPEATS) -> Iterator[Record]:
    """The peer: the same shape with random bfloat16 weights, its static cache, its decode step compiled."""
    import transformers as library

    s = SHAPES[shape]
    heads = s.attention[0]
    config = library.LlamaConfig(
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        intermediate_size=s.widest_ff,
        num_hidden_layers=s.n_layers,
        num_attention_heads=heads.n_heads,
        num_key_value_heads=heads.n_kv_heads,
        head_dim=heads.head_width,
        max_position_embeddings=4096,
        tie_word_embeddings=s.tied_head,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.set_default_dtype(dtype)
    started = time.perf_counter()
    with torch.device(place(device)):
        model = library.LlamaForCausalLM(config).eval()
    ids = torch.randint(1, s.vocab, (1, DEPTH if device != "cpu" else 16), device=place(device))
    stamps: list[float] = []

    def heard(input_ids: Any, scores: Any, **more: Any) -> Any:
        """Told after every token, as a criterion to stop: the time of the first and the last."""
        n = input_ids.shape[1] - ids.shape[1]
        if n in (1, n_tokens):
            if device != "cpu":
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    for number in range(repeats + 2):
        stamps.clear()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n_tokens,
                min_new_tokens=n_tokens,
                do_sample=False,
                cache_implementation="static",
                stopping_criteria=library.StoppingCriteriaList([_criterion(library, heard)]),
            )
        if number >= 2:  # the first compiles, the second may record graphs
            yield {"what": "transformers", "tok_s": (n_tokens - 1) / (stamps[-1] - stamps[0])}
        elif number == 0:
            yield {"what": "compiled", "s": round(time.perf_counter() - started, 1), "version": library.__version__}


def _criterion(library: Any, heard: Any) -> Any:
    base: Any = library.StoppingCriteria

    class Heard(base):  # type: ignore[misc]  # untyped
        def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
            return heard(input_ids, scores, **more)

    return Heard()


# Judging


def _judge(bars: Bars, setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    one = ended[0]
    outcomes: list[Outcome] = []
    decode = {(r["mode"], r["batch"]): r for r in one.of("decode")}
    loop = decode.get(("loop", 1))
    if loop is not None:
        outcomes.append(_bar(f"decode-{bars.name}", loop, bars.decode, bars.llama_cpp))
        for sampled in one.of("sampled"):
            outcomes.append(
                _plain(f"decode-{bars.name}-sampled", f"{sampled['tok_s']:,.0f} tok/s, top-k 40, top-p 0.95")
            )
        outcomes += _ratios(bars, decode)
    for batch, bar in bars.batches.items():
        if ("loop", batch) in decode:
            outcomes.append(_bar(f"decode-{bars.name}-batch-{batch}", decode["loop", batch], bar, None))
    for record in one.of("prefill"):
        outcomes.append(_bar(f"prefill-{bars.name}", record, bars.prefill, bars.llama_cpp_prefill, limit=False))
    for record in one.of("prompt_profile"):
        outcomes.append(_plain(f"time-{bars.name}-prompt", _prompt_shares(bars, record), record))
    if one.error is not None:
        outcomes.append(Outcome("FAIL", bars.name, one.error))
    for record in one.of("profile"):
        outcomes.append(_plain(f"time-{bars.name}-batch-{record['batch']}", _shares(record, one), record))
    return outcomes


def _bar(name: str, record: Record, bar: float | None, peer: float | None, *, limit: bool = True) -> Outcome:
    rate = float(record["tok_s"])
    runs = f"{min(record['runs']):,.0f} - {max(record['runs']):,.0f}"
    value = f"{rate:,.0f} tok/s ({runs})"
    if limit:
        value += f"; limit {record['limit']:,.0f} ({100 * rate / record['limit']:.0f} % of it)"
    if "host_tok_s" in record:
        value += f"; heard at {record['host_tok_s']:,.0f}"
    if record.get("short_runs"):
        value += f"; in {record['short_runs']} runs a sequence came to the end of the context"
    if peer is not None:
        value += f"; llama.cpp {peer:,.0f} ({rate / peer:.2f} times)"
    verdict: Verdict = "PASS" if bar is None or rate >= bar else "MISS"
    return Outcome(verdict, name, value, "" if bar is None else f"at least {bar:,.0f}", record)


def _ratios(bars: Bars, decode: Mapping[tuple[str, int], Record]) -> Iterator[Outcome]:
    loop = float(decode["loop", 1]["tok_s"])
    for mode, least in (("eager", EAGER_RATIO), ("graph", NOT_SLOWER)):
        if (mode, 1) in decode:
            rate = float(decode[mode, 1]["tok_s"])
            verdict: Verdict = "PASS" if loop >= least * rate else "MISS"
            value = f"loop {loop:,.0f} over {mode} {rate:,.0f} tok/s: {loop / rate:.2f}"
            yield Outcome(verdict, f"decode-{bars.name}-{mode}", value, f"at least {least}", decode[mode, 1])


def _plain(name: str, value: str, facts: Mapping[str, Any] | None = None) -> Outcome:
    return Outcome("PASS", name, value, "reported", facts or {})


def _shares(profile: Record, one: Ended) -> str:
    """What limits a step: each kind of node, its time, and the share of the bandwidth that it reads weights at."""
    bandwidth = float(one.of("machine")[0]["read_bytes_s"])
    parts = []
    for kind in sorted(profile["kinds"], key=lambda kind: -kind["microseconds"]):
        us = float(kind["microseconds"])
        share = 100 * kind["weight_bytes"] / (us * 1e-6) / bandwidth if us else 0.0
        reads = f", {share:.0f} % of {bandwidth / 1e12:.2f} TB/s" if kind["weight_bytes"] else ""
        parts.append(f"{kind['kind']} {us:.0f} us in {kind['n_nodes']} nodes{reads}")
    return f"a step is {profile['us']:.0f} us of nodes: " + "; ".join(parts)


def _prompt_shares(bars: Bars, profile: Record) -> str:
    """What limits a prompt: the device's time without the engine's, and the kernels that take most of it."""
    s = SHAPES[bars.shape]
    heads = s.attention[0]
    n_weights = s.n_layers * s.hidden * (heads.qkv_width + heads.out_width + 3 * s.widest_ff)
    ms, n = float(profile["device_ms"]), int(profile["n"])
    rate = 2 * n_weights * n / ms / 1e9
    kernels = "; ".join(f"{name} {us / 1e3:.2f} ms" for name, us in profile["kernels"])
    return f"{n} tokens take the device {ms:.2f} ms ({n / ms * 1e3:,.0f} tok/s, {rate:,.0f} TFLOP/s): {kernels}"


def judge_warm(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    done = ", ".join(f"{r['model']} {r['s']:.0f} s" for one in ended for r in one.of("warm"))
    compiled = [f"transformers {r['s']:.0f} s" for one in ended for r in one.of("compiled")]
    outcomes = [_plain("warm", ", ".join(filter(None, [done, *compiled])) + " to make a model, compile and answer")]
    for one in ended:
        if one.error is not None and one.job.work == "warm":
            words = one.job.words
            outcomes.append(Outcome("FAIL", f"warm-{words['shape']}-{words['type']}", one.error))
    return outcomes


def judge_first_token(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    runs = [record for one in ended for record in one.of("first_token")]
    if not runs:
        return [Outcome("FAIL", "first-token", ended[0].error or "it said nothing")]
    best = min(runs, key=lambda run: run["s"])
    every = ", ".join(f"{run['s']:.2f}" for run in runs)
    value = (
        f"{best['s']:.2f} s from weights to token (imports {best['imports_s']:.2f}, opening {best['open_s']:.2f}, "
        f"prompt {best['prompt_s']:.2f}); all runs {every}"
    )
    verdict: Verdict = "PASS" if best["s"] < FIRST_TOKEN_S or not setting.on_gpu else "MISS"
    return [Outcome(verdict, "first-token", value, f"under {FIRST_TOKEN_S:.0f} s", best)]


def judge_graph_memory(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    if not ended:
        return [Outcome("SKIP", "graph-memory", "graphs are CUDA's")]
    records = ended[0].of("graph_memory")
    if not records:
        return [Outcome("FAIL", "graph-memory", ended[0].error or "it said nothing")]
    totals = {r["slots"]: (r["step"] + r["prompts"]) / MB for r in records}
    parts = ", ".join(
        f"{r['slots']} slots: step {r['step'] / MB:.0f}, prompts {r['prompts'] / MB:.0f}" for r in records
    )
    spread = max(totals.values()) - min(totals.values())
    value = f"{max(totals.values()):.0f} MB at most, {spread:.0f} MB apart ({parts} MB)"
    # The driver hands out memory in pieces of 2 MB.
    verdict: Verdict = "PASS" if max(totals.values()) < GRAPH_MB and spread <= 4 else "MISS"
    bar = f"under {GRAPH_MB:.0f} MB, the same for all slots"
    return [Outcome(verdict, "graph-memory", value, bar, {"records": records})]


def judge_transformers(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    outcomes = []
    for one in ended:
        name = f"transformers-{one.job.words['shape'].removeprefix('llama-')}"
        rates = [float(record["tok_s"]) for record in one.of("transformers")]
        if not rates:
            outcomes.append(Outcome("SKIP", name, one.error or "it said nothing"))
            continue
        version = next((record["version"] for record in one.of("compiled")), "?")
        value = (
            f"{statistics.median(rates):,.0f} tok/s ({version}, static cache, compiled, bf16, batch 1, after {DEPTH})"
        )
        outcomes.append(_plain(name, value, {"runs": rates}))
    return outcomes


# The checks


def _speed_jobs(bars: Bars, setting: Setting) -> list[Job]:
    words = {
        "shape": bars.shape,
        "type": bars.type,
        "prefill": bars.llama_cpp_prefill is not None,
        "batches": list(bars.batches),
    }
    return [Job("speed", words, 150)]


def _warm_jobs(setting: Setting) -> list[Job]:
    if not setting.on_gpu:
        return [Job("warm", {"shape": "tiny", "type": "f32", "slots": [2]})]
    jobs = [
        Job("warm", {"shape": b.shape, "type": b.type, "slots": [SLOTS, *(n for n in b.batches if n > SLOTS)]}, 150)
        for b in MODELS
    ]
    # What the peer compiles is kept on disk, too.
    return [*jobs, Job("transformers", {"shape": "llama-1b", "repeats": 0}, 120)]


def _first_jobs(setting: Setting) -> list[Job]:
    words = {"shape": "llama-1b", "type": "bf16"} if setting.on_gpu else {"shape": "tiny", "type": "f32"}
    return [Job("first_token", words, 60)] * (2 if setting.on_gpu else 1)


def _memory_jobs(setting: Setting) -> list[Job]:
    return [Job("graph_memory", {"shape": "llama-1b", "type": "bf16"}, 60)] if setting.on_gpu else []


def _peer_jobs(setting: Setting) -> list[Job]:
    if not setting.on_gpu:
        return []
    return [Job("transformers", {"shape": shape}, 60) for shape in ("llama-1b", "llama-8b")]


def _checks() -> Iterator[Check]:
    yield Check("speed", "warm", _warm_jobs, judge_warm)
    for bars in MODELS:

        def jobs(setting: Setting, bars: Bars = bars) -> list[Job]:
            if not setting.on_gpu:
                return _speed_jobs(TINY, setting) if bars is MODELS[0] else []
            return _speed_jobs(bars, setting)

        def judge(setting: Setting, ended: Sequence[Ended], bars: Bars = bars) -> list[Outcome]:
            return _judge(bars if setting.on_gpu else TINY, setting, ended) if ended else []

        yield Check("speed", bars.name, jobs, judge, alone=True)
        if bars is MODELS[0]:
            yield Check("speed", "first-token", _first_jobs, judge_first_token, alone=True)
            yield Check("speed", "graph-memory", _memory_jobs, judge_graph_memory, alone=True)
    yield Check("speed", "transformers", _peer_jobs, judge_transformers, alone=True)


WORKS: Final = {
    "warm": warm,
    "speed": speed,
    "first_token": first_token,
    "graph_memory": graph_memory,
    "transformers": transformers,
}
CHECKS: Final = tuple(_checks())
