"""Where a model runs is settled before a byte is read: lowered and said by default, refused when asked for."""

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato import LLM, Sampling
from ostinato.backends.native.plan import why_not_native
from ostinato.backends.native.tiles import TileMatrix
from ostinato.backends.tape.partition import RUN_ALIGNMENT, TapeGrid, TapeMatrix, WeightType, make_partition
from ostinato.backends.torch.paged import PAGE_TOKENS, page_bytes
from ostinato.engine import placement
from ostinato.errors import BadInput, BadOption, ContextTooLarge, HardwareCannot
from ostinato.files.checkpoint import TensorInfo, open_checkpoint
from ostinato.models.registry import read_shape
from ostinato.options import LoadOptions, Mode
from tests.backends.tape.models import shape_of
from tests.models import tiny
from tests.random_model import random_model


def with_free(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(placement, "free_bytes", lambda device: n_bytes)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama that was trained for 1,024 positions."""
    folder = tiny.folder("llama", tmp_path_factory.mktemp("long"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return folder


def weights_and(model: Path, n_tokens: int) -> int:
    """Memory for the tiny model's weights and the keys and values of that many tokens, as `settle` counts it."""
    with LLM(model, device="cpu") as llm:
        weights = placement.weight_bytes(llm._checkpoint, torch.float32, tiled=llm.activations is not None)
        per_token = 2 * llm.shape.n_layers * llm.shape.n_kv_heads * llm.shape.head_width * 4
    return int((weights + n_tokens * per_token) / placement.USABLE_SHARE) + 1


def test_a_default_context_that_does_not_fit_is_lowered_and_said(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, weights_and(long_model, 600))
    said: list[str] = []
    with LLM(long_model, device="cpu", talk=said.append) as llm:
        assert llm.context == 512  # memory comes in steps of 256 cells
    assert "1024" in said[0]
    assert "using 512" in said[0]


def test_a_context_asked_for_that_does_not_fit_is_refused_with_the_figures(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, weights_and(long_model, 600))
    with pytest.raises(ContextTooLarge, match=r"--context 600 needs .* at most 512 fit"):
        LLM(long_model, device="cpu", context=600)


def test_a_context_beyond_what_the_model_was_trained_for_is_refused(tiny_gguf: Path) -> None:
    with pytest.raises(ContextTooLarge, match="trained for 256"):
        LLM(tiny_gguf, device="cpu", context=257)


def test_weights_that_do_not_fit_are_refused_with_a_way_out(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1000)
    with pytest.raises(HardwareCannot, match=r"as float32 .* try --dtype bfloat16") as refused:
        LLM(tiny_gguf, device="cpu", mode="eager")
    assert refused.value.exit_code == 4
    with pytest.raises(HardwareCannot, match=r"packed and cpu has .* to give; take a smaller model"):
        LLM(tiny_gguf, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_a_matter_of_hardware(tiny_gguf: Path) -> None:
    with pytest.raises(HardwareCannot, match="--device cpu"):
        LLM(tiny_gguf, device="cuda")


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "tpu"},
        {"device": "cuda:x"},
        {"mode": "fast"},
        {"dtype": "float16"},
        {"kv_type": "fp8"},
        {"context": 0},
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_opened(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(wrong))):
        LLM("no/such/file", **wrong)


CPU = torch.device("cpu")


def test_there_are_pages_for_every_slot_or_for_what_memory_there_is_and_for_one_context_at_least() -> None:
    shape = random_model("kv").shape
    size = page_bytes(shape, "f32", PAGE_TOKENS["cpu"])
    a_lot = 10_000 * size
    assert placement.choose_pages(shape, "f32", 100, 8, a_lot, CPU) == 8 * 7
    assert placement.choose_pages(shape, "f32", 100, 8, 40 * size, CPU) == 40
    assert placement.choose_pages(shape, "f32", 100, 8, 6 * size, CPU) == 7


def test_pages_of_a_model_without_keys_cost_nothing() -> None:
    assert placement.choose_pages(random_model("recurrent").shape, "f32", 100, 8, 0, CPU) == 8 * 7


def test_slots_and_pages_reach_the_engine(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_gguf, device="cpu", context=100, slots=3) as llm:
        assert (llm.stats().n_slots, llm.stats().pages) == (3, 3 * 7)


# What the persistent kernel needs


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    """A GPU that is only asked how much it has."""
    monkeypatch.setattr(placement, "choose_device", lambda wanted: torch.device("cuda", 0))
    with_free(monkeypatch, n_bytes)


@pytest.mark.parametrize("type", ["BF16", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_tape_is_counted_as_it_will_be_dealt(type: str, tied: bool) -> None:
    sizes = {"attn_q": (128, 128), "attn_k": (64, 128), "ffn_gate": (192, 128), "ffn_down": (128, 192)}
    names = {f"blk.0.{name}.weight": size for name, size in sizes.items()}
    names |= {"token_embd.weight": (203, 128), "output.weight": (203, 128)}
    tensors = {name: TensorInfo(name, size, type, 0) for name, size in names.items()}
    tensors["blk.0.attn_norm.weight"] = TensorInfo("norm", (128,), "F32", 512)
    checkpoint: Any = SimpleNamespace(tensors=tensors)
    kind = WeightType.HALF if type == "BF16" else WeightType.EIGHT
    partition = make_partition([TapeMatrix(kind, *size) for size in (*sizes.values(), (203, 128))], TapeGrid(3))
    counted = placement.tape_bytes(checkpoint, shape_of(tied_head=tied), torch.bfloat16, packed=True)
    widened = 203 * 128 * 2 if type == "Q8_0" else 0
    assert 0 <= partition.n_bytes + widened - counted < 3 * RUN_ALIGNMENT


def test_keys_and_values_get_what_the_weights_and_the_tape_leave(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_checkpoint(long_model)) as checkpoint:
        shape = read_shape(checkpoint)
        weights = placement.weight_bytes(checkpoint, torch.bfloat16, packed=True)
        tape = placement.tape_bytes(checkpoint, shape, torch.bfloat16, packed=True)
        assert tape > 0
        size = page_bytes(shape, "bf16", PAGE_TOKENS["cuda"])

        def pages(mode: Mode) -> int:
            options = LoadOptions(device="cuda", mode=mode, context=256, slots=64, prompts="plain")
            return placement.settle(checkpoint, shape, options, lambda _: None).n_pages

        on_a_gpu(monkeypatch, int((weights + tape + 40 * size) / placement.USABLE_SHARE) + 1)
        assert pages("persistent") == 40
        assert pages("auto") == pages("loop") == min(64 * 4, (tape + 40 * size) // size)
        on_a_gpu(monkeypatch, int((weights + tape / 2) / placement.USABLE_SHARE))
        with pytest.raises(
            HardwareCannot, match=r"once more for the persistent kernel, and cuda:0 has .*; try --prompts tape, or"
        ):
            pages("persistent")


def test_prompts_read_the_tape_where_a_plain_copy_beside_it_does_not_fit(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_checkpoint(long_model)) as checkpoint:
        shape = read_shape(checkpoint)
        copies: dict[str, Any] = {"dtype": torch.bfloat16, "packed": True}
        weights = placement.weight_bytes(checkpoint, **copies)
        tape = placement.tape_bytes(checkpoint, shape, **copies)
        beside = placement.beside_tape_bytes(checkpoint, shape, **copies)
        assert beside < weights
        said: list[str] = []

        def settled(n_bytes: int, **words: Any) -> placement.Placement:
            on_a_gpu(monkeypatch, int(n_bytes / placement.USABLE_SHARE) + 1)
            options = LoadOptions(device="cuda", mode="persistent", context=256, **words)
            return placement.settle(checkpoint, shape, options, said.append)

        a_lot, little = 8 << 30, tape + weights + 8 * page_bytes(shape, "bf16", PAGE_TOKENS["cuda"])
        assert (settled(a_lot).prompts, said) == ("plain", [])
        assert settled(little).prompts == "tape"
        assert f"prompts read the persistent kernel's tape of {placement.gib(tape)}" in said[0]
        assert f"a plain copy of {placement.gib(weights)}" in said[0]
        # What was asked for is done, and what the plain copy would have taken is there for pages.
        assert (settled(a_lot, prompts="tape").prompts, settled(little, prompts="plain").prompts) == ("tape", "plain")
        assert settled(little, prompts="tape", slots=64).n_pages > settled(little, prompts="plain", slots=64).n_pages
        with pytest.raises(HardwareCannot, match=r"of it for the persistent kernel, and cuda:0 has .*; take a smaller"):
            settled(tape)
        monkeypatch.setattr(placement, "free_host_bytes", lambda: weights - 1)
        with pytest.raises(HardwareCannot, match=r"wait in the host's memory .*; use --prompts plain, or --mode loop"):
            settled(little)


def test_auto_has_a_tape_where_it_fits_beside_the_weights_or_was_asked_for(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "has_tape", lambda *given: True)  # a card that could play it
    with closing(open_checkpoint(long_model)) as checkpoint:
        shape = read_shape(checkpoint)
        copies: dict[str, Any] = {"dtype": torch.bfloat16, "packed": True}
        both = placement.weight_bytes(checkpoint, **copies) + placement.tape_bytes(checkpoint, shape, **copies)
        page = page_bytes(shape, "bf16", PAGE_TOKENS["cuda"])

        def settled(n_bytes: int, **words: Any) -> placement.Placement:
            on_a_gpu(monkeypatch, int(n_bytes / placement.USABLE_SHARE) + 1)
            options = LoadOptions(device="cuda", context=256, slots=64, **words)
            return placement.settle(checkpoint, shape, options, lambda _: None)

        assert settled(8 << 30).room_for_tape
        without = settled(both + 8 * page)
        assert (without.room_for_tape, without.prompts) == (False, "plain")
        asked = settled(both + 8 * page, activations="int8")  # which no other mode of a GPU has
        assert (asked.room_for_tape, asked.prompts) == (True, "tape")
        assert settled(both + 8 * page, prompts="tape").room_for_tape


def test_prompts_cannot_read_a_tape_that_is_not_there(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("auto", "eager", "loop"):
        with pytest.raises(BadOption, match="--prompts tape is for --mode persistent on a GPU"):
            LLM(tiny_gguf, device="cpu", mode=mode, prompts="tape")
    with LLM(tiny_gguf, device="cpu", mode="eager", prompts="plain") as llm:
        assert llm.mode == "eager"
    on_a_gpu(monkeypatch, 8 << 30)
    with closing(open_checkpoint(tiny_gguf)) as checkpoint, pytest.raises(BadOption, match="will not run here"):
        placement.settle(checkpoint, read_shape(checkpoint), LoadOptions(device="cuda", prompts="tape"), print)


# What the native loop needs


def test_eight_bits_of_activations_are_refused_where_nobody_multiplies_with_them(tiny_gguf: Path) -> None:
    with pytest.raises(BadOption, match="--activations int8 is for the CPU's native loop and for --mode persistent"):
        LLM(tiny_gguf, device="cpu", mode="eager", activations="int8")


def test_weights_go_into_tiles_where_the_native_loop_will_run(tiny_gguf: Path) -> None:
    with LLM(tiny_gguf, device="cpu") as llm:
        assert (llm.mode, llm.activations, llm.dtype) == ("loop", "wide", "float32")
        assert isinstance(llm._model.embedding, TileMatrix)
    with LLM(tiny_gguf, device="cpu", mode="loop", activations="int8") as llm:
        assert (llm.mode, llm.activations) == ("loop", "int8")


@pytest.mark.parametrize("words", [{"mode": "eager"}, {"dtype": "float32"}, {"dtype": "bfloat16"}])
def test_they_are_dense_where_that_was_asked_for(tiny_gguf: Path, words: dict[str, Any]) -> None:
    said: list[str] = []
    with LLM(tiny_gguf, device="cpu", talk=said.append, **words) as llm:
        assert (llm.mode, llm.activations, said) == ("eager", None, [])
        assert isinstance(llm._model.embedding, torch.Tensor)


@pytest.mark.parametrize("name", ["gpt2", "mamba2"])
def test_a_family_that_it_does_not_know_runs_eager_and_it_is_said(name: str, tiny_files: Path) -> None:
    path = tiny.gguf(name, tiny_files)
    said: list[str] = []
    with LLM(path, device="cpu", talk=said.append) as llm:
        assert llm.mode == "eager"
    assert said == [f"the native loop cannot run here: {why_not_native(llm.shape)}; eager runs instead"]
    with pytest.raises(HardwareCannot, match="mode 'loop' cannot run here: the native loop"):
        LLM(path, device="cpu", mode="loop")


def test_so_does_a_machine_without_compiler_and_object(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(talk: object) -> None:
        raise HardwareCannot("no compiler is here")

    monkeypatch.setattr(placement, "cpu_library", fails)
    said: list[str] = []
    with LLM(tiny_gguf, device="cpu", talk=said.append) as llm:
        assert llm.mode == "eager"
        assert len(llm.generate([5, 6], Sampling(max_tokens=3, ignore_eos=True)).token_ids) == 3
    assert said == ["the native loop cannot run here: no compiler is here; eager runs instead"]


def test_a_dtype_and_the_native_loop_exclude_each_other(tiny_gguf: Path) -> None:
    with pytest.raises(HardwareCannot, match="--dtype float32 asks for dense weights"):
        LLM(tiny_gguf, device="cpu", mode="loop", dtype="float32")


def test_threads_reach_torch_and_the_loop(tiny_gguf: Path) -> None:
    before = torch.get_num_threads()
    try:
        with LLM(tiny_gguf, device="cpu", threads=2) as llm:
            assert (llm.threads, torch.get_num_threads(), llm._engine.loop.options.threads) == (2, 2, 2)
    finally:
        torch.set_num_threads(before)
