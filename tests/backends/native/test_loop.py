"""The native loop beside torch: the same logits for every family, type and kind of memory, and bits of its own.

The oracle is the decoder's own flow over dense weights. Bits may depend on the sequence alone: not on threads, batch,
where a prompt was cut, or the CPU's level.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from ostinato.backends.base import ChunkPart
from ostinato.backends.native.backend import why_not_blocks
from ostinato.backends.native.cpu_levels import architecture, levels_of
from ostinato.backends.native.library import chosen_level
from ostinato.backends.native.start import NativeLoop
from ostinato.backends.native.tiles import TILE_TYPES, TileMatrix
from ostinato.backends.torch.arrays import as_tensor
from ostinato.backends.torch.model import Model
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.decoder import Decoder
from ostinato.engine.choose import settle_model, why_not_model
from ostinato.engine.driver import LoopDriver
from ostinato.engine.open import open_runner
from ostinato.errors import HardwareCannot, InternalError
from ostinato.loop.layout import Finish, Word
from ostinato.models.rope import Rope
from ostinato.models.shape import DeltaShape, Mamba2Shape
from ostinato.options import KVType, Sampling
from tests.backends.families import FAMILIES, LATENT, RECURRENT, family_model
from tests.backends.native.tiled import dense, packed_blocks, plain_tiles, tiled
from tests.counts import soak
from tests.engine.rig import DEADLINE_S, Driver, held, open_loop
from tests.random_model import random_model

PROMPT = [5, 9, 2, 77, 31]
TOLERANCE = 1e-3


def opened(model: Model, *, threads: int = 2, n_slots: int = 4, kv_type: KVType = "f32", mode: str = "loop") -> Driver:
    wide = not isinstance(model.embedding, TileMatrix) or model.embedding.wide
    settled = settle_model(
        model,
        mode,
        context=256,
        n_pages=128,
        n_slots=n_slots,
        kv_type=kv_type,
        activations="wide" if wide else "int8",
        threads=threads,
    )
    return Driver(open_runner(model, settled))


def logits_of(driver: LoopDriver, row: int) -> Tensor:
    """Of the last step, in memory of their own; of any backend."""
    return as_tensor(driver.runner.plan.buffer("logits").tensor[row]).clone()


def steps_of(driver: LoopDriver, prompt: Sequence[int], most: int, slot: int = 0) -> tuple[list[int], Tensor]:
    """Greedy tokens and the logits of every step, [most - 1, vocab]: those of the first token are prefill's own."""
    generation = driver.admit(slot, prompt, most=most)
    logits = []
    while driver.step():
        logits.append(logits_of(driver, 0))
    tokens = [e.token for e in driver.entries if e.generation == generation and e.token is not None]
    logits.append(logits_of(driver, 0))
    return tokens, torch.stack(logits[1:])  # before the first step there were none


def forward(model: Model, ids: Sequence[int]) -> Tensor:
    """Logits after each id, by one forward of the decoder's own flow."""
    decoder = Decoder(model, n_ctx=256, n_batch=256, n_ubatch=256)
    decoder.decode(Batch(token=list(ids), output=[1] * len(ids)))
    rows = [decoder.logits(i) for i in range(len(ids))]
    return torch.stack([torch.as_tensor(row) for row in rows])


def compare(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Each row near, and its largest the same one; but for a tie closer than what rounding may move."""
    apart = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(apart.max()) < tolerance
    for row, (one, two) in enumerate(zip(found, expected, strict=True)):
        best = int(one.argmax())
        assert float(two.max() - two[best]) <= 2 * tolerance * float(two.abs().max()), f"step {row}"


# The same logits


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES + RECURRENT + LATENT)
def test_every_family_has_the_logits_of_dense_weights_for_64_steps(family: str) -> None:
    model = family_model(family)
    with closing(opened(tiled(model))) as driver:
        tokens, found = steps_of(driver, PROMPT, most=65)
    expected = forward(model, [*PROMPT, *tokens])[len(PROMPT) - 1 :]
    assert int(expected[0].argmax()) == tokens[0]
    compare(found, expected[1:-1])


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", get_args(KVType))
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek2"])
def test_every_type_of_keys_and_values_decodes_as_the_twin_does(family: str, kv_type: KVType) -> None:
    model = family_model(family)
    with closing(opened(tiled(model), kv_type=kv_type)) as driver:
        tokens, found = steps_of(driver, PROMPT, most=40)
    with closing(opened(model, kv_type=kv_type, mode="twin")) as twin:
        expected_tokens, expected = steps_of(twin, PROMPT, most=40)
    assert tokens == expected_tokens
    compare(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("type", TILE_TYPES)
@pytest.mark.parametrize("wide", [True, False])
def test_every_type_of_tiles_has_the_logits_of_the_same_numbers_dense(type: str, wide: bool) -> None:
    """E-17, E-75."""
    model = tiled(random_model("kv", hidden=256), packed_blocks(type, wide=wide))
    with closing(opened(model)) as driver:
        tokens, found = steps_of(driver, PROMPT, most=65)
    expected = forward(dense(model), [*PROMPT, *tokens])[len(PROMPT) : -1]
    if wide:
        compare(found, expected)
    else:  # eight bits of activations: near, and no more is said
        assert float((found - expected).norm() / expected.norm()) < 0.1


def test_a_matrix_of_gate_and_up_together_gives_the_bits_of_both_apart() -> None:
    model = random_model("kv")
    apart = tiled(model)
    layers: list[Any] = []
    for layer, before in zip(list[Any](apart.layers), list[Any](model.layers), strict=True):
        gate_up = replace(layer.mlp.gate_up, weight=plain_tiles()(before.mlp.gate_up.weight))
        layers.append(replace(layer, mlp=replace(layer.mlp, gate_up=gate_up)))
    with closing(opened(apart)) as one, closing(opened(replace(apart, layers=layers))) as other:
        assert torch.equal(steps_of(one, PROMPT, 9)[1], steps_of(other, PROMPT, 9)[1])


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 48, 64, 80, 128])
def test_any_head_width_of_whole_lanes_and_odd_sizes_of_all_else(width: int) -> None:
    plain = family_model("llama")
    rope = Rope(10_000.0, width // 2, "halves")
    shape = plain.shape.with_attention(head_width=width, value_width=width, rope=rope, query_scale=width**-0.5)
    shape = replace(shape, hidden=77).with_layers(ff_width=83)
    model = family_model("llama", shape=shape)
    with closing(opened(tiled(model), threads=3)) as driver:
        tokens, found = steps_of(driver, PROMPT, most=30)
    compare(found, forward(model, [*PROMPT, *tokens])[len(PROMPT) : -1])


def of_head_width(family: str, width: int) -> Model:
    """A recurrent family with value heads of this width."""
    shape = family_model(family).shape
    for layer, own in shape.recurrent.items():
        if isinstance(own, DeltaShape):
            shape = shape.with_recurrent_in({layer}, replace(own, value_width=width))
        elif isinstance(own, Mamba2Shape):
            shape = shape.with_recurrent_in({layer}, replace(own, inner=width * own.n_heads))
    return family_model(family, shape=shape)


@pytest.mark.parametrize("width", [32, 184])
@pytest.mark.parametrize("family", ["mamba2", "qwen35"])
def test_recurrent_heads_of_any_width_have_the_logits_of_dense_weights(family: str, width: int) -> None:
    """Whole lanes go together, by eight and two, and the rest alone."""
    model, prompt = of_head_width(family, width), [*PROMPT, *range(40, 60)]
    with closing(opened(tiled(model))) as driver:
        tokens, found = steps_of(driver, prompt, most=20)
    compare(found, forward(model, [*prompt, *tokens])[len(prompt) : -1])


@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_rows_and_feed_forward_blocks_of_odd_widths_with_layer_norms_and_no_gate(activation: Any) -> None:
    shape = replace(family_model("gpt2").shape, hidden=77, activation=activation).with_layers(ff_width=83)
    model = family_model("gpt2", shape=shape)
    with closing(opened(tiled(model), threads=3)) as driver:
        tokens, found = steps_of(driver, PROMPT, most=30)
    compare(found, forward(model, [*PROMPT, *tokens])[len(PROMPT) : -1])


def test_a_window_shorter_than_a_page_and_one_longer_than_a_block_are_seen_alike() -> None:
    for window in (5, 16, 33, 200):
        model = random_model("swa")
        shape = model.shape.with_attention(window=(window, None))
        model = replace(model, shape=shape)
        layers = [
            replace(block, attention=replace(block.attention, shape=shape.attention[number]))
            for number, block in enumerate(list[Any](model.layers))
        ]
        model = replace(model, layers=layers)
        prompt = [(7 * i + window) % 128 for i in range(210)]
        with closing(opened(tiled(model))) as driver:
            tokens, found = steps_of(driver, prompt, most=20)
        compare(found, forward(model, [*prompt, *tokens])[len(prompt) : -1])


# Bits


def bits_of(
    model: Model, *, threads: int = 2, beside: int = 0, cuts: Sequence[int] = (), kv_type: KVType = "f32"
) -> tuple[list[int], Tensor]:
    """Tokens and logits of one sequence, computed by so many threads, among neighbours, with its prompt cut there."""
    chance = random.Random(beside)
    prompt = [(11 * i + 3) % model.shape.vocab for i in range(90)]
    with closing(opened(model, threads=threads, n_slots=8, kv_type=kv_type)) as driver:
        for slot in range(beside):
            driver.admit(slot, [chance.randrange(model.shape.vocab) for _ in range(chance.randrange(1, 40))], most=60)
        pages = range(100, 108)
        generation = driver.admit(7, prompt, most=12, pages=pages, admit=False)
        for start, stop in zip((0, *cuts), (*cuts, len(prompt)), strict=True):
            chunk = prompt[start:stop]
            driver.runner.chunks.run([ChunkPart(chunk, start, driver.tables(pages), 7)], len(chunk))
        driver.runner.chunks.first(7)
        assert driver.runner.host.admit(7, generation)
        logits = []
        for step in range(12):
            driver.step()
            if step:
                logits.append(logits_of(driver, beside))
        return driver.tokens(generation), torch.stack(logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kv_type"),
    [(family, kv_type) for family in ("llama", "gemma2", "mixtral", "gpt2", "deepseek2") for kv_type in ("f32", "q8_0")]
    + [(family, "f32") for family in ("mamba", "mamba2", "falcon-h1", "lfm2", "qwen35-tiled")],
)
def test_bits_do_not_depend_on_threads_neighbours_or_cuts(family: str, kv_type: KVType) -> None:
    model = tiled(family_model(family))
    tokens, expected = bits_of(model, threads=1, kv_type=kv_type)
    for threads in (2, 3):
        assert torch.equal(bits_of(model, threads=threads, kv_type=kv_type)[1], expected), f"{threads} threads"
    for beside in range(1, 8):
        assert torch.equal(bits_of(model, beside=beside, kv_type=kv_type)[1], expected), f"{beside} neighbours"
    for cuts in ((1,), (16, 17), (64,), (5, 33, 89), tuple(range(1, 90, 2))):
        found = bits_of(model, cuts=cuts, kv_type=kv_type)
        assert found[0] == tokens
        assert torch.equal(found[1], expected), f"cut at {cuts}"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2", "mamba", "mamba2", "qwen35", "deepseek2"])
@pytest.mark.parametrize("level", [level.name for level in levels_of(architecture())[1:3]])
def test_bits_do_not_depend_on_the_level_of_the_cpu(family: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiled(family_model(family))
    for kv_type in get_args(KVType):
        _, expected = bits_of(model, beside=2, kv_type=kv_type)
        with at_level(level, monkeypatch):
            _, found = bits_of(model, beside=2, kv_type=kv_type)
        assert torch.equal(found, expected), kv_type


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "qwen35"])
@pytest.mark.parametrize("level", [level.name for level in levels_of(architecture())[1:3]])
def test_wide_recurrent_heads_have_the_same_bits_at_every_level_and_cut(
    family: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiled(of_head_width(family, 184))
    _, expected = bits_of(model)
    assert torch.equal(bits_of(model, cuts=(1, 7, 40))[1], expected)
    with at_level(level, monkeypatch):
        assert torch.equal(bits_of(model)[1], expected)


@contextmanager
def at_level(level: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loops that are opened here play this level's object."""
    if chosen_level().name == level:
        pytest.skip(f"bits were not compared with {level}: it is the best this CPU has")
    with monkeypatch.context() as patch:
        patch.setenv("OSTINATO_CPU_LEVEL", level)
        try:
            yield
        except HardwareCannot as error:
            pytest.skip(f"bits were not compared with {level}: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("level", [level.name for level in levels_of(architecture())[1:3]])
def test_a_prompt_over_several_blocks_has_the_same_bits_at_every_level(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that are looked at together some see a block and some do not."""
    model, prompt = tiled(random_model("swa")), [(5 * i + 1) % 128 for i in range(600)]

    def logits() -> Tensor:
        with closing(
            Driver(open_runner(model, settle_model(model, "loop", context=1024, n_pages=64, threads=2)))
        ) as driver:
            return steps_of(driver, prompt, most=6)[1]

    expected = logits()
    with at_level(level, monkeypatch):
        assert torch.equal(logits(), expected)


def test_int8_activations_have_bits_of_their_own_that_depend_on_nothing_either() -> None:
    model = tiled(random_model("kv", hidden=256), packed_blocks("Q4_1", wide=False))
    _, expected = bits_of(model, threads=1)
    assert torch.equal(bits_of(model, threads=3, beside=3, cuts=(40,))[1], expected)
    wide = tiled(random_model("kv", hidden=256), packed_blocks("Q4_1", wide=True))
    assert not torch.equal(bits_of(wide)[1], expected)


def test_a_loop_is_not_opened_with_other_activations_than_its_weights_were_packed_for() -> None:
    model = tiled(random_model("kv"), plain_tiles(wide=False))
    with pytest.raises(InternalError, match="other activations"):
        open_runner(model, settle_model(model, "loop", context=64, n_pages=8, threads=1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "deepseek2"])
def test_a_long_past_is_shared_out_by_blocks_with_the_same_bits(family: str) -> None:
    """One row of few key heads is split over threads; four of them are not."""
    model = tiled(family_model(family))
    prompt = [(5 * i + 1) % 128 for i in range(700)]
    found = []
    for threads, n_others in ((1, 0), (2, 0), (3, 0), (2, 3), (1, 3)):
        settled = settle_model(model, "loop", context=1024, n_pages=256, n_slots=4, kv_type="f16", threads=threads)
        with closing(Driver(open_runner(model, settled))) as driver:
            for other in range(n_others):
                driver.admit(other, [other + 1] * 300, most=30)
            driver.admit(3, prompt, most=6)
            for _ in range(5):
                driver.step()
            found.append(logits_of(driver, n_others))
    assert all(torch.equal(one, found[0]) for one in found)


# What it can run


def test_what_it_cannot_run_is_told_and_auto_runs_eager() -> None:
    narrow = replace(random_model("kv", hidden=32), embedding=tiled(random_model("kv")).embedding)  # it says: in tiles
    settled = settle_model(narrow, context=64)
    assert settled.mode == "eager"
    assert "loop: the native loop wants heads whose width is a multiple of 16" in settled.why_not[-1]
    with pytest.raises(HardwareCannot, match="mode 'loop' cannot run here: the native loop wants heads"):
        settle_model(narrow, "loop", context=64)


def test_what_it_lacks_is_named() -> None:
    for kind in ("kv", "recurrent", "hybrid"):
        assert why_not_blocks(random_model(kind).shape) is None
    assert "multiple of 16" in str(why_not_blocks(random_model("kv", hidden=32).shape))


def test_dense_weights_are_a_reason() -> None:
    model = random_model("kv")
    assert "dense" in str(why_not_model(model)["loop"])
    assert why_not_model(tiled(model))["loop"] is None


# Beside others


def test_a_cancelled_sequence_ends_within_one_step() -> None:
    with closing(open_loop(context=8192, n_pages=600)) as driver:
        generation = driver.admit(0, PROMPT, most=8000)
        driver.begin()
        while driver.word(Word.STEPS) < 20:
            time.sleep(0.001)
        with held(driver.runner):  # at a step boundary, which has said that another step follows
            before = driver.word(Word.STEPS)
            driver.runner.host.cancel(0, generation)
        driver.wait()
        assert driver.entries[-1].finish is Finish.CANCELLED
        assert driver.word(Word.STEPS) - before <= 1


@pytest.mark.slow
def test_a_chunk_beside_a_running_loop_has_its_turn_at_a_boundary() -> None:
    with closing(open_loop(context=8192, n_pages=1200, n_slots=10)) as driver:
        driver.admit(0, PROMPT, most=6000)
        driver.begin()
        while driver.word(Word.STEPS) == 0:
            time.sleep(0.001)
        seen = []
        for slot in range(1, 10):
            driver.admit(slot, [slot] * 200, most=8)
            seen.append(driver.word(Word.STEPS))
        # The loop's turn goes to the next prompt where the system does not run its thread for 20 ms, so not all differ.
        assert len(set(seen)) >= 5, f"the loop made no step between most prompts: {seen}"
        assert seen[-1] < 5900, "prompts waited for the end of the loop"
        driver.wait()
        assert len(driver.entries) == 6000 + 9 * 8


@pytest.mark.slow
def test_no_thread_spins_while_there_is_no_work() -> None:
    with closing(open_loop()) as driver:
        driver.admit(0, PROMPT, most=30)
        driver.run()
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.05


def test_the_loop_sets_the_wake_event_at_its_step_boundaries_and_no_other_thread_does() -> None:
    with closing(open_loop()) as driver:
        driver.admit(0, PROMPT, most=60)
        wake = driver.runner.changed
        assert isinstance(driver.runner.start, NativeLoop)
        driver.runner.start.beside(lambda: None).result(DEADLINE_S)  # behind the prompt, whose end rings too
        with held(driver.runner):
            driver.begin()
            wake.clear()
            assert not wake.wait(0.05)
        assert wake.wait(DEADLINE_S)
        driver.wait()
        wake.clear()
        assert not wake.wait(0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no thread was killed: it is done as Linux does it")
def test_a_thread_that_is_killed_while_it_plays_is_told_of_and_leaves_no_stuck_team() -> None:
    with closing(open_loop(context=8192, n_pages=600)) as driver:
        driver.admit(0, PROMPT, most=8000)
        driver.begin()
        start = driver.runner.start
        assert isinstance(start, NativeLoop)
        while driver.word(Word.STEPS) < 20:
            time.sleep(0.001)
        player = start._loop_device._thread.ident
        assert player is not None
        ctypes.CDLL(None).pthread_cancel(ctypes.c_ulong(player))  # it dies at its next step boundary
        assert start.wait(DEADLINE_S)
        assert not start.running
        assert "killed" in str(start.failure())
        before = driver.word(Word.STEPS)
        others = [threading.Thread(target=start._native.step, daemon=True) for _ in range(2)]
        for other in others:
            other.start()
        for other in others:
            other.join(DEADLINE_S)
        assert driver.word(Word.STEPS) == before + 2, "the team is stuck"


@pytest.mark.soak
@pytest.mark.slow
def test_random_admissions_and_cancels_lose_nothing() -> None:
    """Every sequence gets all its tokens, or as many as came before its cancellation, and one end."""
    chance = random.Random(5)
    model = tiled(random_model("kv"))
    expected: dict[tuple[int, ...], list[int]] = {}
    prompts = [[chance.randrange(128) for _ in range(chance.randrange(1, 24))] for _ in range(12)]
    for prompt in prompts:
        with closing(open_loop(model=model)) as alone:
            generation = alone.admit(0, prompt, most=20)
            alone.run()
            expected[tuple(prompt)] = alone.tokens(generation)
    with closing(open_loop(model=model, n_slots=16, n_pages=16 * 4)) as driver:
        driver.runner.decode_mode.enter()
        asked: dict[int, tuple[list[int], int, bool]] = {}
        admissions: dict[int, int] = {}
        n_asked, goal = 0, soak(10_000)
        deadline = time.monotonic() + 600
        heard = 0
        while n_asked < goal or admissions:
            assert time.monotonic() < deadline, "a sequence was lost"
            free = [slot for slot in range(16) if slot not in admissions]
            if n_asked < goal and free:
                slot, prompt, most = chance.choice(free), chance.choice(prompts), chance.randrange(1, 21)
                generation = driver.admit(slot, prompt, most=most, pages=range(slot * 4, slot * 4 + 4))
                doomed = chance.random() < 0.4
                asked[generation], admissions[slot] = (prompt, most, doomed), generation
                n_asked += 1
                if doomed:
                    driver.runner.host.cancel(slot, generation)
            if not driver.runner.start.running and (driver.word(Word.LIVE) or not driver.runner.host.all_taken):
                driver.runner.decode_mode.trigger()
            driver.entries += driver.runner.host.drain(1 << 20)
            for entry in driver.entries[heard:]:
                if entry.finish is not Finish.NONE:
                    assert admissions.pop(entry.slot) == entry.generation
            heard = len(driver.entries)
        driver.runner.start.wait(DEADLINE_S)
        for generation, (prompt, most, doomed) in asked.items():
            tokens, whole = driver.tokens(generation), expected[tuple(prompt)][:most]
            assert tokens == whole or (doomed and tokens == whole[: len(tokens)])


@pytest.mark.slow
def test_64_slots_of_every_sampling_decode_as_the_twin_does() -> None:
    model = random_model("kv")
    ways = [
        Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0),
        Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.0, repetition_penalty=1.1, seed=11),
        Sampling(temperature=1.2, top_k=0, top_p=1.0, min_p=0.05, repetition_penalty=1.0, seed=5, logprobs=3),
        Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.3, seed=0, logit_bias={7: 4.0}),
    ]
    entries = []
    for mode in ("loop", "twin"):
        with closing(open_loop(model=model, mode=mode, n_slots=64, n_pages=256)) as driver:
            for slot in range(64):
                driver.admit(slot, [slot, 2 * slot % 128], most=6, sampling=ways[slot % 4])
            driver.run()
            entries.append(sorted((e.generation, e.position, e.token, e.finish) for e in driver.entries))
    assert entries[0] == entries[1]
