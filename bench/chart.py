"""Draws pictures from the notes in docs/lab/data.

    python -m bench.chart

`docs/speed.svg`: decode speed beside llama.cpp. Each bar is as long as its share of what the memory could give, and
ends with its tokens per second. `docs/lab-decode.svg`: the engine's own step in every mode, as `ostinato lab decode
--plot` draws it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from bench.note import value
from ostinato.lab.picture import decode_picture

OUT: Final = Path(__file__).parents[1] / "docs" / "speed.svg"
DECODE_OUT: Final = OUT.with_name("lab-decode.svg")
DECODE: Final = {
    mode: f"gpu-check.jsonl:4/outcomes/lab-decode-{mode}/facts/tokens_s"
    for mode in ("eager", "graph", "loop", "persistent")
}
LEFT, WIDTH, BAR, GAP = 284, 520, 17, 14  # of the bars, in pixels
LABEL = 90  # a bar that leaves less than this has its label inside


@dataclass(frozen=True, slots=True)
class Figure:
    """One bar: whose it is, its colour, and the address of its figure."""

    name: str
    colour: str
    address: str


@dataclass(frozen=True, slots=True)
class Group:
    """Bars with one limit."""

    name: str
    limit: str
    bars: tuple[Figure, ...]


def gpu(name: str, line: int, model: str) -> Group:
    def series(engine: str, task: str) -> str:
        return f"beside.jsonl:{line}/series/{engine}+{model}, {task}/runs"

    return Group(
        name,
        series("ostinato", "limit"),
        (
            Figure("ostinato, persistent", "ours", series("ostinato", "decode of 1, persistent")),
            Figure("ostinato, loop", "light", series("ostinato", "decode of 1, loop")),
            Figure("llama.cpp", "theirs", series("llama.cpp", "decode of 1")),
        ),
    )


def cpu(task: str) -> Group:
    def series(engine: str) -> str:
        return f"cpu-native.jsonl:2/series/{engine}+{task}/runs"

    return Group(
        "SmolLM2-135M, Q4_1",
        "cpu-native.jsonl:2/series/ostinato wide+read_tok_s/runs",
        (
            Figure("ostinato, int8", "ours", series("ostinato int8")),
            Figure("ostinato, wide", "light", series("ostinato wide")),
            Figure("llama.cpp, Q4_0", "theirs", series("llama.cpp Q4_0")),
            Figure("llama.cpp, same file", "theirs", series("llama.cpp")),
        ),
    )


PANELS: Final = (
    (
        "One NVIDIA H200, one request, 500 positions in memory",
        (
            gpu("1B, bf16", 1, "llama-1b:bf16"),
            gpu("1B, Q4_K_M", 1, "llama-1b:q4_k_m"),
            gpu("8B, bf16", 2, "llama-8b:bf16"),
            gpu("8B, Q4_K_M", 2, "llama-8b:q4_k_m"),
        ),
    ),
    ("Two cores of a CPU, one request", (cpu("decode_tok_s"),)),
)

BELOW: Final = (
    "The limit is the memory's: its measured read speed over the bytes that a step reads.",
    "llama.cpp was compiled on the same machine and ran in the same minutes. Random weights on the GPU.",
)
STYLE: Final = """
  svg { --paper: #ffffff; --ink: #1d2430; --soft: #4a5260; --line: #b6bec9; --ours: #2f6fde; --light: #9dbcf2;
        --theirs: #b9bfc9 }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #161b22; --ink: #e6edf3; --soft: #aab6c3; --line: #47505c; --ours: #74a4ff; --light: #3a5c9c;
          --theirs: #6b7480 }
  }
  text { font: 13px system-ui, sans-serif; fill: var(--ink) }
  .small { font-size: 11.5px; fill: var(--soft) }
  .head { font-weight: 600 }
  .end { text-anchor: end }
  .inside { fill: var(--paper) }
  .ours { fill: var(--ours) } .light { fill: var(--light) } .theirs { fill: var(--theirs) }
  .limit { stroke: var(--soft); stroke-dasharray: 4 3 }
"""


def drawn() -> Iterator[str]:
    y = 18
    for title, groups in PANELS:
        y += 14
        yield f'<text x="20" y="{y}" class="head">{escape(title)}</text>'
        y += 22
        for group in groups:
            limit = value(group.limit)
            top = y - 8
            yield f'<text x="20" y="{y + 5}">{escape(group.name)}</text>'
            for bar in group.bars:
                found = value(bar.address)
                length = WIDTH * found / limit
                yield f'<text x="{LEFT - 8}" y="{y + 5}" class="small end">{escape(bar.name)}</text>'
                size = f'width="{length:.1f}" height="{BAR}"'
                yield f'<rect x="{LEFT}" y="{y - 8}" {size} rx="2" class="{bar.colour}"/>'
                label = f"{found:,.0f} tok/s"
                inside = length > WIDTH - LABEL
                place = f'x="{LEFT + length + (-6 if inside else 6):.1f}" y="{y + 5}"'
                yield f'<text {place} class="small{" end inside" if inside else ""}">{label}</text>'
                y += BAR + 3
            end = LEFT + WIDTH
            yield f'<line x1="{end}" x2="{end}" y1="{top - 2}" y2="{y - 8}" class="limit"/>'
            yield f'<text x="{end + 6}" y="{top + 12}" class="small">limit {limit:,.0f} tok/s</text>'
            y += GAP
    for sentence in BELOW:
        yield f'<text x="20" y="{y + 6}" class="small">{escape(sentence)}</text>'
        y += 17


def picture() -> str:
    body = "\n".join(drawn())
    height = max(int(float(part.split('"')[0])) for part in body.split(' y="')[1:]) + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 930 {height}" role="img" aria-labelledby="title">\n'
        '<title id="title">Decode speed beside llama.cpp, as a share of what the memory could give</title>\n'
        f"<style>{STYLE}</style>\n"
        f'<rect width="930" height="{height}" rx="10" fill="var(--paper)"/>\n{body}\n</svg>\n'
    )


def decode_modes() -> str:
    rows = [{"mode": mode, "tokens_s": value(address)} for mode, address in DECODE.items()]
    title = "Llama-3.2-1B shape, bfloat16, 256 tokens after 512, one request on an H200: tokens per second"
    return decode_picture(rows, title) + "\n"


def main() -> None:
    for path, text in ((OUT, picture()), (DECODE_OUT, decode_modes())):
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
