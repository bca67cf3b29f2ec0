"""An experiment as one HTML file that opens without network: the machine, the arithmetic, tables and the picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from ostinato.lab.model import LONGEST_US
from ostinato.lab.picture import decode_picture, speedup_picture

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #8885; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; }
code { background: #8882; padding: 0 .25em; border-radius: .2em; }
"""


def report(result: Mapping[str, Any]) -> str:
    """The whole page."""
    machine = result["machine"]
    title = f"Launch overhead on {machine['name']}"
    on_cpu = (
        "<p><strong>This is a CPU.</strong> It launches no kernels: the cost of calling an operation is measured in "
        "their place.</p>"
    )
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(result['date'])}. {_machine(machine)}</p>",
        on_cpu if machine["kind"] == "cpu" else "",
        "<h2>What a start adds</h2>",
        "<p>A step of <code>K</code> kernels, each <code>c</code> long, takes <code>K (c + kernel) + step</code>, or "
        "<code>K submit</code> where the host cannot keep ahead. The part of it that is not the kernels' own time is "
        "<code>f = K t_L / (T_comp + K t_L)</code>.</p>",
        _table(cost_table(result)),
        "<h2>Speed-up over the length of a kernel</h2>",
        speedup_picture(result),
        "<h2>Measured beside predicted</h2>",
        _table(_measured_rows(result)),
        "<h2>Overhead of the baseline</h2>",
        _table(_overhead_rows(result)),
    ]
    # Results that were kept by an earlier version have none.
    if result.get("acceptance"):
        parts += ["<h2>What was asked</h2>", _table(acceptance_table(result["acceptance"]))]
    if result["decode"]:
        drawn = decode_picture(result["decode"])
        parts += ["<h2>The engine's own step</h2>", drawn, _table(decode_table(result["decode"]))]
    if result["why_not"]:
        refused = (f"<li>{escape(f'{start}: {why}')}</li>" for start, why in result["why_not"].items())
        parts += ["<h2>What did not run</h2>", f"<ul>{''.join(refused)}</ul>"]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _machine(machine: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in machine.items() if key not in ("kind", "name")}
    words = (
        f"{key.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{key.replace('_', ' ')} {value}"
        for key, value in shown.items()
    )
    return escape(", ".join(words))


def cost_table(result: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """What each start adds, and up to which length of a kernel it pays; headings first."""
    yield "start", "kernel, us", "step, us", "submit a kernel, us", "pays up to, us"
    for start, cost in result["costs"].items():
        pays = result["stops_paying_us"].get(start)
        words = "never" if pays is None else "any" if pays >= LONGEST_US else f"{pays:.1f}"
        if start not in result["stops_paying_us"]:
            words = "the baseline"
        yield start, f"{cost['kernel_us']:.2f}", f"{cost['step_us']:.2f}", f"{cost['submit_kernel_us']:.2f}", words


def _measured_rows(result: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield "work", "kernel alone, us", "start", "us a step", "tokens/s", "speed-up", "predicted", "max_abs_err"
    for row in result["rows"]:
        for start, found in row["starts"].items():
            yield (
                named(row), f"{row['body_us']:.2f}", start, f"{found['us_per_step']:.2f}", f"{found['tokens_s']:,.0f}",
                f"{found['speedup']:.2f}", f"{found['predicted_speedup']:.2f}", f"{found['max_abs_err']:.1e}",
            )  # fmt: skip


def _overhead_rows(result: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    yield "work", "predicted", "measured", "off by"
    for row in result["rows"]:
        predicted, measured = row["overhead_predicted"], row["overhead_measured"]
        off = f"{predicted / measured - 1:+.0%}" if measured > 0 else "-"
        yield named(row), f"{predicted:.1%}", f"{measured:.1%}", off


def acceptance_table(rows: Iterable[Mapping[str, Any]]) -> Iterable[Sequence[str]]:
    """The laboratory's own acceptance figures, met or not and why; headings first."""
    yield "asked", "", "found"
    for row in rows:
        yield row["asked"], "met" if row["is_met"] else "NOT MET", row["says"]


def decode_table(rows: Iterable[Mapping[str, Any]]) -> Iterable[Sequence[str]]:
    """The engine's own step in each mode; headings first."""
    yield "model", "mode", "first token, ms", "tokens/s", "launches per token", "host, us per token"
    for row in rows:
        yield (
            row["model"], row["mode"], f"{row['first_token_ms']:.1f}", f"{row['tokens_s']:,.1f}",
            f"{row['launches_per_token']:.3f}", f"{row['host_us_per_token']:.1f}",
        )  # fmt: skip


def named(row: Mapping[str, Any]) -> str:
    """A work in few words."""
    return f"{row['body']} n={row['n']} steps={row['steps']} K={row['kernels']} {row['blocks']}x{row['threads']}"


def _table(table: Iterable[Sequence[str]]) -> str:
    headings, *rows = table
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
