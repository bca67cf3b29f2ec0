"""Measuring: figures through an engine, their limits, and where the time of a step goes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ostinato.errors import BadOption, HardwareCannot
from ostinato.lab.bench import Bench, Figure, Task, TimedRun, kv_read_bytes, read_bandwidth, why_not_profiled
from ostinato.lab.random_weights import random_model as named_model
from ostinato.loop.plan import Buffer, Node
from ostinato.models.named_shapes import SHAPES
from tests.backends.native.tiled import tiled
from tests.random_model import WINDOW, random_model, shape_of


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(tiled(random_model("kv")), "f32", 1e9, repeats=2)


@pytest.mark.slow
def test_lists_cross_and_a_prompt_is_measured_once_a_mode(bench: Bench) -> None:
    lists = {"batches": [1, 2], "n_prompts": [10], "n_gens": [1, 2], "depths": [0, 20]}
    figures = list(bench.figures(modes=["eager", "loop"], **lists))
    assert [(f.task.mode, f.task.batch, f.task.name) for f in figures] == [
        (mode, batch, test + depth)
        for mode in ("eager", "loop")
        for batch in (1, 2)
        for depth in ("", " @ d20")
        for test in (("pp10", "tg1", "tg2") if batch == 1 else ("tg1", "tg2"))
    ]
    assert all(len(f.runs) == 2 for f in figures)


def test_all_sequences_of_a_batch_are_counted_from_when_the_last_began(bench: Bench) -> None:
    (figure,) = bench.figures(modes=["eager"], batches=[3], n_prompts=[], n_gens=[6], depths=[0])
    assert max(run.n_tokens for run in figure.runs) == 18
    assert all(run.device_s > 0 and run.host_s > 0 for run in figure.runs)


def test_a_prompt_at_a_depth_counts_only_what_was_computed(bench: Bench) -> None:
    with bench.engine("loop", 1, 256) as engine:
        figure = bench.prompt(engine, Task("pp", 20, 40, 1, "loop"))
        stats = engine.stats()
    assert {run.n_tokens for run in figure.runs} == {20}
    assert stats.cached_tokens == 3 * 32  # 40 positions are two whole pages of 16, found by three prompts


def test_the_limit_is_the_weights_once_a_step_and_every_sequences_cells(bench: Bench) -> None:
    """With one token generated after a prompt of 8, the step takes in position 8 and sees 9 cells."""
    one = bench.model
    tensors = [tensor for part in (*one.layers, one.head) for tensor in _tensors(part)]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    (figure,) = Bench(one, "f32", 1e9, 1).figures(modes=["eager"], batches=[1], n_prompts=[], n_gens=[1], depths=[8])
    cell = 2 * 2 * 16 * 4 * 2  # key and value, heads, width, bytes, layers
    assert figure.bytes_per_token == weights + 9 * cell
    assert figure.limit_tok_s == pytest.approx(1e9 / figure.bytes_per_token)


def _tensors(part: object) -> list[torch.Tensor]:
    from ostinato.backends.torch.plan import tensors_of

    return [tensor for _, tensor in tensors_of(part, "")]


def test_a_window_limits_what_is_read_and_states_are_read_whole() -> None:
    _, plain = shape_of("kv", 128, 64, 1024)
    _, windowed = shape_of("swa", 128, 64, 1024)
    cell = 2 * 2 * 16 * 4
    assert kv_read_bytes(plain, "f32", 99) == 2 * 100 * cell
    assert kv_read_bytes(windowed, "f32", 99) == (100 + WINDOW) * cell
    _, recurrent = shape_of("recurrent", 128, 64, 1024)
    assert kv_read_bytes(recurrent, "f32", 5) == kv_read_bytes(recurrent, "f32", 500) > 0
    assert kv_read_bytes(plain, "bf16", 9) == kv_read_bytes(plain, "f32", 9) // 2


def test_figures_are_medians_of_the_repeats() -> None:
    runs = tuple(TimedRun(100, seconds, 2 * seconds) for seconds in (1.0, 2.0, 10.0))
    figure = Figure(Task("tg", 100, 0, 1, "loop"), runs, 50.0, 1e4)
    assert (figure.tok_s, figure.host_tok_s, figure.limit_tok_s) == (50.0, 25.0, 200.0)


def test_a_step_must_read_the_experts_that_its_rows_use_and_all_other_weights() -> None:
    node = Node("down", "down", lambda: None, (), (), 1000, None, 800, 1 / 8)
    assert node.read_bytes(1) == pytest.approx(200 + 100)
    # Of many draws of two experts of 16 by each of four rows, as many are used as is said.
    chance, seen = random.Random(0), []
    for _ in range(4000):
        seen.append(len({expert for _ in range(4) for expert in chance.sample(range(16), 2)}))
    assert node.read_bytes(4) == pytest.approx(200 + 800 * statistics.mean(seen) / 16, rel=0.01)
    assert node.read_bytes(100) == pytest.approx(1000, rel=1e-3)


def test_the_native_loop_knows_which_of_its_weights_are_of_experts() -> None:
    bench, shape = (
        Bench(named_model("tiny-qwen3moe", "f32", "cpu", tiles="wide"), "f32", 1e9, 1),
        SHAPES["tiny-qwen3moe"],
    )
    with bench.engine("loop", 1, 64) as engine:
        plan = engine.runner.plan
    assert shape.experts is not None
    of_one = 3 * shape.hidden * shape.experts.ff_width * 4  # gate, up and down in float32
    unused = shape.n_layers * (shape.experts.n_experts - shape.experts.n_used) * of_one
    assert plan.weight_bytes - plan.read_bytes(1) == unused


@pytest.mark.parametrize("mode", ["eager", "twin"])
def test_a_profile_has_the_time_and_the_weights_of_each_kind(bench: Bench, mode: str) -> None:
    profile = bench.profile(batch=2, depth=5, n_steps=3, mode=mode)
    assert profile.mode == mode
    assert [(kind.kind, kind.n_nodes) for kind in profile.kinds] == [
        ("embed", 1), ("layer", 2), ("head", 1), ("masks", 1), ("sample", 1)
    ]  # fmt: skip
    assert all(kind.microseconds > 0 for kind in profile.kinds)
    by_kind = {kind.kind: kind.weight_bytes for kind in profile.kinds}
    assert by_kind["head"] == 128 * 64 * 4
    assert by_kind["embed"] == by_kind["sample"] == 0
    assert profile.microseconds == pytest.approx(sum(kind.microseconds for kind in profile.kinds))


def test_the_native_loop_has_no_nodes_to_profile(bench: Bench) -> None:
    with pytest.raises(HardwareCannot, match=r"mode 'loop' cannot be profiled here: the native loop is one call"):
        bench.profile(batch=1, depth=0, mode="loop")


@pytest.mark.parametrize("mode", ["eager", "graph", "loop"])
def test_every_mode_of_a_gpu_has_nodes_to_profile(mode: str) -> None:
    assert why_not_profiled(mode, "cuda") is None


def test_what_does_not_fit_the_context_is_refused_before_it_is_run() -> None:
    short = Bench(random_model("kv", context=64), "f32", 1e9, 1)
    with pytest.raises(BadOption, match=r"60 tokens after a depth of 10 do not fit the model's context of 64"):
        list(short.figures(modes=["loop"], batches=[1], n_prompts=[], n_gens=[60], depths=[10]))


def test_the_read_bandwidth_is_a_plausible_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.lab import bench as measuring

    monkeypatch.setattr(measuring, "READ_BYTES", {"cpu": 8 << 20})
    assert 1e7 < read_bandwidth("cpu", repeats=2) < 1e14


@pytest.mark.parametrize("native", [True, False])
def test_few_weights_are_read_again_and_again(bench: Bench, monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    from ostinato.lab import bench as measuring
    from ostinato.lab import read_bandwidth as reading

    seen: list[int] = []

    def reads(buffers: Sequence[Buffer], threads: int, passes: int) -> float:
        if not native:
            raise HardwareCannot("no compiler is here")
        seen.append(passes * sum(one.n_bytes for one in buffers))
        return 0.5

    monkeypatch.setattr(measuring, "READ_BYTES", {"cpu": 8 << 20})
    monkeypatch.setattr(reading, "read_seconds", reads)
    found = measuring.weights_read_bandwidth(bench.model, repeats=2, threads=1)
    if native:
        assert 4 << 20 < seen[0] == found / 2 <= 8 << 20
    else:
        assert 1e7 < found < 1e14


def test_a_test_is_called_as_llama_bench_calls_it() -> None:
    test = Task("tg", 128, 0, 1, "loop")
    assert (test.name, replace(test, depth=500).name) == ("tg128", "tg128 @ d500")
    assert replace(test, kind="pp", n_tokens=512).name == "pp512"
    assert "llama-1b" in SHAPES
