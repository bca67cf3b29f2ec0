"""`ostinato verify`: whether the modes agree on this machine, and where they first differ.

Exits with 0 if all agree, 3 if something differs, 4 if this machine cannot run the model.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ostinato.cli import flags
from ostinato.cli.bare import opened_bare
from ostinato.cli.flags import Flag
from ostinato.cli.output import InstallHints, detail, talk, write_columns, write_json, write_line
from ostinato.errors import OstinatoError
from ostinato.extras import why_missing
from ostinato.files.store import DEFAULT
from ostinato.options import MODES, LoadOptions

if TYPE_CHECKING:
    from ostinato.engine.checks import Check, VerifyReport


@flags.verb
def verify(
    *,
    model: flags.ModelAnywhere = DEFAULT,
    load: flags.ToMeasure,
    mode: Annotated[
        str,
        Flag("Compare this mode alone; auto compares all.", "MODE", autocompletion=flags.among("auto", *MODES)),
    ] = "auto",
    as_json: flags.Json = False,
) -> None:
    """Compare the modes that can run here, buffer by buffer, and the weights with the file.

    A few sequences go through every mode. Modes that share kernels must agree to the bit; one with arithmetic of its
    own, such as the CPU's native loop, in its greedy tokens and within a tolerance. That loop must also agree to the
    bit with its plainest code, with other numbers of threads and slots, and with prompts cut otherwise.
    """
    # Plain prompts: `eager`, which the others are compared with, reads nothing else.
    report, facts = _verified(model, replace(load, mode=mode, prompts="plain"))
    if as_json:
        write_json({**facts, **_record(report)})
    else:
        _show(report, facts)
    if not report.passed:
        raise typer.Exit(OstinatoError.exit_code)


def _verified(model: str, options: LoadOptions) -> tuple[VerifyReport, dict[str, Any]]:
    """Load the model as an engine would, run every check, and keep a GPU's result for `auto`."""
    from ostinato.engine import verified
    from ostinato.engine.checks import VerifyReport
    from ostinato.engine.known_cards import kind_of_kernel
    from ostinato.engine.machine import verified_card
    from ostinato.engine.verify_native import NativeVerifier
    from ostinato.text.of_checkpoint import tokenizer_of

    with opened_bare(model, options) as bare:
        settled, n_tokens, loaded = bare.settled, tokenizer_of(bare.checkpoint).vocab_size, bare.load()
        report, tiles = VerifyReport((), {}), settled.weights == "tiles"
        kind = kind_of_kernel(bare.shape, settled.kv_type)
        card = verified_card(settled.device, kind) if settled.kind == "cuda" else None
        if card is not None:
            verified.forget(card, {options.mode} & set(verified.NEED_VERIFICATION), talk)
        if tiles:
            report += NativeVerifier(loaded, settled, n_tokens).verify(bare.load, detail)
        if (no_torch := why_missing("torch", "the reference backend")) is not None:
            report += VerifyReport((), {"eager": no_torch})
        else:
            from ostinato.engine.verify import Verifier

            modes = None if options.mode == "auto" else (options.mode,)
            how: dict[str, Any] = {"activations": settled.activations, "threads": settled.threads, "modes": modes}
            verifier = Verifier(loaded, settled.kv_type, n_tokens, **how)
            dense = (lambda: bare.load("cpu", dense=True)) if tiles else None
            again = None if tiles else (lambda: bare.load("cpu"))
            report += verifier.verify(again, detail, dense=dense)
        name = bare.checkpoint.path.name
        kept = () if card is None else verified.keep(card, report, name, talk, modes=verified.RECORDED)
    return report, {
        "model": model,
        "path": str(bare.checkpoint.path),
        "device": settled.device,
        "dtype": settled.dtype,
        "kv_type": settled.kv_type,
        "activations": settled.activations if tiles else None,
        "kept_for_auto": [mode for mode in kept if mode in verified.NEED_VERIFICATION],
    }


def _record(report: VerifyReport) -> dict[str, Any]:
    return {
        "passed": report.passed,
        "checks": [_check_record(check) for check in report.checks],
        "not_run": dict(report.not_run),
    }


def _check_record(check: Check) -> dict[str, Any]:
    found = check.difference
    return {
        "check": check.name,
        "against": check.against,
        "comparison": check.comparison,
        "passed": check.passed,
        "compared": check.n_compared,
        "seconds": round(check.seconds, 3),
        "figures": {name: _finite(value) for name, value in check.figures.items()},
        "difference": None if found is None else {**asdict(found), "text": found.text},
    }


def _finite(value: float) -> float | None:
    """JSON knows no infinity and no nan."""
    return value if abs(value) < float("inf") else None


def _show(report: VerifyReport, facts: dict[str, Any]) -> None:
    activations = "" if facts["activations"] is None else f", activations {facts['activations']}"
    write_line(f"{facts['model']} on {facts['device']}, {facts['dtype']}{activations}, KV {facts['kv_type']}")
    rows: list[tuple[str, ...]] = [("check", "against", "how", "result")]
    for check in report.checks:
        how = "to the bit" if check.comparison == "bits" else f"within {check.figures.get('tolerance', 0):g}"
        rows.append((check.name, check.against, how, _result(check)))
    hints = InstallHints()
    rows += [(mode, "", "", f"cannot run here: {hints.cell(reason)}") for mode, reason in report.not_run.items()]
    write_columns(rows)
    for hint in hints.lines:
        write_line(f"to install {hint}")
    for mode in facts["kept_for_auto"]:
        write_line(f"{mode} is verified for this card, driver, version and family: auto may take it")
    write_line("all agree" if report.passed else "NOT the same: the first difference of each check is above")


def _result(check: Check) -> str:
    if check.difference is not None:
        return f"DIFFERS at {check.difference.text}"
    if check.comparison == "bits":
        return f"same, {check.n_compared} compared"
    figures = check.figures
    if "cosine" not in figures:  # after a tie two answers diverge
        return f"same tokens up to a tie, {check.n_compared} compared"
    return f"near, cosine {figures['cosine']:.6f}, relative error {figures['relative']:.2g}"
