"""The laboratory's pictures, as SVG drawn here, so that a report needs nothing else: speed-up over the length of a
kernel, and the engine's own step in each mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 44, 56
COLOURS: Final = ("#8a8f98", "#2f6fde", "#d9731a", "#2a9d62", "#a1499c", "#c0392b")
Point = tuple[float, float]


def speedup_picture(result: Mapping[str, Any]) -> str:
    """Every start's speed-up over the baseline, measured (dots) and predicted (dashes), by the length of a kernel."""
    rows = sorted(_one_kind(result["rows"]), key=lambda row: row["body_us"])
    starts = list(rows[0]["starts"]) if rows else []
    measured = {s: [(row["body_us"], row["starts"][s]["speedup"]) for row in rows] for s in starts}
    predicted = {s: [(row["body_us"], row["starts"][s]["predicted_speedup"]) for row in rows] for s in starts}
    points = [point for line in (*measured.values(), *predicted.values()) for point in line]
    if not points:
        return _svg('<text x="20" y="40">nothing was measured</text>')
    scale = _Scale.over(points)
    parts = [_frame(scale, "one kernel by itself, microseconds", "speed-up over launching one by one")]
    for number, start in enumerate(starts):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(_line(scale, predicted[start], colour, dashed=True))
        parts.append(_line(scale, measured[start], colour, dashed=False))
        parts += [
            _dot(scale, point, colour, f"{start}: {point[1]:.2f} at {point[0]:.2f} us") for point in measured[start]
        ]
        parts.append(_legend(number, start, colour))
    ends = {
        s: at for s, at in result["stops_paying_us"].items() if at is not None and scale.low_x <= at <= scale.high_x
    }
    for start, at in ends.items():
        parts.append(
            _mark(scale, at, COLOURS[starts.index(start) % len(COLOURS)] if start in starts else "#888", start)
        )
    parts.append(_legend(len(starts) + 1, "dashed: predicted", "currentColor"))
    if ends:
        parts.append(_legend(len(starts) + 2, "upright: stops paying", "currentColor"))
    return _svg("\n".join(parts))


def decode_picture(rows: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Tokens per second of each mode as bars, from zero on, with the launches that the host makes for each token where
    they were counted."""
    longest = max((row["tokens_s"] for row in rows), default=1.0)
    left, bar, gap = 110, 24, 14
    full = WIDTH - left - RIGHT
    parts = [f'<text x="{left}" y="22">{escape(title or "tokens per second, one request")}</text>']
    for number, row in enumerate(rows):
        y, length = TOP + number * (bar + gap), full * row["tokens_s"] / longest
        launches = row.get("launches_per_token")
        counted = "" if launches is None else f", {launches:.3g} launches a token"
        parts += [
            f'<text x="{left - 10}" y="{y + 17}" text-anchor="end">{escape(row["mode"])}</text>',
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{bar}" fill="{COLOURS[number % len(COLOURS)]}"/>',
            f'<text x="{left + length + 8:.1f}" y="{y + 17}">{row["tokens_s"]:,.0f}{counted}</text>',
        ]
    return _svg("\n".join(parts), TOP + len(rows) * (bar + gap), "tokens per second in each mode")


def _one_kind(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Rows that differ in the length of a kernel alone, the largest such group: others make no line."""
    kinds: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        kind = tuple(row[key] for key in ("kernels", "blocks", "threads", "body"))
        kinds.setdefault(kind, {})[row["n"]] = row
    return list(max(kinds.values(), key=len, default={}).values())


class _Scale:
    """Both axes are logarithmic."""

    def __init__(self, low_x: float, high_x: float, low_y: float, high_y: float) -> None:
        self.low_x, self.high_x, self.low_y, self.high_y = low_x, high_x, low_y, high_y

    @staticmethod
    def over(points: Sequence[Point]) -> _Scale:
        xs, ys = [max(1e-3, x) for x, _ in points], [max(1e-3, y) for _, y in points]
        return _Scale(min(xs) / 1.3, max(xs) * 1.3, min(0.8, min(ys) / 1.1), max(2.0, max(ys) * 1.15))

    def x(self, value: float) -> float:
        return LEFT + _share(value, self.low_x, self.high_x) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - _share(value, self.low_y, self.high_y) * (HEIGHT - TOP - BOTTOM)


def _share(value: float, low: float, high: float) -> float:
    return (math.log(max(value, 1e-9)) - math.log(low)) / (math.log(high) - math.log(low))


def ticks(low: float, high: float) -> list[float]:
    """Round numbers within a logarithmic axis: 1, 2 and 5 of every power of ten, fewer where there are many.

    >>> ticks(0.8, 12)
    [1.0, 2.0, 5.0, 10.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    return found if len(found) <= 9 else [value for value in found if f"{value:.0e}".startswith("1")]


def _frame(scale: _Scale, x_label: str, y_label: str) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}" class="frame"/>']
    for value in ticks(scale.low_x, scale.high_x):
        at = scale.x(value)
        parts.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}" class="grid"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    for value in ticks(scale.low_y, scale.high_y):
        at = scale.y(value)
        kind = "one" if value == 1 else "grid"
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" class="{kind}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text x="{LEFT - 44}" y="{TOP - 16}">{escape(y_label)}</text>')
    return "\n".join(parts)


def _line(scale: _Scale, points: Sequence[Point], colour: str, *, dashed: bool) -> str:
    path = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)
    how = 'stroke-dasharray="5 4" opacity="0.7"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" {how}/>'


def _dot(scale: _Scale, point: Point, colour: str, words: str) -> str:
    at = f'cx="{scale.x(point[0]):.1f}" cy="{scale.y(point[1]):.1f}"'
    return f'<circle {at} r="4" fill="{colour}"><title>{escape(words)}</title></circle>'


def _mark(scale: _Scale, value: float, colour: str, start: str) -> str:
    at = scale.x(value)
    words = f"{start} stops paying at {value:.1f} us"
    return (
        f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="{colour}" stroke-width="1.5" '
        f'stroke-dasharray="2 3"><title>{escape(words)}</title></line>'
    )


def _legend(number: int, words: str, colour: str) -> str:
    x, y = WIDTH - RIGHT + 14, TOP + 14 + 20 * number
    bar = f'<rect x="{x}" y="{y - 9}" width="12" height="4" fill="{colour}"/>'
    return f'{bar}<text x="{x + 20}" y="{y - 2}">{escape(words)}</text>'


def _svg(inside: str, height: int = HEIGHT, label: str = "speed-up over the length of a kernel") -> str:
    style = (
        "text{font:13px system-ui,sans-serif;fill:currentColor}.frame{fill:none;stroke:currentColor;opacity:.5}"
        ".grid{stroke:currentColor;opacity:.12}.one{stroke:currentColor;opacity:.6}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{label}"><style>{style}</style>\n{inside}\n</svg>'
    )
