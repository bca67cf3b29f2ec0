"""Who runs a model: the fastest backend that can, with the reasons of those above it, or an error with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast, get_args

import pytest

from ostinato import options
from ostinato.backends import cards
from ostinato.backends.base import Settled
from ostinato.backends.machine import SHARED_BYTES, Chip, Machine
from ostinato.backends.native.backend import NATIVE
from ostinato.backends.torch.backend import TORCH
from ostinato.backends.torch.model import Model
from ostinato.cache.kv_bytes import KV_FORMATS, KVFormat
from ostinato.engine.choose import (
    BACKENDS,
    HELD,
    NO_ROOM,
    LoadCase,
    decide,
    prepared,
    settle_model,
    why_not,
    why_not_model,
)
from ostinato.errors import BadOption, HardwareCannot
from ostinato.models.header import tensors_in
from ostinato.options import MODES, LoadOptions
from tests.backends.native.tiled import tiled
from tests.backends.tape.models import shape_of, small
from tests.engine.rig import open_loop
from tests.random_model import MemoryKind, random_model

H200 = Chip((9, 0), 132, 227 << 10)
CARD = Machine("cuda:0", 1 << 40, 1 << 40, H200, 13_000)
ON_CPU = Machine("cpu", 1 << 40, 1 << 40)


def decided(model: Model, machine: Machine = CARD, **words: Any) -> Settled:
    wanted = LoadOptions(**{"context": 64, "slots": 1, **words})
    return decide(LoadCase(model.shape, tensors_in(model), wanted, machine))


def test_every_mode_has_a_backend_that_answers_for_it_on_either_device() -> None:
    model = small(shape_of())
    for machine in (CARD, ON_CPU):
        assert tuple(why_not(LoadCase(model.shape, tensors_in(model), LoadOptions(), machine))) == MODES
    assert [backend.name for backend in BACKENDS] == ["tape", "cuda", "native", "torch"]


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_recurrent_blocks_run_in_every_mode_of_a_gpu(kind: MemoryKind) -> None:
    model = random_model(kind)
    reasons = why_not_model(model, machine=CARD)
    assert [reasons[mode] for mode in MODES[:3]] == [None] * 3
    assert decided(model).mode == "loop"


def test_encoders_run_natively_on_a_cpu_and_by_torch_elsewhere() -> None:
    model = random_model("encoder")
    native = decided(tiled(model), ON_CPU, slots=8)
    assert (native.mode, native.backend, native.n_slots, native.fallback) == ("loop", "native", 1, None)
    asked = decided(tiled(model), ON_CPU, mode="eager")
    assert (asked.mode, asked.backend, asked.why_not) == ("eager", "torch", ("loop: not asked for",))
    for machine in (CARD, replace(CARD, missing=("triton",))):
        settled = decided(model, machine)
        assert (settled.mode, settled.backend, settled.fallback) == ("eager", "cuda", None)
        with pytest.raises(HardwareCannot, match="mode 'graph' cannot run here: bert is an encoder"):
            decided(model, machine, mode="graph")


def test_auto_takes_the_persistent_kernel_where_it_can_run_and_there_is_room() -> None:
    model = small(shape_of())
    settled = decided(model)
    assert (settled.mode, settled.backend, settled.why_not, settled.fallback) == ("persistent", "tape", (), "loop")
    narrow = replace(CARD, free_bytes=1 << 20)
    without = decided(model, narrow)
    assert (without.mode, without.backend, without.why_not) == ("loop", "cuda", (f"persistent: {NO_ROOM}",))
    for machine in (CARD, narrow):
        asked = decided(model, machine, mode="persistent")
        assert (asked.mode, asked.why_not, asked.fallback) == ("persistent", (), None)
    assert decided(model, mode="loop").why_not == ("persistent: not asked for",)


def test_auto_gives_a_card_to_one_engine_of_a_process() -> None:
    model = small(shape_of())
    cards.hold("cuda:0")
    try:
        settled = decided(model)
        assert (settled.mode, settled.why_not) == ("loop", (f"persistent: {HELD}",))
        assert decided(model, mode="persistent").mode == "persistent"
        assert decided(model, replace(CARD, device="cuda:1")).mode == "persistent"
    finally:
        cards.release("cuda:0")
    assert decided(model).mode == "persistent"


@pytest.mark.parametrize("needs", [{"prompts": "tape"}, {"activations": "int8"}])
def test_auto_with_what_only_the_persistent_kernel_can_do_takes_it_or_refuses(needs: dict[str, Any]) -> None:
    model = small(shape_of())
    cards.hold("cuda:0")
    try:
        settled = decided(model, **needs)
    finally:
        cards.release("cuda:0")
    assert (settled.mode, settled.fallback) == ("persistent", None)
    with pytest.raises(BadOption, match=r"will (not )?run here"):
        decided(model, slots=9, **needs)
    with pytest.raises(HardwareCannot, match="mode 'persistent' cannot run here: the tape has up to 8 slots"):
        decided(model, slots=9, mode="persistent", **needs)


def test_what_persistent_mode_cannot_run_is_said_whether_or_not_it_is_asked_for() -> None:
    model = small(shape_of())
    reason = "the tape has up to 8 slots, and 9 are asked for"
    settled = decided(model, slots=9)
    assert (settled.mode, settled.why_not) == ("loop", (f"persistent: {reason}",))
    with pytest.raises(HardwareCannot, match=f"mode 'persistent' cannot run here: {reason}"):
        decided(model, slots=9, mode="persistent")
    assert decided(model, mode="persistent", kv_type="q8_0").mode == "persistent"


def test_a_card_decides_too() -> None:
    model = small(shape_of())
    ada = replace(CARD, chip=Chip((8, 9), 128, SHARED_BYTES[8, 9]))
    assert decided(model, ada, mode="persistent").mode == "persistent"
    little = replace(CARD, chip=replace(H200, shared_bytes=48 << 10))
    (reason,) = decided(model, little).why_not
    assert "sm_90 has 49152; use --mode loop" in reason
    silent = replace(CARD, driver_cuda=None)
    settled = decided(model, silent)
    assert settled.mode == "graph"
    assert all("does not tell" in reason for reason in settled.why_not)
    with pytest.raises(HardwareCannot, match="not installed: triton"):
        decided(model, replace(CARD, missing=("triton",)))


def test_on_the_cpu_it_is_refused_with_its_reason() -> None:
    reason = "the persistent kernel is CUDA's, and this model is on the CPU"
    with pytest.raises(HardwareCannot, match=f"mode 'persistent' cannot run here: {reason}"):
        open_loop(mode="persistent")
    driver = open_loop(mode="auto")
    assert driver.runner.why_not == ()  # it is not of this kind of device, and was not asked for
    assert driver.runner.settled.fallback == "eager"  # graphs are CUDA's
    driver.runner.close()


def test_deciding_prepares_nothing_and_a_backend_that_cannot_be_prepared_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_compiler(*_: object) -> None:
        raise HardwareCannot("there is no compiler")

    monkeypatch.setattr(NATIVE, "prepare", no_compiler)
    monkeypatch.setattr(TORCH, "prepare", lambda *_: None)  # which tells torch how many threads it has
    model, said = random_model("kv"), list[str]()
    case = LoadCase(model.shape, tensors_in(model), LoadOptions(), ON_CPU)
    assert decide(case).mode == "loop"
    settled = prepared(case, said.append)
    assert (settled.mode, settled.fallback) == ("eager", None)
    assert said == ["the native loop cannot run here: there is no compiler; eager runs instead, many times slower"]
    asked = replace(case, options=LoadOptions(mode="loop"))
    with pytest.raises(HardwareCannot, match="mode 'loop' cannot run here: there is no compiler"):
        prepared(asked, said.append)


def test_a_model_that_no_mode_can_run_is_refused_with_all_reasons() -> None:
    words = "no mode can run this model here: the tape does not know heads of width 8.*; heads of width 8"
    with pytest.raises(HardwareCannot, match=words):
        decided(random_model("kv", hidden=32))


def test_every_type_of_keys_and_values_has_a_record() -> None:
    assert tuple(KV_FORMATS) == get_args(options.KVType)


def test_a_type_of_keys_and_values_that_no_backend_knows_is_refused_by_each_of_them_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "KVType", Literal["f32", "q3_0"])
    monkeypatch.setitem(cast(Any, KV_FORMATS), "q3_0", KVFormat(1, block=16))
    model = small(shape_of())
    for machine in (CARD, ON_CPU):
        for backend in (backend for backend in BACKENDS if backend.device == machine.kind):
            asked = (model.shape, tensors_in(model), LoadOptions(kv_type="q3_0"), machine)  # type: ignore[arg-type]
            for mode in backend.modes:
                why = backend.why_not(mode, *asked)
                assert why is not None
                assert why.endswith(f"keeps keys and values as {', '.join(backend.kv_types)}, not q3_0")
        with pytest.raises(HardwareCannot, match=r"no mode can run this model here: .*, not q3_0"):
            decided(model, machine, kv_type="q3_0")


def test_heads_that_are_no_whole_blocks_of_a_type_are_refused_before_weights_are_read() -> None:
    model = small(shape_of(n_heads=4, head_width=48))
    with pytest.raises(BadOption, match="q8_0 needs heads whose width is a multiple of 32, and this model's is 48"):
        decided(model, ON_CPU, kv_type="q8_0")


def test_a_model_in_memory_is_settled_for_the_layout_it_is_in() -> None:
    dense = random_model("kv")
    settled = settle_model(dense, context=64, n_pages=3, machine=ON_CPU)
    assert (settled.mode, settled.backend, settled.weights, settled.n_pages) == ("eager", "torch", "dense", 3)
    settled = settle_model(tiled(dense), context=64, machine=ON_CPU)
    assert (settled.mode, settled.backend, settled.weights, settled.n_pages) == ("loop", "native", "tiles", 4)
    packed = small(shape_of(hidden=256, ff_width=256), mix="q8_0")
    settled = settle_model(packed, context=64, machine=CARD)
    assert (settled.mode, settled.weights, settled.dtype) == ("persistent", "packed", "bfloat16")
    assert settle_model(packed, context=64, machine=ON_CPU).mode == "eager"  # they are a GPU's


def test_a_chip_on_which_a_prompt_is_summed_in_another_order_says_so() -> None:
    """What the digest names: bits of such an answer are not those of a larger chip."""
    model = small(shape_of(hidden=512, n_heads=2, n_kv_heads=1, head_width=256))
    ada = replace(CARD, chip=Chip((8, 9), 128, 99 << 10))
    assert decided(model, ada, kv_type="f32", mode="loop").other_sums == "prompt attention by 16"
    assert decided(model, ada, kv_type="bf16", mode="loop").other_sums is None
    assert decided(model, kv_type="f32", mode="loop").other_sums is None
    assert decided(model, ON_CPU, kv_type="f32").other_sums is None
    packed = small(shape_of(hidden=256, ff_width=256), mix="q8_0")
    assert decided(packed, ada, mode="persistent").other_sums == "lifted weights"
    assert decided(packed, ada, mode="loop").other_sums is None
    assert decided(packed, mode="persistent").other_sums is None
