"""The memory plan: what it counts is what a loop allocates, and what does not fit is told with what to lower."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.backends.cuda.plan import StepBuffers
from ostinato.backends.torch.plan import tensors_of
from ostinato.engine.memory_plan import ATTENTION_CUTS, GPU_LIBRARIES, MemoryPlan, Wanted, memory_plan, rows_of
from ostinato.engine.open import Loop, LoopOptions
from ostinato.errors import HardwareCannot
from ostinato.models.named_shapes import SHAPES
from tests.backends.families import family_model
from tests.backends.native.tiled import tiled
from tests.random_model import MemoryKind, random_model, shape_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def sizes(plan: MemoryPlan) -> dict[str, int]:
    return {row.name: row.n_bytes for row in plan.rows}


@pytest.mark.parametrize("kind", ["kv", "swa", "recurrent", "hybrid"])
def test_what_is_counted_is_what_a_loop_allocates(kind: MemoryKind) -> None:
    model = random_model(kind)
    weights = sum({t.data_ptr(): t.numel() * 4 for _, t in tensors_of(model, "")}.values())
    wanted = Wanted(model.shape, weights, CPU, torch.float32, "f32", n_slots=3, context=100, n_pages=9)
    loop = Loop(model, LoopOptions("eager", 3, 100, 9, "f32", 128))
    loop.close()
    allocated = {buffer.name: buffer.n_bytes for buffer in loop.plan.buffers}
    counted = sizes(memory_plan(wanted, 1 << 30))
    kept = {name: n for name, n in allocated.items() if name.startswith("memory.")}
    states = sum(n for name, n in kept.items() if ".state." in name)
    assert counted.get("KV pages", 0) == sum(kept.values()) - states
    assert counted.get("recurrent states", 0) == states
    assert counted["slot table"] == allocated["table"]
    assert (counted["admissions"], counted["rings"]) == (allocated["admissions"], allocated["rings"])
    assert counted["step buffers"] == allocated["x"] + allocated["logits"]
    assert counted["weights"] == sum(n for name, n in allocated.items() if name.startswith("model"))


@pytest.mark.parametrize(("n_slots", "context", "threads"), [(1, 128, 1), (8, 1000, 2), (64, 64, 3)])
@pytest.mark.parametrize("name", ["kv", "mixtral"])
def test_the_native_loops_workspace_is_counted_within_a_fifth(
    name: str, n_slots: int, context: int, threads: int
) -> None:
    model = tiled(random_model("kv", n_vocab=3000) if name == "kv" else family_model(name))
    n_pages = n_slots * -(-context // 16)
    options = LoopOptions("loop", n_slots, context, n_pages, "f32", model.shape.vocab, threads=threads)
    loop = Loop(model, options)
    loop.close()
    allocated = {buffer.name: buffer.n_bytes for buffer in loop.plan.buffers}
    words = {"native": True, "threads": threads}
    wanted = Wanted(model.shape, 0, CPU, torch.float32, "f32", n_slots, context, n_pages, **words)  # type: ignore[arg-type]
    counted = sizes(memory_plan(wanted, 1 << 30))
    assert counted["step buffers"] == allocated["logits"] + allocated["last"]
    assert counted["native workspace (about)"] == pytest.approx(allocated["step.workspace"], rel=0.2)
    assert "prefill buffers (about)" not in counted


def test_a_gpu_counts_the_fused_steps_buffers_and_keeps_rings_in_the_hosts_memory() -> None:
    model = random_model("kv")
    plan = memory_plan(Wanted(model.shape, 1000, CUDA, torch.bfloat16, "bf16", 3, 100), 1 << 40)
    step = StepBuffers.of(model, 3)
    buffers = [getattr(step, name) for name in StepBuffers.__dataclass_fields__]
    allocated = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    assert sizes(plan)["step buffers"] == allocated
    assert [row.name for row in plan.rows if row.on_host] == ["admissions", "rings"]
    assert plan.device_bytes + plan.host_bytes == sum(row.n_bytes for row in plan.rows)


def test_the_workspace_of_a_gpu_holds_what_its_kernels_ask_for() -> None:
    attend = pytest.importorskip("ostinato.backends.cuda.triton.attend")
    sample = pytest.importorskip("ostinato.backends.cuda.triton.sample")
    shape = SHAPES["llama-1b"]
    workspace = sizes(memory_plan(Wanted(shape, 0, CUDA, torch.bfloat16, "bf16", 4, 100), 0))["workspace (about)"]
    scores = 4 * shape.n_heads * attend.MAX_SPLITS * (shape.head_width + 2) * 4
    sampler = sum(math.prod(size) * dtype.itemsize for size, dtype in sample.sample_workspace(4, shape.vocab).values())
    assert ATTENTION_CUTS == attend.MAX_SPLITS
    assert scores + sampler <= workspace <= scores + 1.2 * sampler + GPU_LIBRARIES


def test_pages_are_for_every_slots_whole_context_unless_told() -> None:
    shape = SHAPES["llama-1b"]
    wanted = Wanted(shape, 0, CUDA, torch.bfloat16, "bf16", n_slots=4, context=1000)
    per_position = 2 * shape.n_kv_heads * shape.head_width * 2 * shape.n_layers
    assert wanted.pages == 4 * 16
    assert sizes(memory_plan(wanted, 0))["KV pages"] == 4 * 16 * 64 * per_position


def test_what_fits_says_so() -> None:
    plan = memory_plan(Wanted(SHAPES["tiny"], 5 << 20, CPU, torch.float32, "f32", 2, 256), 1 << 30)
    plan.check()
    assert plan.fits
    assert plan.verdict.endswith("are needed on cpu for 2 slots and a context of 256, and 1.1 GB are free: it fits")


def test_fewer_slots_are_advised_where_they_fit() -> None:
    wanted = Wanted(SHAPES["llama-1b"], 2 << 30, CUDA, torch.bfloat16, "bf16", n_slots=8, context=8192)
    plan = memory_plan(wanted, 4 << 30)
    with pytest.raises(HardwareCannot, match=r"are needed on cuda for 8 slots and a context of 8192, and 4\.3 GB"):
        plan.check()
    assert plan.advice == "lower --slots to 4, or --kv-type to q8_0"


def test_a_shorter_context_is_advised_where_one_slot_does_not_fit() -> None:
    wanted = Wanted(SHAPES["llama-1b"], 2 << 30, CUDA, torch.bfloat16, "bf16", n_slots=8, context=131_072)
    assert memory_plan(wanted, 4 << 30).advice == "lower --slots to 1 and --context 32768, or --kv-type to q8_0"


def test_weights_that_do_not_fit_are_said_to_be_the_reason() -> None:
    wide = Wanted(SHAPES["llama-8b"], 32 << 30, CPU, torch.float32, "f32", 1, 128)
    assert "the weights alone are 34.4 GB: take --dtype bfloat16, fewer bits" in memory_plan(wide, 8 << 30).verdict
    narrow = Wanted(SHAPES["llama-8b"], 16 << 30, CUDA, torch.bfloat16, "bf16", 1, 128)
    assert "--dtype" not in memory_plan(narrow, 8 << 30).verdict


def test_an_encoder_takes_its_weights_and_no_pages() -> None:
    _, shape = shape_of("encoder", 128, 64, 64)
    assert [row.name for row in rows_of(Wanted(shape, 77, CPU, torch.float32, "f32", 8, 64))] == ["weights"]
