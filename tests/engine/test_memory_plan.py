"""The memory plan: what it counts is what a runner allocates, and what does not fit is told with what to lower."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from ostinato.backends.base import LOGITS_BYTES, ChunkOutput, ChunkPart, ChunkWant, Settled
from ostinato.backends.cuda.backend import ATTENTION_CUTS, EXPERT_PARTS, GPU_LIBRARIES
from ostinato.backends.cuda.latent import LatentBuffers
from ostinato.backends.cuda.plan import StepBuffers
from ostinato.backends.memory_rows import LIBRARIES, OUTPUT_ROWS
from ostinato.backends.torch.ops.latent import LatentHeads
from ostinato.engine.choose import backend_of, settle_model
from ostinato.engine.memory_plan import MemoryPlan
from ostinato.engine.open import open_runner
from ostinato.errors import HardwareCannot
from ostinato.files.checkpoint import TensorInfo
from ostinato.lab.random_weights import RandomFile
from ostinato.models.header import HeaderTensors, tensors_in
from ostinato.models.named_shapes import SHAPES
from ostinato.models.shape import Shape
from tests.backends.families import family_model
from tests.backends.native.tiled import tiled
from tests.random_model import MemoryKind, random_model, shape_of

LLAMA = SHAPES["llama-1b"]
DEADLINE_S = 60.0


def plan_of(shape: Shape, settled: Settled, free_bytes: int = 0, tensors: HeaderTensors | None = None) -> MemoryPlan:
    return MemoryPlan(backend_of(settled), shape, tensors or {}, settled, free_bytes)


def on_gpu(n_slots: int, context: int, **words: Any) -> Settled:
    settled = Settled("cuda:0", "cuda", "loop", "bfloat16", "bf16", context, n_slots, **words)
    return replace(settled, n_pages=n_slots * settled.max_pages)


def weights(n_bytes: int) -> HeaderTensors:
    """One tensor that is as large whatever it is kept as."""
    return {"weight": TensorInfo("weight", (n_bytes // 2,), "BF16", n_bytes)}


def sizes(plan: MemoryPlan) -> dict[str, int]:
    return {row.name: row.n_bytes for row in plan.rows}


@pytest.mark.parametrize("kind", ["kv", "swa", "recurrent", "hybrid"])
def test_what_is_counted_is_what_a_loop_allocates(kind: MemoryKind) -> None:
    """E-39."""
    model = random_model(kind)
    settled = settle_model(model, "eager", context=100, n_pages=9, n_slots=3)
    runner = open_runner(model, settled)
    runner.close()
    allocated = {buffer.name: buffer.n_bytes for buffer in runner.plan.buffers}
    counted = sizes(plan_of(model.shape, settled, tensors=tensors_in(model)))
    kept = {name: n for name, n in allocated.items() if name.startswith("memory.")}
    states = sum(n for name, n in kept.items() if ".state." in name)
    assert counted.get("KV pages", 0) == sum(kept.values()) - states
    assert counted.get("recurrent states", 0) == states
    assert counted["slot table"] == allocated["table"]
    assert (counted["admissions"], counted["rings"]) == (allocated["admissions"], allocated["rings"])
    assert counted["step buffers"] == allocated["x"] + allocated["logits"]
    if kind in ("kv", "swa"):
        names = [name for name in allocated if name.startswith("model") and "frequencies" not in name]
        assert counted["weights"] == sum(allocated[name] for name in names)


@pytest.mark.parametrize(("n_slots", "context", "threads"), [(1, 128, 1), (8, 1000, 2), (64, 64, 3)])
@pytest.mark.parametrize("name", ["kv", "mixtral", "mamba", "mamba2", "falcon-h1"])
def test_the_native_loops_workspace_is_counted_within_a_fifth(
    name: str, n_slots: int, context: int, threads: int
) -> None:
    model = tiled(random_model("kv", n_vocab=3000) if name == "kv" else family_model(name))
    settled = settle_model(model, "loop", context=context, n_slots=n_slots, threads=threads)
    runner = open_runner(model, settled)
    runner.close()
    allocated = {buffer.name: buffer.n_bytes for buffer in runner.plan.buffers}
    counted = sizes(plan_of(model.shape, settled))
    assert counted["step buffers"] == allocated["logits"] + allocated["last"]
    assert counted["native workspace (about)"] == pytest.approx(allocated["step.workspace"], rel=0.2)
    assert "prefill buffers (about)" not in counted


@pytest.mark.parametrize("context", [128, 1000])
def test_an_encoders_workspace_for_texts_longer_than_a_chunk_is_used_on_demand(context: int) -> None:
    model = tiled(random_model("encoder"))
    settled = settle_model(model, "loop", context=context, threads=2)
    runner = open_runner(model, settled)
    runner.close()
    allocated = {buffer.name: buffer.n_bytes for buffer in runner.plan.buffers}
    plan = plan_of(model.shape, settled, tensors=tensors_in(model))
    workspace = [row for row in plan.rows if "workspace" in row.name]
    assert [row.on_demand for row in workspace] == [False, True][: 1 + (context > 256)]
    assert sum(row.n_bytes for row in workspace) == pytest.approx(allocated["step.workspace"], rel=0.2)
    names = [name for name in allocated if name.startswith("model") and "frequencies" not in name]
    assert plan.bytes_of("weights") == pytest.approx(sum(allocated[name] for name in names), rel=0.01)
    assert OUTPUT_ROWS not in sizes(plan)


@pytest.mark.slow
@pytest.mark.parametrize("n_vocab", [128, 300_000])
def test_rows_of_output_are_bounded_counted_and_there_from_their_first_use_on(n_vocab: int) -> None:
    """Of the native loop; `tests/backends/cuda/test_chunks.py` has the GPU's."""
    model = tiled(random_model("kv", n_vocab=n_vocab))
    settled = settle_model(model, "loop", context=500)
    with closing(open_runner(model, settled)) as runner:
        counted = sizes(plan_of(model.shape, settled))[OUTPUT_ROWS]
        chunks: Any = runner.chunks
        before = chunks._logits
        chunks.run([ChunkPart([5, 6], 0, [[0]], outputs=[1])], chunks.rows, ChunkWant("logprobs", [7]))
        assert (before, chunks._logits.nbytes) == (None, counted)
        assert counted <= LOGITS_BYTES


@pytest.mark.parametrize("kind", ["kv", "recurrent"])
def test_torch_counts_the_most_rows_of_logits_that_it_gives_at_once(kind: MemoryKind) -> None:
    model = random_model(kind)
    settled = settle_model(model, "eager", context=500)
    with closing(open_runner(model, settled)) as runner:
        n, pages = runner.chunks.max_outputs, [range(runner.settled.max_pages)]
        part = ChunkPart([5] * n, 0, pages, 0, outputs=range(n))
        given: list[ChunkOutput] = []

        def run() -> None:
            given.append(runner.chunks.run([part], runner.chunks.rows, ChunkWant("logits")))

        runner.beside(run).result(DEADLINE_S)
        assert given[0].logits is not None
        counted = sizes(plan_of(model.shape, settled))[OUTPUT_ROWS]
        assert given[0].logits.nbytes == counted


def test_a_gpu_counts_the_fused_steps_buffers_and_keeps_rings_in_the_hosts_memory() -> None:
    model = random_model("kv")
    plan = plan_of(model.shape, on_gpu(3, 100))
    step = StepBuffers.of(model.shape, 3, model.device)
    allocated = sum(buffer.numel() * buffer.element_size() for buffer in step.named.values())
    assert sizes(plan)["step buffers"] == allocated
    assert [row.name for row in plan.rows if row.on_host] == ["admissions", "rings"]
    assert plan.device_bytes + plan.host_bytes == sum(row.n_bytes for row in plan.rows)


def test_the_workspace_of_a_gpu_holds_what_its_kernels_ask_for() -> None:
    attend = pytest.importorskip("ostinato.backends.cuda.triton.attend")
    sample = pytest.importorskip("ostinato.backends.cuda.triton.sample")
    workspace = sizes(plan_of(LLAMA, on_gpu(4, 100)))["workspace (about)"]
    scores = 4 * LLAMA.attention[0].n_heads * attend.MAX_SPLITS * (LLAMA.attention[0].head_width + 2) * 4
    sampler = sum(buffer.nbytes for buffer in sample.sample_workspace(4, LLAMA.vocab, torch.device("meta")).values())
    assert ATTENTION_CUTS == attend.MAX_SPLITS
    assert scores + sampler <= workspace <= scores + 1.2 * sampler + GPU_LIBRARIES


def test_a_gpu_counts_the_sums_that_programs_of_experts_leave() -> None:
    kernels = pytest.importorskip("ostinato.backends.cuda.triton.experts")
    shape, meta = SHAPES["qwen3-30b-a3b"], torch.device("meta")
    experts, n_slots = shape.experts, 5
    assert experts is not None
    made = kernels.experts_workspace(n_slots, experts.n_used, experts.ff_width, shape.hidden, meta)
    assert EXPERT_PARTS == kernels.MAX_PARTS
    counted = [
        sizes(plan_of(one, on_gpu(n_slots, 100)))["workspace (about)"] for one in (shape, replace(shape, experts=None))
    ]
    assert counted[0] - counted[1] == made.parts.nbytes


def test_a_gpu_counts_what_latent_attention_keeps_between_its_kernels() -> None:
    kernels = pytest.importorskip("ostinato.backends.cuda.triton.attend_latent")
    shape, meta = SHAPES["glm-4.7-flash"], torch.device("meta")
    counted = sizes(plan_of(shape, on_gpu(4, 100)))
    own = LatentBuffers.of(shape, 4, torch.float32, meta)
    assert own is not None
    buffers = [*StepBuffers.of(shape, 4, meta).named.values(), *own.named.values()]
    assert counted["step buffers"] == sum(buffer.nbytes for buffer in buffers)
    attention = shape.attention[0]
    latent = LatentHeads(attention.n_heads, attention.value_width, 64, 192, 1.0, own.low, own.low, 1e-6)
    space = kernels.latent_workspace(4, [latent], meta)
    rest = sizes(plan_of(replace(shape, layers=LLAMA.layers), on_gpu(4, 100)))["workspace (about)"]
    llama = LLAMA.attention[0]
    beside = rest - 4 * kernels.MAX_SPLITS * llama.n_heads * (llama.value_width + 2) * 4
    assert counted["workspace (about)"] == space.sums.nbytes + space.norms.nbytes + beside


@pytest.mark.parametrize(("backend", "names"), [("cuda", ["weights"]), ("tape", ["weights", "tape"])])
def test_each_backend_counts_weights_in_its_own_layout(backend: str, names: list[str]) -> None:
    packed = RandomFile(LLAMA, "q4_k_m").tensors
    settled = replace(on_gpu(1, 64), backend=backend, weights="packed")
    plan = plan_of(LLAMA, settled, tensors=packed)
    assert [name for name in sizes(plan) if name in ("weights", "tape")] == names
    dense = sizes(plan_of(LLAMA, replace(settled, weights="dense"), tensors=packed))["weights"]
    assert dense == sum(tensor.n_elements for tensor in packed.values()) * 2
    assert 0.25 < sizes(plan)["weights"] / dense < 0.4


def test_pages_are_for_every_slots_whole_context_unless_told() -> None:
    settled = on_gpu(4, 1000)
    per_position = 2 * LLAMA.attention[0].n_kv_heads * LLAMA.attention[0].head_width * 2 * LLAMA.n_layers
    assert settled.n_pages == 4 * 16
    assert sizes(plan_of(LLAMA, settled))["KV pages"] == 4 * 16 * 64 * per_position


def test_what_fits_says_so() -> None:
    settled = Settled("cpu", "torch", "eager", "float32", "f32", 256, 2, 32)
    plan = plan_of(SHAPES["tiny"], settled, 1 << 30, weights(5 << 20))
    plan.check()
    assert plan.fits
    assert plan.verdict.endswith(
        "are reserved on cpu for 2 slots and a context of 256, and 966 MB may be taken of 1.1 GB that are free: it fits"
    )


def test_fewer_slots_are_advised_where_they_fit() -> None:
    plan = plan_of(LLAMA, on_gpu(8, 8192), 4 << 30, weights(2 << 30))
    with pytest.raises(
        HardwareCannot, match=r"are needed on cuda:0 for 8 slots and a context of 8192, and 3\.9 GB may"
    ):
        plan.check()
    assert plan.advice == "lower --slots to 4, or --kv-type to q8_0"


def test_a_shorter_context_is_advised_where_one_slot_does_not_fit() -> None:
    plan = plan_of(LLAMA, on_gpu(8, 131_072), 4 << 30, weights(2 << 30))
    assert plan.advice == "lower --slots to 1 and --context 32768, or --kv-type to q8_0"


def test_weights_that_do_not_fit_are_said_to_be_the_reason() -> None:
    wide = Settled("cpu", "torch", "eager", "float32", "f32", 128)
    plan = plan_of(SHAPES["llama-8b"], wide, 8 << 30, weights(16 << 30))
    assert "the weights alone are 34.4 GB: take --dtype bfloat16, fewer bits" in plan.verdict
    narrow = plan_of(SHAPES["llama-8b"], on_gpu(1, 128), 8 << 30, weights(16 << 30))
    assert "--dtype" not in narrow.verdict


def test_an_encoder_takes_its_weights_and_no_pages_by_torch() -> None:
    _, shape = shape_of("encoder", 128, 64, 64)
    settled = Settled("cpu", "torch", "eager", "float32", "f32", 64, 8)
    assert [row.name for row in plan_of(shape, settled, tensors=weights(64)).rows] == ["weights", LIBRARIES.name]
