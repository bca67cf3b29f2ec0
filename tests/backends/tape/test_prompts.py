"""Prompts that read the tape: the bits of a plain copy where weights are plain, and no copy of a matrix beside it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato import LLM, Sampling
from ostinato.backends.base import ChunkPart, Chunks, ChunkWant, PromptWeights, Settled
from ostinato.backends.cuda.chunks import FusedChunks
from ostinato.backends.cuda.kernels import triton_kernels
from ostinato.backends.cuda.packed import Packed
from ostinato.backends.cuda.scratch import scratch_elements
from ostinato.backends.machine import TUNED
from ostinato.backends.tape.backend import TapeRunner
from ostinato.backends.tape.tape_weight import TapeWeight
from ostinato.backends.torch.backend import TWIN
from ostinato.backends.torch.kernels import twin_kernels
from ostinato.backends.torch.model import Model
from ostinato.backends.torch.plan import tensors_of
from ostinato.backends.torch.weight import dense_of
from ostinato.backends.weights import shape_of as shape_of_weight
from ostinato.engine.choose import settle_model
from ostinato.files.checkpoint import open_checkpoint
from ostinato.loop.plan import Plan
from ostinato.loop.start import Start
from ostinato.models.blocks import Linear, leaves_of, with_leaves
from ostinato.models.registry import read_shape
from ostinato.models.shape import Shape
from tests.backends.cuda.test_chunks import Allocations, without_kernels
from tests.backends.tape.loop import EmulatedLoop
from tests.backends.tape.models import shape_of, small
from tests.backends.tape.test_plan import Laid, linears
from tests.backends.tape.test_start import Card
from tests.backends.tape.unpacked import by_twin
from tests.built import build_model
from tests.engine.rig import Driver, open_loop

PROMPTS = ([5, 9, 2, 77, 31], list(range(1, 40)))
PACKABLE = shape_of(hidden=256, ff_width=256)


def on_tape(model: Model, *, triton: bool = False) -> Model:
    found = Laid(model, on_tape=True).step.model
    return found if triton else by_twin(found)


def lies_on_tape(model: Model) -> bool:
    return any(isinstance(weight, TapeWeight) for weight in leaves_of(model))


def prefill_of(driver: Driver, model: Model, *, triton: bool = False, buckets: tuple[int, ...] = (16, 32)) -> None:
    runner = driver.runner
    kernels = triton_kernels(TUNED) if triton else twin_kernels()
    runner.chunks = FusedChunks(model, runner.memory, runner.tables, model.shape.vocab, kernels, buckets=buckets)


def prompted(model: Model, *, triton: bool = False) -> tuple[list[int], list[Tensor]]:
    """First tokens, and what is then in memory."""
    driver = open_loop(model=model, mode="twin", n_slots=3)
    prefill_of(driver, model, triton=triton)
    for slot, prompt in enumerate(PROMPTS[:1] if triton else PROMPTS):
        driver.admit(slot, prompt, most=1)
    driver.run()
    driver.runner.close()
    assert driver.runner.memory.kv is not None
    kept = [half.values for half in driver.runner.memory.kv.halves]
    return [entry.token for entry in driver.entries if entry.token is not None], kept


def same(found: tuple[list[int], list[Tensor]], expected: tuple[list[int], list[Tensor]]) -> None:
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        assert bool(other.any())
        assert torch.equal(one, other)


# --- what prompts compute ---

SHAPES: dict[str, Shape] = {
    "llama": shape_of(),
    "untied": shape_of(tied_head=False, vocab=1000),  # more than the scratch holds at once
    "qwen2": shape_of("qwen2"),
    "qwen3": shape_of("qwen3", tied_head=False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_plain_weights_give_the_same_bits_from_the_tape(name: str) -> None:
    model = small(SHAPES[name])
    same(prompted(on_tape(model)), prompted(model))


@pytest.mark.parametrize("name", ["llama", "untied"])
def test_a_chunk_from_the_tape_gives_the_same_rows_logits_and_log_probabilities(name: str) -> None:
    model, found = small(SHAPES[name]), []
    parts = [ChunkPart(PROMPTS[0], 0, [[0]], outputs=[1, 4]), ChunkPart(PROMPTS[1][:9], 0, [[3]], outputs=[8])]
    wants = (ChunkWant("hidden"), ChunkWant("logits"), ChunkWant("logprobs", [5, 6, 7], top=2))
    for given in (on_tape(model), model):
        driver = open_loop(model=given, mode="twin", n_slots=3)
        prefill_of(driver, given)
        outputs = [driver.runner.chunks.run(parts, 32, want) for want in wants]
        found.append([outputs[0].hidden, outputs[1].logits, outputs[2].logprobs, outputs[2].top_ids])
        driver.runner.close()
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["untied", "qwen2"])
def test_so_they_do_by_kernels(name: str) -> None:
    model = small(SHAPES[name])
    same(prompted(on_tape(model, triton=True), triton=True), prompted(model, triton=True))


def as_on_tape(model: Model) -> Model:
    """A model on the tape with every matrix unpacked once, into a tensor of its own."""
    again = with_leaves(model, lambda weight: weight)

    def plain(linear: Linear) -> Linear:
        return replace(linear, weight=dense_of(linear.weight, model.dtype))

    layers = []
    for layer in again.layers:
        part: Any = layer
        attention = replace(part.attention, qkv=plain(part.attention.qkv), out=plain(part.attention.out))
        mlp = replace(part.mlp, gate_up=plain(part.mlp.gate_up), down=plain(part.mlp.down))
        layers.append(replace(part, attention=attention, mlp=mlp))
    assert again.head is not None
    return replace(again, layers=layers, head=plain(again.head))


@pytest.mark.parametrize("mix", ["q4_k_m", "q5_0", "q6_k", "q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_are_multiplied_as_the_tape_has_them(mix: str, tied: bool) -> None:
    """q, k and v of a mix may be three matrices of the tape; they are one product all the same."""
    packed = small(replace(PACKABLE, tied_head=tied), mix=mix)
    tape_weight = on_tape(packed)
    found = prompted(tape_weight)
    same(found, prompted(as_on_tape(tape_weight)))
    for one, other in zip(found[1], prompted(packed)[1], strict=True):  # scales are rounded, and once more the weights
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2 * float(other.abs().max()))


@pytest.mark.parametrize("mix", [None, "q4_k_m"])
def test_what_goes_through_the_models_own_blocks_reads_the_tape_too(mix: str | None) -> None:
    """Scores, embeddings, states and a decoder of the user's own: none of them knows of it."""
    tape_weight = on_tape(small(replace(PACKABLE, tied_head=False), mix=mix))
    tokens = []
    for model in (tape_weight, as_on_tape(tape_weight)):
        driver = open_loop(model=model, mode="eager", n_slots=1)
        generation = driver.admit(0, PROMPTS[1], most=6)
        driver.run()
        driver.runner.close()
        tokens.append(driver.tokens(generation))
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 6


def test_no_launch_of_a_chunk_from_the_tape_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_tape(small(replace(PACKABLE, tied_head=False), mix="q4_k_m"), triton=True)
    driver = open_loop(model=model, mode="twin", n_slots=2)
    prefill_of(driver, model, triton=True)
    prefill: Any = driver.runner.chunks
    launched = without_kernels(monkeypatch)
    with Allocations() as watch:
        for launch in prefill._launches[16]:
            launch()
    assert watch.seen == []
    assert launched.count("unpack_kernel") >= 4 * len(model.layers)
    driver.runner.close()


class Emulated(EmulatedLoop):
    """The emulated tape, with prompts as a card has them, by twins."""

    def _made(self) -> tuple[Plan, Start, Chunks]:
        plan, start, _ = super()._made()
        self.plain_model = (
            by_twin(self.step.on_tape(self._on_card)) if self.settled.prompts == "tape" else self._on_card
        )
        words = (self.memory, self.tables, self.n_tokens, twin_kernels())
        return plan, start, FusedChunks(self.plain_model, *words, buckets=(16, 64))


@pytest.mark.slow
def test_a_model_of_a_file_answers_scores_and_embeds_alike_from_the_tape_and_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through everything: loading, engine, prompts, the kernel's own source, and what goes one sequence at a time."""
    import transformers

    from tests.models import tiny, tiny_folder

    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "num_hidden_layers": 2}
    torch.manual_seed(4)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**tiny.TINY["llama"].config, **sizes}))
    tiny_folder.write(made, tmp_path / "model", storage="BF16", style="current", shard_size=None)
    monkeypatch.setattr("ostinato.engine.engine.open_runner", Emulated)
    found = []
    for prompts in ("plain", "tape"):
        words: dict[str, Any] = {"n_slots": 4, "n_pages": 64, "weights": "packed", "prompts": prompts}
        settled = Settled("cpu", "torch", TWIN, "bfloat16", "f32", 256, **words)
        monkeypatch.setattr("ostinato.llm.choose", lambda *_, settled=settled: settled)
        with LLM(tmp_path / "model", device="cpu") as llm:
            assert isinstance(llm._model, Model)
            assert lies_on_tape(llm._model) == (prompts == "tape")
            answers = llm.generate([[5, 6, 7], list(range(3, 40))], Sampling(max_tokens=5, temperature=0))
            found.append(
                ([one.token_ids for one in answers], llm.score("a text to score"), llm.embed(["one"]).tolist())
            )
    assert found[0] == found[1]
    assert all(found[0][0])


# --- what is kept ---


@pytest.mark.parametrize("mix", [None, "q4_k_m"])
@pytest.mark.parametrize("tied", [True, False])
def test_beside_the_tape_there_is_the_embedding_and_no_other_matrix(mix: str | None, tied: bool) -> None:
    shape = replace(PACKABLE, tied_head=tied)
    tape_weight = on_tape(small(shape, mix=mix))
    assert lies_on_tape(tape_weight)
    assert all(isinstance(linear.weight, TapeWeight) for linear in linears(tape_weight))
    assert tape_weight.head is not None
    assert (tape_weight.head.weight is tape_weight.embedding) == tied
    named = tensors_of(replace(tape_weight, frequencies={}), "")
    matrices = [tensor for _, tensor in named if tensor.dim() != 1]
    assert all(matrix is tape_weight.embedding for matrix in matrices)
    assert isinstance(tape_weight.embedding, Tensor)
    assert tape_weight.embedding.dtype == tape_weight.dtype


class CardLoop(TapeRunner):
    """A loop as a card has it, on a driver that only notes; its kernels are the twins."""

    def _made(self) -> tuple[Plan, Start, Chunks]:
        plan, start = self._step()
        words = (self.memory, self.tables, self.n_tokens, twin_kernels())
        return plan, start, FusedChunks(self.plain_model, *words, buckets=(16,))


@pytest.mark.parametrize("prompts_on_tape", [True, False])
@pytest.mark.parametrize("mix", [None, "q4_k_m"])
def test_a_loop_on_the_tape_keeps_no_matrix_of_the_model_it_was_given(
    prompts_on_tape: bool, mix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Card(monkeypatch)
    model: Model | None = small.__wrapped__(replace(PACKABLE, tied_head=False), mix=mix)
    assert model is not None
    assert model.head is not None
    weights = [linear.weight for linear in (*linears(model), model.head)]
    planes = [plane for weight in weights for plane in (weight.planes if isinstance(weight, Packed) else (weight,))]
    kept = [weakref.ref(plane) for plane in planes if isinstance(plane, Tensor)]
    assert kept
    prompts: PromptWeights = "tape" if prompts_on_tape else "plain"
    settled = settle_model(model, TWIN, context=64, n_pages=8, n_slots=2, kv_type="bf16", prompts=prompts)
    runner = CardLoop(model, settled)
    given, found = model, runner.model
    assert (found is given) == (not prompts_on_tape)
    del model, given, weights, planes
    gc.collect()
    assert [ref() is None for ref in kept] == [prompts_on_tape] * len(kept)
    runner.close()


def test_the_plans_text_states_the_bytes_of_either_way() -> None:
    model = small(PACKABLE, mix="q4_k_m")
    plain, tape = Laid(model), Laid(model, on_tape=True)
    scratch = 2 * scratch_elements(model)
    assert scratch == 2 * 512 * 256  # q, k and v, or gate and up
    assert f"a plain copy of {plain.step.n_plain_bytes} bytes for prompts, which could read" in plain.plan.text
    assert f"through {scratch} bytes of scratch" in plain.plan.text
    written = 2 * sum(rows * columns for rows, columns in (shape_of_weight(one.weight) for one in linears(model)))
    assert (
        f"prompts read it through {scratch} bytes of scratch, in place of a plain copy of "
        f"{plain.step.n_plain_bytes} bytes: a chunk reads "
    ) in tape.plan.text
    assert f" bytes and writes {written} before it multiplies" in tape.plan.text
    read = int(tape.plan.text.partition("a chunk reads ")[2].split()[0])
    assert 0 < read < tape.step.n_bytes
    held = sum(buffer.n_bytes for buffer in tape.plan.buffers)
    assert held < sum(buffer.n_bytes for buffer in plain.plan.buffers)


# --- how it is loaded ---


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_for_the_tape_is_loaded_with_its_matrices_in_the_hosts_memory(tied: bool, tmp_path: Path) -> None:
    from tests.models import tiny

    checkpoint = open_checkpoint(tiny.folder("qwen2", tmp_path))
    shape = replace(read_shape(checkpoint), tied_head=tied)
    words: dict[str, Any] = {"dtype": torch.bfloat16, "context": 64, "packed": True}
    plain = build_model(checkpoint, shape, device=torch.device("cpu"), **words)
    split = build_model(checkpoint, shape, device=torch.device("meta"), on_host=True, **words)
    checkpoint.close()
    assert split.device.type == "meta"
    for linear, other in zip(linears(split), linears(plain), strict=True):
        assert isinstance(linear.weight, Tensor)
        assert isinstance(other.weight, Tensor)
        assert torch.equal(linear.weight, other.weight)
        assert linear.bias is None or linear.bias.device.type == "meta"
    layer = split.layers[0]
    assert layer.attention_norm is not None
    assert layer.attention_norm.weight.device.type == "meta"
    assert all(sets.device.type == "meta" for sets in split.frequencies.values())
    assert split.head is not None
    assert (split.head.weight is split.embedding) == tied


def test_a_decoder_of_ones_own_has_the_model_of_the_loop(tiny_gguf: Path) -> None:
    with LLM(tiny_gguf, device="cpu") as llm:
        assert llm.decoder(n_ctx=64).model.embedding is llm._engine.runner.plain_model.embedding
