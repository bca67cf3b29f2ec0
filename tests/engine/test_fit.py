"""Where a model runs is settled before a byte is read: lowered and said by default, refused when asked for."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, Sampling
from ostinato.backends.base import PAGE_TOKENS, Settled
from ostinato.backends.machine import Chip, Machine
from ostinato.backends.memory_rows import KV_PAGES
from ostinato.backends.native.tiles import TileMatrix
from ostinato.cache.kv_bytes import cell_bytes, page_bytes
from ostinato.engine import machine
from ostinato.engine.choose import LoadCase, backend_of, choose, choose_pages, decide, fit, gib
from ostinato.engine.memory_plan import USABLE_SHARE, MemoryPlan
from ostinato.errors import BadInput, BadOption, ContextTooLarge, HardwareCannot
from ostinato.files.checkpoint import Checkpoint, open_checkpoint
from ostinato.models.header import tensors_in, tensors_of
from ostinato.models.registry import read_shape
from ostinato.options import LoadOptions
from tests.models import tiny, tiny_encoders, tiny_folder
from tests.random_model import MemoryKind, random_model

CHIP = Chip((9, 0), 132, 227 << 10)


def with_free(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(machine, "free_host_bytes", lambda: n_bytes)


def bytes_of(checkpoint: Checkpoint, settled: Settled, *names: str) -> int:
    """Of the rows of these names in the memory plan."""
    return plan_of(checkpoint, settled).bytes_of(*names)


def bytes_beside(checkpoint: Checkpoint, settled: Settled, *names: str) -> int:
    """Of all other rows on the device."""
    plan = plan_of(checkpoint, settled)
    return plan.device_bytes - plan.bytes_of(*names)


def plan_of(checkpoint: Checkpoint, settled: Settled) -> MemoryPlan:
    return MemoryPlan(backend_of(settled), read_shape(checkpoint), tensors_of(checkpoint), settled, 0)


@pytest.fixture(autouse=True)
def without_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is a share of what is free, and the tests reckon what must be free."""
    monkeypatch.setattr("ostinato.engine.choose.GRAMMAR_BYTES", 0)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama that was trained for 1,024 positions."""
    folder = tiny.folder("llama", tmp_path_factory.mktemp("long"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return folder


def weights_and(model: Path, n_tokens: int) -> int:
    """Free memory for the tiny model and the keys and values of that many tokens, and no more."""
    with LLM(model, device="cpu") as llm:
        beside = bytes_beside(llm._checkpoint, llm._settled, KV_PAGES)
        per_token = sum(cell_bytes(one, "f32") for one in llm.shape.attention.values())
    return int((beside + n_tokens * per_token) / USABLE_SHARE) + 1


def test_a_default_context_that_does_not_fit_is_lowered_and_said(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, weights_and(long_model, 600))
    said: list[str] = []
    with LLM(long_model, device="cpu", talk=said.append) as llm:
        assert llm.context == 592  # in whole pages of 16
    assert "1024" in said[0]
    assert "using 592" in said[0]


def test_a_context_asked_for_that_does_not_fit_is_refused_with_the_figures(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, weights_and(long_model, 600))
    with pytest.raises(ContextTooLarge, match=r"^context 600 needs .* at most 592 fit"):
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
    with pytest.raises(HardwareCannot, match="use the device cpu"):
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


def test_there_are_pages_for_every_slot_or_for_what_memory_there_is_and_for_one_context_at_least() -> None:
    shape = random_model("kv").shape
    settled = Settled("cpu", "torch", "eager", "float32", "f32", 100, 8)
    size = page_bytes(shape, "f32", PAGE_TOKENS["cpu"])
    assert choose_pages(shape, settled, 10_000 * size) == 8 * 7
    assert choose_pages(shape, settled, 40 * size) == 40
    assert choose_pages(shape, settled, 6 * size) == 7
    # Pages of a model without keys cost nothing.
    assert choose_pages(random_model("recurrent").shape, settled, 0) == 8 * 7


@pytest.mark.parametrize("kind", ["kv", "swa", "all swa", "recurrent", "hybrid"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_is_promised_is_never_more_than_what_was_free(device: str, kind: MemoryKind) -> None:
    model = random_model(kind)
    shape, said = replace(model.shape, context=1 << 17), list[str]()
    much = LoadCase(shape, tensors_in(model), LoadOptions(), Machine(device, 1 << 40, 1 << 40, CHIP, 13_000))
    whole = much.plan(decide(much))
    found = []
    for share in (0.08, 0.1, 0.12, 0.13, 0.2, 0.5, 0.9, 1.1):  # of the pages for every slot's whole context
        free = int((whole.bytes_beside_pages + share * whole.bytes_of(KV_PAGES)) / USABLE_SHARE) + 1
        case = replace(much, machine=replace(much.machine, free_bytes=free))
        settled = fit(decide(case), case, said.append)
        assert case.plan(settled).device_bytes <= 0.9 * free + 1
        # The context is lowered, and that is said, only where one sequence of it does not fit.
        assert bool(said) == (settled.context < shape.context) == (share < 1 / 8 and kind != "recurrent")
        found.append((settled.context, settled.n_pages))
        said.clear()
    assert found == sorted(found)
    assert found[-1] == (1 << 17, 8 * settled.max_pages)


def test_slots_and_pages_reach_the_engine(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_gguf, device="cpu", context=100, slots=3) as llm:
        assert (llm.stats().n_slots, llm.stats().pages) == (3, 3 * 7)


# What the persistent kernel needs


@pytest.fixture(scope="module")
def on_tape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama that the tape can play."""
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "max_position_embeddings": 1024}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**tiny.TINY["llama"].config, **sizes}))
    folder = tmp_path_factory.mktemp("tape") / "model"
    tiny_folder.write(made, folder, storage="BF16", style="current", shard_size=None)
    return folder


class Card:
    """A GPU that is only asked what it has, and a model's file that would run there."""

    def __init__(self, path: Path) -> None:
        self.checkpoint, self.said = open_checkpoint(path), list[str]()
        self.shape = read_shape(self.checkpoint)
        asked = self.settled(8 << 30, mode="persistent")
        self.weights = bytes_of(self.checkpoint, asked, "weights")
        self.tape = bytes_of(self.checkpoint, asked, "tape")
        self.beside = bytes_beside(self.checkpoint, asked, "weights", "tape", KV_PAGES)
        self.page = page_bytes(self.shape, "bf16", PAGE_TOKENS["cuda"])
        assert min(self.weights, self.tape, self.beside, self.page) > 0

    def settled(self, n_bytes: int, *, host_bytes: int = 8 << 30, **words: Any) -> Settled:
        here = Machine("cuda:0", int(n_bytes / USABLE_SHARE) + 1, host_bytes, CHIP, 13_000)
        options = LoadOptions(**{"device": "cuda", "context": 256, **words})
        return choose(self.checkpoint, self.shape, options, self.said.append, machine=here)


@pytest.fixture
def card(on_tape: Path) -> Iterator[Card]:
    found = Card(on_tape)
    yield found
    found.checkpoint.close()


def test_keys_and_values_get_what_everything_else_leaves(card: Card) -> None:
    def pages(n_bytes: float, mode: str) -> int:
        return card.settled(int(n_bytes), mode=mode, prompts="plain", slots=8).n_pages

    enough = card.weights + card.tape + card.beside + 20 * card.page
    assert pages(enough, "persistent") == pages(enough, "auto") == 20
    expected = min(8 * 4, (card.tape + 20 * card.page) // card.page)
    assert pages(enough, "loop") == expected
    with pytest.raises(
        HardwareCannot, match=r"once more for the persistent kernel, and cuda:0 has .*; try --prompts tape, or"
    ):
        pages(card.weights + card.tape / 2, "persistent")


def test_prompts_read_the_tape_where_a_plain_copy_beside_it_does_not_fit(card: Card) -> None:
    def settled(n_bytes: int, **words: Any) -> Settled:
        return card.settled(n_bytes, mode="persistent", **words)

    a_lot, enough = 8 << 30, card.tape + card.weights + card.beside + 8 * card.page
    little = enough - 5 * card.page  # one context is four pages
    assert (settled(a_lot).prompts, card.said) == ("plain", [])
    assert settled(little).prompts == "tape"
    assert bytes_of(card.checkpoint, settled(little), "weights") < card.weights
    assert f"prompts read the persistent kernel's tape of {gib(card.tape)}" in card.said[0]
    assert f"a plain copy of {gib(card.weights)}" in card.said[0]
    # What was asked for is done, and what the plain copy would have taken is there for pages.
    assert (settled(a_lot, prompts="tape").prompts, settled(enough, prompts="plain").prompts) == ("tape", "plain")
    assert settled(enough, prompts="tape", slots=8).n_pages > settled(enough, prompts="plain", slots=8).n_pages
    with pytest.raises(HardwareCannot, match=r"of it for the persistent kernel, and cuda:0 has .*; take a smaller"):
        settled(card.tape)
    with pytest.raises(HardwareCannot, match=r"wait in the host's memory .*; use --prompts plain, or --mode loop"):
        settled(little, host_bytes=card.weights - 1)


def test_auto_has_a_tape_where_it_fits_with_or_without_a_plain_copy_or_was_asked_for(card: Card) -> None:
    little = card.weights + card.tape + card.beside + 3 * card.page
    assert card.settled(8 << 30).mode == "persistent"
    alone = card.settled(little)
    assert (alone.mode, alone.prompts, alone.fallback) == ("persistent", "tape", None)
    for without in (card.settled(little, prompts="plain"), card.settled(little, host_bytes=card.weights - 1)):
        assert (without.mode, without.prompts, without.fallback) == ("loop", "plain", "graph")
    needs: list[dict[str, Any]] = [{"activations": "int8"}, {"prompts": "tape"}]
    for words in needs:  # which no other mode of a GPU has
        asked = card.settled(little, **words)
        assert (asked.mode, asked.prompts) == ("persistent", "tape")


def test_prompts_cannot_read_a_tape_that_is_not_there(tiny_gguf: Path, card: Card) -> None:
    for mode in ("auto", "eager", "loop"):
        with pytest.raises(BadOption, match="--prompts tape is for --mode persistent on a GPU"):
            LLM(tiny_gguf, device="cpu", mode=mode, prompts="tape")
    with LLM(tiny_gguf, device="cpu", mode="eager", prompts="plain") as llm:
        assert llm.mode == "eager"
    for words in ({"mode": "loop"}, {"slots": 9}):
        with pytest.raises(BadOption, match="will not run here"):
            card.settled(8 << 30, prompts="tape", **words)


# What the native loop needs


def test_eight_bits_of_activations_are_refused_where_no_kernel_multiplies_with_them(tiny_gguf: Path) -> None:
    with pytest.raises(BadOption, match="--activations int8 is for the CPU's native loop and for --mode persistent"):
        LLM(tiny_gguf, device="cpu", mode="eager", activations="int8")


def test_weights_go_into_tiles_where_the_native_loop_will_run(tiny_gguf: Path) -> None:
    with LLM(tiny_gguf, device="cpu") as llm:
        assert (llm.mode, llm.activations, llm.dtype) == ("loop", "wide", "float32")
        assert isinstance(llm._model.embedding, TileMatrix)
    with LLM(tiny_gguf, device="cpu", mode="loop", activations="int8") as llm:
        assert (llm.mode, llm.activations) == ("loop", "int8")


@pytest.mark.parametrize("words", [{"mode": "eager"}, {"dtype": "bfloat16"}])
def test_they_are_dense_where_that_was_asked_for(tiny_gguf: Path, words: dict[str, Any]) -> None:
    said: list[str] = []
    with LLM(tiny_gguf, device="cpu", talk=said.append, **words) as llm:
        assert (llm.mode, llm.activations, said) == ("eager", None, [])
        assert isinstance(llm._model.embedding, torch.Tensor)


@pytest.mark.parametrize("path", [partial(tiny.gguf, "gpt2"), partial(tiny_encoders.gguf, "bert")])
def test_models_with_layer_norms_and_encoders_run_natively(path: Callable[[Path], Path], tiny_files: Path) -> None:
    said: list[str] = []
    with LLM(path(tiny_files), device="cpu", talk=said.append) as llm:
        assert (llm.mode, llm.activations, llm.why_not, said) == ("loop", "wide", (), [])


def test_where_the_native_loop_lacks_an_encoder_runs_eager(tiny_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(talk: object) -> None:
        raise HardwareCannot("no compiler is here")

    monkeypatch.setattr("ostinato.backends.native.backend.cpu_library", fails)
    said: list[str] = []
    with LLM(tiny_encoders.gguf("bert", tiny_files), device="cpu", talk=said.append) as llm:
        assert (llm.mode, llm.embed("the time").shape) == ("eager", (1, 64))
    assert said == ["the native loop cannot run here: no compiler is here; eager runs instead, many times slower"]


def test_a_model_that_it_cannot_express_runs_eager_and_it_is_said(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reason = tiny_gguf, "the native loop wants heads whose width is a multiple of 32, and this model's is 16"
    monkeypatch.setattr("ostinato.backends.native.backend.HEAD_LANES", 32)
    said: list[str] = []
    with LLM(path, device="cpu", talk=said.append) as llm:
        assert llm.mode == "eager"
    assert said == [f"the native loop cannot run here: {reason}; eager runs instead"]
    with pytest.raises(HardwareCannot, match=f"mode 'loop' cannot run here: {reason}"):
        LLM(path, device="cpu", mode="loop")


def test_so_does_a_machine_without_compiler_and_object(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(talk: object) -> None:
        raise HardwareCannot("no compiler is here")

    monkeypatch.setattr("ostinato.backends.native.backend.cpu_library", fails)
    said: list[str] = []
    with LLM(tiny_gguf, device="cpu", talk=said.append) as llm:
        assert llm.mode == "eager"
        assert len(llm.generate([5, 6], Sampling(max_tokens=3, ignore_eos=True)).token_ids) == 3
    assert said == ["the native loop cannot run here: no compiler is here; eager runs instead, many times slower"]


def test_a_dtype_and_the_native_loop_exclude_each_other(tiny_gguf: Path) -> None:
    with pytest.raises(HardwareCannot, match="--dtype bfloat16 asks for dense weights"):
        LLM(tiny_gguf, device="cpu", mode="loop", dtype="bfloat16")


def test_the_dtype_that_a_cpu_computes_in_may_be_named(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.extras._is_installed", lambda module: module != "torch")
    with LLM(tiny_gguf, device="cpu", dtype="float32") as named, LLM(tiny_gguf, device="cpu") as auto:
        asked = [5, 6], Sampling(max_tokens=3, ignore_eos=True, seed=1)
        assert (named.mode, named.generate(*asked).digest) == ("loop", auto.generate(*asked).digest)
    with pytest.raises(HardwareCannot, match="--dtype bfloat16 needs torch"):
        LLM(tiny_gguf, device="cpu", dtype="bfloat16")


def test_threads_reach_torch_and_the_loop(tiny_gguf: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        with LLM(tiny_gguf, device="cpu", threads=1) as llm:
            assert (llm.threads, llm._engine.runner.settled.threads) == (1, 1)
            assert torch.get_num_threads() == 7  # the native loop's threads are its own
            llm.decoder()
            assert torch.get_num_threads() == 1
        torch.set_num_threads(7)
        with LLM(tiny_gguf, device="cpu", threads=1, mode="eager"):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
