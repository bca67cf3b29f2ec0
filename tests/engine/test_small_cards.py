"""Cards of 6 to 24 GB: what fits there, told before a weight is read. No GPU is asked: a machine is a record."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ostinato.backends.base import Settled
from ostinato.backends.machine import Chip, Machine
from ostinato.backends.tape.backend import matrices_of
from ostinato.backends.tape.sizes import TapeSizes
from ostinato.engine.choose import LoadCase, decide, fit
from ostinato.engine.quantisations import QUANTISATIONS
from ostinato.errors import ContextTooLarge, HardwareCannot
from ostinato.lab.random_weights import RandomFile
from ostinato.models.header import HeaderTensors
from ostinato.models.named_shapes import SHAPES
from ostinato.options import LoadOptions

GB = 10**9
HOPPER = Chip((9, 0), 132, 227 << 10)  # the chip on which `auto` takes the persistent kernel, with less memory
LLAMA_8B = SHAPES["llama-8b"]
LLAMA_70B = replace(LLAMA_8B, hidden=8192, layers=LLAMA_8B.layers[:1] * 80)
LLAMA_70B = LLAMA_70B.with_attention(n_heads=64).with_layers(ff_width=28_672)
SIZES = {"1B": SHAPES["llama-1b"], "8B": LLAMA_8B, "70B": LLAMA_70B}


@cache
def header(size: str, kind: str) -> HeaderTensors:
    return RandomFile(SIZES[size], kind).tensors


class Fitted:
    """A model of that size and type on a card with so much memory: the record, or the refusal."""

    def __init__(self, size: str, kind: str, card_gb: float, **words: Any) -> None:
        host_bytes = words.pop("host_bytes", 64 * GB)
        machine = Machine("cuda:0", int(card_gb * GB), host_bytes, HOPPER, 13_000)
        self.case = LoadCase(SIZES[size], header(size, kind), LoadOptions(**words), machine)
        self.said: list[str] = []
        self.refused: str | None = None
        self.settled: Settled | None = None
        try:
            self.settled = fit(decide(self.case), self.case, self.said.append)
        except (HardwareCannot, ContextTooLarge) as error:
            self.refused = str(error)

    @property
    def record(self) -> Settled:
        assert self.settled is not None, self.refused
        return self.settled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "kind", "card_gb"),
    [
        ("1B", "q4_k_m", 6),
        ("1B", "bf16", 6),
        ("1B", "q8_0", 8),
        ("8B", "q4_k_m", 6),
        ("8B", "q4_k_m", 12),
        ("8B", "q8_0", 16),
        ("8B", "bf16", 24),
        ("70B", "q4_k_m", 24),
    ],
)
def test_what_is_settled_fits_and_what_is_told_to_fit_does(size: str, kind: str, card_gb: int) -> None:
    found = Fitted(size, kind, card_gb)
    if found.settled is None:
        assert found.refused is not None
        return
    plan = found.case.plan(found.record)
    assert plan.fits
    for n_slots, context in plan.fitting:
        # What is told can be asked for, and then every slot has pages for all of its context.
        words = {"slots": n_slots, "context": context, "mode": found.record.mode, "prompts": found.record.prompts}
        asked = Fitted(size, kind, card_gb, **words)
        assert asked.record.n_pages == n_slots * asked.record.max_pages
        if context < SIZES[size].context:
            longer = Fitted(size, kind, card_gb, **{**words, "context": context + 256})
            assert longer.settled is None or longer.record.n_pages < n_slots * longer.record.max_pages
    slots = [n_slots for n_slots, _ in plan.fitting]
    contexts = [context for _, context in plan.fitting]
    assert slots == sorted(slots, reverse=True)
    assert contexts == sorted(set(contexts))


@pytest.mark.parametrize(
    ("size", "kind", "card_gb", "advised"),
    [
        ("1B", "bf16", 2.6, "Q8_0"),
        ("8B", "bf16", 12, "Q8_0"),
        ("8B", "bf16", 8, "Q5_K_M"),
        ("8B", "q8_0", 8, "Q5_K_M"),
        ("8B", "bf16", 6, None),
        ("8B", "q4_k_m", 4, None),
        ("70B", "q8_0", 24, None),
        ("70B", "bf16", 52, "Q4_K_M"),
    ],
)
def test_a_model_that_does_not_fit_is_told_which_quantisation_would(
    size: str, kind: str, card_gb: float, advised: str | None
) -> None:
    found = Fitted(size, kind, card_gb)
    assert found.refused is not None
    if advised is None:
        assert "a smaller model: not even Q4_0 of this one would fit" in found.refused
        return
    assert f"take this model as {advised} (about " in found.refused
    # The next larger one does not fit, by the header of such a file where one can be made.
    if advised in ("Q8_0", "Q4_K_M"):
        assert Fitted(size, advised.lower(), card_gb, context=4096, slots=1).record.context == 4096


@pytest.mark.parametrize(("size", "kind"), [("1B", "q4_k_m"), ("8B", "q4_k_m"), ("70B", "q4_k_m"), ("8B", "q8_0")])
def test_sizes_by_arithmetic_are_those_of_files_within_three_parts_in_a_hundred(size: str, kind: str) -> None:
    one = next(one for one in QUANTISATIONS if one.name.lower() == kind)
    expected = sum(tensor.n_bytes for tensor in header(size, kind).values())
    assert one.n_bytes(SIZES[size], header(size, "bf16")) == pytest.approx(expected, rel=0.03)


def test_weights_that_are_dequantised_whatever_the_file_has_get_no_such_advice() -> None:
    refused = Fitted("8B", "q4_k_m", 12, dtype="bfloat16").refused
    assert refused is not None
    assert refused.endswith("take a smaller model")


def test_auto_has_prompts_read_the_tape_where_two_copies_do_not_fit_and_keeps_one() -> None:
    twice, once, none = (Fitted("8B", "q4_k_m", card_gb) for card_gb in (40, 16, 8))
    assert (twice.record.mode, twice.record.prompts, twice.record.fallback) == ("persistent", "plain", "loop")
    # No plain copy, so there is nothing that a lower mode could read.
    assert (once.record.mode, once.record.prompts, once.record.fallback) == ("persistent", "tape", None)
    assert once.said[0].startswith("prompts read the persistent kernel's tape of")
    plan = once.case.plan(once.record)
    assert plan.bytes_of("weights", "tape") < 1.5 * sum(tensor.n_bytes for tensor in once.case.tensors.values())
    assert (none.record.mode, none.record.prompts) == ("loop", "plain")
    assert none.record.why_not[0].startswith("persistent: its tape and a context do not fit")


def test_a_lower_mode_runs_where_the_tape_was_not_to_be_read_or_the_host_cannot_hold_the_weights() -> None:
    asked = Fitted("8B", "q4_k_m", 16, prompts="plain")
    little = Fitted("8B", "q4_k_m", 16, host_bytes=2 * GB)
    assert (asked.record.mode, little.record.mode) == ("loop", "loop")
    long = Fitted("8B", "q4_k_m", 16, context=60_000)  # asked for, so it is not lowered for the tape's sake
    assert (long.record.mode, long.record.context) == ("loop", 60_000)


def test_a_card_that_another_process_fills_is_told_what_is_free_and_what_is_needed() -> None:
    machine = Machine("cuda:1", 3 * GB, 64 * GB, HOPPER, 13_000, total_bytes=24 * GB)
    case = LoadCase(LLAMA_8B, header("8B", "q4_k_m"), LoadOptions(), machine)
    words = (
        r"need 4\.6 GiB packed and cuda:1 has 2\.5 GiB to give \(19\.6 GiB of its 22\.4 GiB are in use: `nvidia-smi`"
    )
    with pytest.raises(HardwareCannot, match=words):
        fit(decide(case), case, lambda _: None)
    free = replace(case, machine=replace(machine, total_bytes=3 * GB + (300 << 20)))
    with pytest.raises(HardwareCannot, match="to give; take"):  # what every process takes is not told
        fit(decide(free), free, lambda _: None)


@pytest.mark.parametrize("n_multiprocessors", [14, 16, 32, 60, 132])
def test_a_slice_of_a_card_gets_a_block_for_each_multiprocessor_that_it_reports(n_multiprocessors: int) -> None:
    """A MIG slice, of which the persistent kernel's blocks must all be there at once."""
    chip = replace(HOPPER, n_multiprocessors=n_multiprocessors)
    matrices = matrices_of(SIZES["1B"], header("1B", "bf16"), packed=True)
    sizes = TapeSizes.of(SIZES["1B"], matrices, 8, chip, kv_type="bf16", page_tokens=64, max_pages=64)
    assert sizes.grid.n_blocks == n_multiprocessors
    assert chip.attention_programs == 4 * n_multiprocessors
