"""Where the microseconds of a step of the tape go: a timeline from the marks that the kernel writes.

Every block records when it begins each phase of its last step, by the clock that the whole chip shares. The time
between two marks of a block is the first one's phase: its products, and its waits for others. The spread of a phase is
how far apart blocks begin it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import median
from typing import Final

from ostinato.backends.base import PAGE_TOKENS
from ostinato.backends.machine import kind_of
from ostinato.backends.tape.program import CLOCKED_A_LAYER
from ostinato.backends.tape.start import TapeLoop
from ostinato.engine.choose import settle_model, why_not_model
from ostinato.engine.driver import LoopDriver
from ostinato.engine.open import open_runner
from ostinato.errors import HardwareCannot, InternalError
from ostinato.models.blocks import LoadedModel
from ostinato.options import KVType

OF_A_LAYER: Final = ("norm, q k v", "attention", "output", "norm, gate and up", "down")
AT_THE_END: Final = ("norm, head", "choose")
PHASES: Final = (*OF_A_LAYER, *AT_THE_END)
COLOURS: Final = ("#2a9d62", "#a1499c", "#6fb98f", "#2f6fde", "#8fb2ee", "#d9731a", "#c0392b")
WIDTH, LANE, STRIP, LEFT, TOP = 1000, 22, 16, 70, 56  # a strip below each lane is for the whiskers
SHOWN_LAYERS: Final = 8  # of the first; those that follow look alike, and their sums are in the table


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase of a layer, or of the step's end (layer None), over all blocks; microseconds from the step's beginning.

    It runs from the median block's beginning to its beginning of what follows; `us` is how long the median block took.
    """

    phase: str
    layer: int | None
    earliest_us: float
    begin_us: float
    latest_us: float
    end_us: float
    us: float

    @property
    def spread_us(self) -> float:
        """Between the first block that began it and the last."""
        return self.latest_us - self.earliest_us


@dataclass(frozen=True, slots=True)
class Share:
    """A phase in the whole step: how long it takes the median block in all layers together, and its median spread."""

    us: float
    spread_us: float


def spans(marks: Sequence[Sequence[int]]) -> list[PhaseSpan]:
    """The marks of every block in nanoseconds, as `tape.cu` orders them, to spans.

    >>> one = [0, 5000, 9000, 11000, 26000, 36000, 90000, 95000]
    >>> other = [mark + 2000 for mark in one]
    >>> [(span.phase, span.us, span.spread_us) for span in spans([one, other])][-2:]
    [('norm, head', 54.0, 2.0), ('choose', 5.0, 2.0)]
    """
    lengths = {len(own) for own in marks}
    n_layers, rest = divmod(min(lengths, default=0) - len(AT_THE_END) - 1, CLOCKED_A_LAYER)
    if n_layers < 1 or rest or len(lengths) != 1:
        raise InternalError(f"{sorted(lengths)} marks of a block are not those of whole layers, a head and a choice")
    zero = min(own[0] for own in marks)
    places: list[tuple[str, int | None]] = [(phase, layer) for layer in range(n_layers) for phase in OF_A_LAYER]
    places += [(phase, None) for phase in AT_THE_END]
    every = [[(mark - zero) / 1e3 for mark in at] for at in zip(*marks, strict=True)]  # by mark, then by block
    return [
        PhaseSpan(
            phase,
            layer,
            earliest_us=min(begins),
            begin_us=median(begins),
            latest_us=max(begins),
            end_us=median(ends),
            us=median(end - begin for begin, end in zip(begins, ends, strict=True)),
        )
        for (phase, layer), (begins, ends) in zip(places, pairwise(every), strict=True)
    ]


def step_us(found: Sequence[PhaseSpan]) -> float:
    """The whole step without its step boundary, for the median block."""
    return found[-1].end_us - found[0].begin_us


def by_phase(found: Sequence[PhaseSpan]) -> dict[str, Share]:
    """Each phase in the whole step."""
    own = {phase: [span for span in found if span.phase == phase] for phase in PHASES}
    return {
        phase: Share(sum(span.us for span in some), median(span.spread_us for span in some))
        for phase, some in own.items()
    }


def timeline(found: Sequence[PhaseSpan], title: str) -> str:
    """The step as a picture: a lane for each of the first layers, and one, on a scale of its own, for its end. A bar
    begins where the median block does; the thin line below reaches from the first block that begins to the last."""
    layers = [[span for span in found if span.layer == layer] for layer in range(SHOWN_LAYERS)]
    lanes = [*filter(None, layers), [span for span in found if span.layer is None]]
    scales = [_scale(lanes[:-1])] * (len(lanes) - 1) + [_scale(lanes[-1:])]
    parts = [f'<text x="{LEFT}" y="20" class="head">{escape(title)}</text>', *_legend()]
    for row, (lane, scale) in enumerate(zip(lanes, scales, strict=True)):
        y = TOP + row * (LANE + STRIP)
        name = "end" if lane[0].layer is None else f"layer {lane[0].layer}"
        parts.append(f'<text x="8" y="{y + 15}">{name}</text>')
        for span in lane:
            parts += _drawn(span, lane[0].earliest_us, scale, y)
    height = TOP + len(lanes) * (LANE + STRIP) + 16
    style = "svg{background:#fff}text{font:12px system-ui,sans-serif;fill:#1d2430}.head{font-weight:600}"
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="a step of the tape in time"><style>{style}</style>\n{inside}\n</svg>\n'
    )


def recorded(model: LoadedModel, *, n_prompt: int, n_gen: int, kv_type: KVType) -> list[list[int]]:
    """Decode on the tape, and read each block's marks of the last step; HardwareCannot where it cannot run."""
    reason = why_not_model(model)["persistent"]
    if reason is not None:
        raise HardwareCannot(f"the tape cannot run here: {reason}")
    context = n_prompt + n_gen + 2
    n_pages = 2 * -(-context // PAGE_TOKENS[kind_of(str(model.device))])
    settled = settle_model(model, "persistent", context=context, n_pages=n_pages, kv_type=kv_type)
    with closing(LoopDriver(open_runner(model, settled))) as driver:
        start = driver.runner.start
        assert isinstance(start, TapeLoop)
        start.note_times()
        driver.admit(0, [number % model.shape.vocab for number in range(1, n_prompt + 1)], most=n_gen)
        driver.run()
        return [[int(mark) for mark in own] for own in driver.runner.plan.buffer("clock").tensor.tolist()]


def _scale(lanes: Sequence[Sequence[PhaseSpan]]) -> float:
    """Pixels of a microsecond, so that the longest of these lanes fills the width."""
    longest = max(max(lane[-1].end_us, lane[-1].latest_us) - lane[0].earliest_us for lane in lanes) or 1.0
    return (WIDTH - LEFT - 20) / longest


def _legend() -> Iterator[str]:
    x = LEFT
    for phase, colour in zip(PHASES, COLOURS, strict=True):
        yield f'<rect x="{x}" y="30" width="10" height="10" fill="{colour}"/><text x="{x + 15}" y="39">{phase}</text>'
        x += 36 + 7 * len(phase)
    yield f'<text x="{x}" y="39">us; the end has its own scale</text>'


def _drawn(span: PhaseSpan, zero_us: float, scale: float, y: float) -> Iterator[str]:
    """A bar, and its whisker in the strip below the lane; neighbours take turns, for whiskers may overlap."""
    number = PHASES.index(span.phase)
    earliest, begin, latest, end = (
        LEFT + (us - zero_us) * scale for us in (span.earliest_us, span.begin_us, span.latest_us, span.end_us)
    )
    words = f"{span.phase}: {span.us:.1f} us; blocks begin within {span.spread_us:.1f} us"
    yield (
        f'<rect x="{begin:.1f}" y="{y}" width="{max(end - begin, 0.5):.1f}" height="{LANE}" fill="{COLOURS[number]}">'
        f"<title>{escape(words)}</title></rect>"
    )
    if end - begin > 40:
        yield f'<text x="{begin + 4:.1f}" y="{y + 15}" style="fill:#fff">{span.us:.1f}</text>'
    at = y + LANE + (4 if number % 2 == 0 else 9)
    line = f"M{earliest:.1f} {at - 2}v4m0 -2H{latest:.1f}m0 -2v4M{begin:.1f} {at - 3}v6"
    yield f'<path d="{line}" fill="none" stroke="{COLOURS[number]}"><title>{escape(words)}</title></path>'
