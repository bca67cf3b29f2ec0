"""Where the microseconds of a step of the tape go: a timeline from the marks that the kernel leaves.

One block notes when it begins each phase of its last step. What lies between two marks is the first one's phase: its
products, and what it waits for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from html import escape
from typing import Final

from ostinato.errors import HardwareCannot, InternalError
from ostinato.loop.by_hand import ByHand
from ostinato.loop.open import Loop, LoopOptions, why_not
from ostinato.loop.tape_plan import CLOCKED_A_LAYER
from ostinato.memory.paged import PAGE_TOKENS
from ostinato.models.blocks import Model
from ostinato.options import KVType

OF_A_LAYER: Final = ("norm, q k v", "attention", "output", "norm, gate and up", "down")
AT_THE_END: Final = ("norm, head", "choose")
COLOURS: Final = ("#2a9d62", "#a1499c", "#6fb98f", "#2f6fde", "#8fb2ee", "#d9731a", "#c0392b")
WIDTH, LANE, LEFT, TOP = 1000, 22, 70, 56
SHOWN_LAYERS: Final = 8  # of the first; those that follow look alike, and their sums are in the table


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of a layer, or of the step's end (layer None), in microseconds from the step's beginning."""

    phase: str
    layer: int | None
    begin_us: float
    us: float


def spans(marks: Sequence[int]) -> list[Span]:
    """Marks in nanoseconds, as `tape.cu` orders them, to spans.

    >>> [(span.phase, span.us) for span in spans([0, 5000, 9000, 11000, 26000, 36000, 90000, 95000])][-2:]
    [('norm, head', 54.0), ('choose', 5.0)]
    """
    n_layers, rest = divmod(len(marks) - len(AT_THE_END) - 1, CLOCKED_A_LAYER)
    if n_layers < 1 or rest:
        raise InternalError(f"{len(marks)} marks are not those of whole layers, a head and a choice")
    places = [(phase, layer) for layer in range(n_layers) for phase in OF_A_LAYER]
    ends = [(phase, None) for phase in AT_THE_END]
    return [
        Span(phase, layer, (begin - marks[0]) / 1e3, (end - begin) / 1e3)
        for (phase, layer), begin, end in zip([*places, *ends], marks[:-1], marks[1:], strict=True)
    ]


def by_phase(found: Sequence[Span]) -> dict[str, float]:
    """Microseconds of the whole step in each phase."""
    return {phase: sum(s.us for s in found if s.phase == phase) for phase in (*OF_A_LAYER, *AT_THE_END)}


def timeline(found: Sequence[Span], title: str) -> str:
    """The step as a picture: a lane for each of the first layers, and one for its end."""
    layers = [layer for layer in range(SHOWN_LAYERS) if any(span.layer == layer for span in found)]
    lanes: list[int | None] = [*layers, None]
    longest = max(sum(span.us for span in found if span.layer == lane) for lane in lanes) or 1.0
    scale = (WIDTH - LEFT - 20) / longest
    parts = [f'<text x="{LEFT}" y="20" class="head">{escape(title)}</text>', _legend()]
    for row, lane in enumerate(lanes):
        own = [span for span in found if span.layer == lane]
        y = TOP + row * (LANE + 6)
        parts.append(f'<text x="8" y="{y + 15}">{"end" if lane is None else f"layer {lane}"}</text>')
        parts += [_bar(span, LEFT + (span.begin_us - own[0].begin_us) * scale, y, span.us * scale) for span in own]
    height = TOP + len(lanes) * (LANE + 6) + 16
    style = "svg{background:#fff}text{font:12px system-ui,sans-serif;fill:#1d2430}.head{font-weight:600}"
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="a step of the tape in time"><style>{style}</style>\n{inside}\n</svg>\n'
    )


def recorded(model: Model, *, n_prompt: int, n_gen: int, kv_type: KVType) -> list[int]:
    """Decode on the tape, and read the marks of the last step; HardwareCannot where it cannot run."""
    reason = why_not("persistent", model)
    if reason is not None:
        raise HardwareCannot(f"the tape cannot run here: {reason}")
    context = n_prompt + n_gen + 2
    n_pages = 2 * -(-context // PAGE_TOKENS[model.device.type])
    options = LoopOptions("persistent", 1, context, n_pages, kv_type, model.shape.vocab)
    with closing(ByHand(Loop(model, options))) as driver:
        driver.seat(0, [number % model.shape.vocab for number in range(1, n_prompt + 1)], most=n_gen)
        driver.run()
        return [int(mark) for mark in driver.loop.plan.buffer("clock").tensor.tolist()]


def _legend() -> str:
    parts = []
    for number, phase in enumerate((*OF_A_LAYER, *AT_THE_END)):
        x = LEFT + number * 128
        parts.append(f'<rect x="{x}" y="30" width="10" height="10" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{x + 15}" y="39">{phase}</text>')
    return "\n".join(parts)


def _bar(span: Span, x: float, y: float, width: float) -> str:
    colour = COLOURS[(*OF_A_LAYER, *AT_THE_END).index(span.phase)]
    words = f"{span.phase}: {span.us:.1f} us"
    label = f'<text x="{x + 4:.1f}" y="{y + 15}" style="fill:#fff">{span.us:.1f}</text>' if width > 40 else ""
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{LANE}" fill="{colour}">'
        f"<title>{escape(words)}</title></rect>{label}"
    )
