"""Checks that the modes agree on this machine: each runs the same sequences, and buffers are compared one by one.

Modes that share kernels must agree to the bit. A mode with arithmetic of its own (`Start.comparison`), such as the
CPU's native loop, must agree in its greedy tokens, except for ties, and in its logits within a tolerance. Other checks
compare the device's weights with the file, and one token with the slow torch twins. Nothing here prints; the first
difference of each check is a record with the names of its node and buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, zip_longest
from typing import Any, Final

import numpy as np

from ostinato.backends.base import PAGE_TOKENS, Settled
from ostinato.backends.compare import Difference
from ostinato.backends.machine import kind_of
from ostinato.backends.native.tiles import TileMatrix
from ostinato.backends.runner import Runner
from ostinato.backends.torch import compare
from ostinato.backends.torch.compare import RouteJudge, first_difference
from ostinato.backends.torch.model import Model
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.decoder import Decoder
from ostinato.engine.checks import (
    N_LOGPROBS,
    N_SLOTS,
    N_TOKENS,
    Case,
    Check,
    Compared,
    Comparison,
    VerifyReport,
    cases_of,
    survived,
    timed,
    unequal,
    unequal_entries,
)
from ostinato.engine.choose import modes_of, settle_model, why_not_model
from ostinato.engine.driver import LoopDriver
from ostinato.engine.open import open_runner
from ostinato.errors import HardwareCannot, InternalError
from ostinato.files.unpack import Floats
from ostinato.loop.host import OutEntry
from ostinato.loop.layout import Word
from ostinato.loop.memory import memory_in
from ostinato.loop.plan import Plan
from ostinato.models.blocks import LoadedModel
from ostinato.options import Activations, KVType

BASE: Final = "eager"  # the mode that the others are compared with
# Allowed relative distance of logits from two orders of summation, by the model's dtype.
TOLERANCE: Final = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
# The same between dense weights and tiles, wide or not, whose products round their activations.
OF_ROUNDED: Final = {True: 5e-3, False: 2e-1}
LEAST_COSINE: Final = 0.99
# Fields that differ between two equal runs: the time and the executable.
_OF_THE_RUN: Final = frozenset({"epoch", "step_ns"})
_BY_SAMPLER: Final = frozenset({"chosen", "chosen_logprob", "top_ids", "top_logprobs"})
_WORDS: Final = (Word.STEPS, Word.LIVE, Word.GO, Word.WHY, Word.ENDS, Word.INBOX_TAIL, Word.OUTBOX_HEAD)


@dataclass(frozen=True, slots=True)
class Verifier:
    """One model and how its loops are opened. `open` opens a loop; a test may pass one that opens a broken loop."""

    model: LoadedModel
    kv_type: KVType
    n_tokens: int  # ids that the tokenizer knows
    open: Callable[[LoadedModel, Settled], Runner] = open_runner
    activations: Activations = "wide"  # for weights in tiles
    threads: int | None = None  # of the native loop
    modes: tuple[str, ...] | None = None  # compared with `eager`; None: every mode that can run

    def verify(
        self,
        again: Callable[[], LoadedModel] | None,
        tell: Callable[[str], None] = lambda _: None,
        *,
        dense: Callable[[], LoadedModel] | None = None,
    ) -> VerifyReport:
        """Run every check that is possible here. `again` loads the same model once more, on the CPU, from its source,
        where its weights are to be compared; `dense` loads it with plain weights for the twins, where that is
        packed."""
        found = why_not_model(self.model)
        reasons = {mode: found[mode] for mode in (BASE, *(self.modes or modes_of(kind_of(str(self.model.device)))))}
        if reasons[BASE] is not None:
            raise HardwareCannot(f"mode {BASE}, with which the others are compared, cannot run here: {reasons[BASE]}")
        for mode in self.modes or ():
            if reasons[mode] is not None:
                raise HardwareCannot(f"mode {mode!r} cannot run here: {reasons[mode]}")
        modes = [mode for mode, reason in reasons.items() if reason is None and mode != BASE]
        checks = []
        fresh = None
        if again is not None:
            tell("making the model once more, on the CPU")
            fresh = again()
            checks.append(timed("weights", "the file", "bits", partial(self.same_weights, fresh)))
        if dense is not None:
            fresh = dense()
        if fresh is not None:
            assert isinstance(fresh, Model)
            tell("one token through the twins")
            checks.append(self.beside_twins(fresh))
            del fresh
        before = compare.checksums(self.model)
        for mode in modes:
            tell(f"{mode} beside {BASE}")
            checks.append(self.compare(mode))
        checks.append(timed("weights", "before the runs", "bits", lambda: same_checksums(self.model, before)))
        return VerifyReport(tuple(checks), {mode: reason for mode, reason in reasons.items() if reason is not None})

    def same_weights(self, fresh: LoadedModel) -> Compared:
        return Compared(*compare.compare_weights(self.model, fresh))

    # One token against the twins (E-28)

    def beside_twins(self, fresh: LoadedModel) -> Check:
        """`eager` beside the slow twins over another copy of the weights, for one token."""
        assert isinstance(fresh, Model)
        return timed(BASE, "the twins", "tolerance", partial(self.near_twins, fresh))

    def near_twins(self, fresh: Model) -> Compared:
        """The first step of `eager` against the decoder's own flow over another copy of the weights.

        Where kernels chose experts, the twins use the same experts, and check that their own scores allow them.
        """
        case = self.cases()[0]
        with closing(self._opened(BASE)) as driver:
            routes: list[Any] = []  # of kernels that chose experts: of the first prompt, and of a step
            chosen = getattr(driver.runner.chunks, "routes", None)

            def keep_routes() -> None:
                if chosen is not None and not routes:
                    routes.append(compare.chosen_experts(chosen, len(case.prompt)))

            self._admit(driver, on_admitted=keep_routes)
            driver.step()
            driver.step()
            first = next(entry for entry in driver.entries if entry.slot == case.slot)
            found = compare.host_row(_buffer(driver.runner, "logits"))
            if routes:
                routes.append(compare.chosen_experts(_buffer(driver.runner, "experts"), 1))
        assert first.token is not None
        tolerance = tolerance_of(self.model)
        if isinstance(self.model.embedding, TileMatrix) and not isinstance(fresh.embedding, TileMatrix):
            tolerance = OF_ROUNDED[self.model.embedding.wide]
        judge = RouteJudge.of(routes, tolerance) if routes else None
        twins = fresh if judge is None else judge.routed(fresh)
        n_ctx = len(case.prompt) + case.most - 1  # all its positions, from which its rope set follows
        expected = twin_logits(twins, [*case.prompt, first.token], self.kv_type, n_ctx)
        apart = abs(first.logprob - _log_softmax(expected[0])[first.token])
        figures = {**_nearness(found, expected[1]), "prefill_logprob": apart, "tolerance": tolerance}
        if judge is not None:
            figures |= judge.figures
            if judge.difference is not None:
                return Compared(2, judge.difference, figures)
        if not apart <= 10 * tolerance:  # log-probabilities are of the order of 10
            wanted = f"within {10 * tolerance:g} of the twins'"
            return Compared(2, Difference("prefill", "logprob", (first.token,), wanted, f"{apart:.3g} off"), figures)
        return Compared(2, _too_far(figures, tolerance, "head"), figures)

    # Mode against mode

    def compare(self, mode: str) -> Check:
        """Compare a mode with `eager` over these weights: step by step where the host paces, else at the end."""
        started = time.perf_counter()
        with self._both(mode) as (base, other):
            comparison = other.runner.start.comparison
            found = survived(lambda: self._beside(base, other, comparison))
        if comparison == "bits" and found.n_compared and found.difference is not None and found.difference.step is None:
            found = self._earliest(mode, found)
        return found.check(mode, BASE, comparison, started)

    def _beside(self, base: LoopDriver, other: LoopDriver, comparison: Comparison) -> Compared:
        if comparison == "tolerance":
            return self._near(base, other)
        stale = _other_plan(base.runner.plan, other.runner.plan)
        if stale is not None:
            return Compared(0, stale)
        same = self._same_at_end if other.runner.start.device_paced else self._same_at_every_step
        return same(base, other)

    def _same_at_every_step(self, base: LoopDriver, other: LoopDriver) -> Compared:
        """Equal to the bit, after each step of both."""
        for driver in (base, other):
            self._admit(driver)
        n_compared = 0
        for step in count():  # step 0 only admits
            goes_on = base.step()
            other.step()
            found = compare_state(base, other, step)
            n_compared += found.n_compared
            if found.difference is not None or not goes_on:
                break
        return replace(found, n_compared=n_compared)

    def _same_at_end(self, base: LoopDriver, other: LoopDriver, n_steps: int = N_TOKENS) -> Compared:
        """Equal to the bit after the device has run at most this many steps by itself."""
        for driver in (base, other):
            self._admit(driver, most=n_steps + 1)
        other.run()
        while base.step():
            pass
        return compare_state(base, other, None)

    def _earliest(self, mode: str, found: Compared) -> Compared:
        """The difference in the shortest run that has one: after the first difference everything else differs too."""
        for n_steps in range(1, N_TOKENS):
            with self._both(mode) as (base, other):
                shorter = self._same_at_end(base, other, n_steps)
            if shorter.difference is not None:
                return replace(found, difference=replace(shorter.difference, step=n_steps))
        return found

    @contextmanager
    def _both(self, mode: str) -> Iterator[tuple[LoopDriver, LoopDriver]]:
        with closing(self._opened(BASE)) as base, closing(self._opened(mode)) as other:
            yield base, other

    def _near(self, base: LoopDriver, other: LoopDriver) -> Compared:
        """Equal greedy tokens, and logits of the last step that are near enough.

        Where two tokens are equally likely within the tolerance, either may be chosen: the answer is compared up to
        that tie, and the tie is counted. Logits are compared if all answers are equal to their ends.
        """
        for driver in (base, other):
            self._admit(driver, logprobs=N_LOGPROBS)  # they show ties
            driver.run()
        tolerance = tolerance_of(self.model)
        n_compared, ties = 0, 0
        for slot in sorted(case.slot for case in self.cases() if case.sampling.temperature == 0):
            expected, found = ([e for e in driver.entries if e.slot == slot] for driver in (base, other))
            for one, two in zip(expected, found, strict=False):
                n_compared += 1
                if (one.position, one.token) == (two.position, two.token):
                    continue
                if not _tied(one, two, tolerance):
                    place = (one.slot, one.position)
                    return Compared(n_compared, Difference("sample", "token", place, str(one.token), str(two.token)))
                ties += 1
                break
            else:
                if len(expected) != len(found):
                    return Compared(1, Difference("sample", "tokens", (), str(len(expected)), str(len(found))))
        figures = {"ties": float(ties), "tolerance": tolerance}
        if ties:
            return Compared(n_compared, None, figures)
        wanted, row = (compare.host_row(_buffer(driver.runner, "logits")) for driver in (base, other))
        figures |= _nearness(row, wanted)
        return Compared(1 + n_compared, _too_far(figures, tolerance, "head"), figures)

    # The sequences

    def cases(self) -> list[Case]:
        return cases_of(self.model.shape, self.n_tokens, PAGE_TOKENS[kind_of(str(self.model.device))])

    def _opened(self, mode: str) -> LoopDriver:
        cases = self.cases()
        longest = max(len(case.prompt) + case.most for case in cases)
        page = PAGE_TOKENS[kind_of(str(self.model.device))]
        n_pages = sum(-(-(len(case.prompt) + case.most) // page) for case in cases)
        settled = settle_model(
            self.model,
            mode,
            context=longest,
            n_pages=n_pages,
            n_slots=N_SLOTS,
            kv_type=self.kv_type,
            n_tokens=self.n_tokens,
            activations=self.activations,
            threads=self.threads,
        )
        return LoopDriver(self.open(self.model, settled))

    def _admit(
        self,
        driver: LoopDriver,
        *,
        most: int = N_TOKENS,
        logprobs: int | None = None,
        on_admitted: Callable[[], object] = lambda: None,
    ) -> None:
        """Admit every case for at most so many tokens, after zeroing all buffers that nodes write, since a step may not
        write all of their elements; `on_admitted` is called after each admission."""
        written = {name for node in driver.runner.plan.nodes for name in node.writes} - {"table"}
        compare.zero((driver.runner.plan.buffer(name) for name in written), driver.runner.guard)
        driver.synchronize()
        for case in self.cases():
            sampling = case.sampling if logprobs is None else replace(case.sampling, logprobs=logprobs)
            driver.admit(case.slot, case.prompt, most=min(case.most, most), sampling=sampling)
            driver.synchronize()
            on_admitted()


def tolerance_of(model: LoadedModel) -> float:
    """How far logits may be apart, by the precision to which products round their input rows. With packed weights a
    GPU rounds them to bfloat16; with tiles the CPU rounds them to about 15 bits, or to 8."""
    if isinstance(model.embedding, TileMatrix):
        return TOLERANCE["float32" if model.embedding.wide else "bfloat16"]
    packed = any(str(memory.dtype) == "torch.uint8" for _, memory in memory_in(model, ""))
    return TOLERANCE["bfloat16" if packed else str(model.dtype).removeprefix("torch.")]


def _tied(one: OutEntry, two: OutEntry, tolerance: float) -> bool:
    """Whether two entries for one position hold equally likely tokens, within the tolerance, by the first entry."""
    told = dict(one.top)
    if one.position != two.position or two.token not in told:
        return False
    return max(told.values()) - told[two.token] <= 10 * tolerance  # log-probabilities are of the order of 10


def same_checksums(model: LoadedModel, before: Mapping[str, int]) -> Compared:
    """Check that the weights have not changed since `before`."""
    for name, now in compare.checksums(model).items():
        if now != before[name]:
            return Compared(len(before), Difference("a step", name, (), "as it was loaded", "changed"))
    return Compared(len(before))


# State


def compare_state(base: LoopDriver, other: LoopDriver, step: int | None) -> Compared:
    """Compare what the nodes wrote, in the order of the plan; then table, control words and outbox entries."""
    n = 0
    for n, (node, name, expected, found) in enumerate(_pairs(base.runner, other.runner), start=1):
        difference = first_difference(node, name, expected, found)
        if difference is not None:
            return Compared(n, replace(difference, step=step))
    difference = _compare_words(base, other) or unequal_entries(base.entries, other.entries)
    return Compared(n + 2, None if difference is None else replace(difference, step=step))


def _pairs(base: Runner, other: Runner) -> Iterator[tuple[str, str, Any, Any]]:
    """(node, name, expected, found) for every buffer that a step writes, with the node that wrote it last."""
    last = {name: node.name for node in base.plan.nodes for name in node.writes}
    for node in base.plan.nodes:
        for name in node.writes:
            # A kernel's scratch memory is in any order: only its results are compared.
            if last[name] == node.name and name != "table" and ".workspace" not in name:
                expected, found = _buffer(base, name), _buffer(other, name)
                if ".state." in name:  # compare slots only: padding rows write in any order
                    expected, found = expected[: base.settled.n_slots], found[: base.settled.n_slots]
                yield node.name, name, expected, found
    # The sampler's fields come before those that the step boundary derives from them.
    for name in sorted(base.tables.table.names, key=lambda name: name not in _BY_SAMPLER):
        if name not in _OF_THE_RUN:
            writer = last.get("table", "sample") if name in _BY_SAMPLER else "step boundary"
            expected, found = (runner.tables.table[name] for runner in (base, other))
            yield writer, f"table.{name}", expected, found


def _buffer(runner: Runner, name: str) -> Any:
    """A buffer of the plan: an array of the type that the backend uses."""
    return runner.plan.buffer(name).tensor


def _compare_words(base: LoopDriver, other: LoopDriver) -> Difference | None:
    one, two = base.runner.host, other.runner.host
    words = ((f"words.{word.name.lower()}", (), one.word(word), two.word(word)) for word in _WORDS)
    return unequal("step boundary", words)


def _other_plan(base: Plan, other: Plan) -> Difference | None:
    """The first line in which two plans differ."""
    lines = zip_longest(base.text.splitlines(), other.text.splitlines(), fillvalue="nothing")
    return unequal("plan", (("line", (number,), *pair) for number, pair in enumerate(lines)))


# Tolerance


def twin_logits(model: Model, ids: Sequence[int], kv_type: KVType, n_ctx: int) -> Floats:
    """Float32 logits [2, vocab] after all ids but the last, and after all, by the decoder over the model's blocks."""
    n = max(len(ids), 2)
    decoder = Decoder(model, n_ctx=max(n, n_ctx), n_batch=n, n_ubatch=n, kv_type=kv_type)
    decoder.decode(Batch(token=ids, output=[int(i >= len(ids) - 2) for i in range(len(ids))]))
    rows = decoder.outputs.all_logits().value
    if rows is None:
        raise InternalError("the twins gave no logits")
    found: Floats = rows.numpy()
    return found


def _log_softmax(logits: Floats) -> Any:
    above = logits.astype(np.float64) - logits.max()
    return above - np.log(np.exp(above).sum())


def _nearness(found: Floats, expected: Floats) -> dict[str, float]:
    """The cosine, and the length of the difference relative to that of the expected vector."""
    one, two = found.astype(np.float64), expected.astype(np.float64)
    length = np.linalg.norm(two)
    with np.errstate(invalid="ignore", divide="ignore"):  # zeros and NaNs are too far
        cosine = float(one @ two / (np.linalg.norm(one) * length))
        return {"cosine": cosine, "relative": float(np.linalg.norm(one - two) / length)}


def _too_far(figures: Mapping[str, float], tolerance: float, node: str) -> Difference | None:
    cosine, relative = figures["cosine"], figures["relative"]
    if cosine >= LEAST_COSINE and relative <= tolerance:  # false for NaN
        return None
    wanted = f"cosine at least {LEAST_COSINE} and relative error at most {tolerance:g}"
    return Difference(node, "logits", (), wanted, f"cosine {cosine:.6f}, relative error {relative:.3g}")
