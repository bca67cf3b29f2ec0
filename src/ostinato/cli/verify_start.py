"""A short comparison with the reference before a server opens its port (E-28), in a process that ends then.

`ostinato serve` runs it as a child: the memory of the comparison is free again, and a fault of the device ends this
process alone. It reads the server's options from standard input and writes its result as JSON. On a GPU the result is
kept in the file of `ostinato verify`, so that the next start of the same card, driver and version need not repeat it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ostinato.cli.bare import Bare, opened_bare
from ostinato.cli.output import talk
from ostinato.engine import verified
from ostinato.engine.checks import Check, VerifyReport
from ostinato.engine.known_cards import NOT_RUN, PERSISTENT_KINDS, is_card_that_ran, kind_of_kernel
from ostinato.engine.request import check_generates
from ostinato.errors import OstinatoError
from ostinato.extras import why_missing
from ostinato.options import LoadOptions
from ostinato.processes import python_command
from ostinato.text.of_checkpoint import tokenizer_of

if TYPE_CHECKING:
    from ostinato.backends.base import Settled
    from ostinato.engine.verified import VerifiedCard
    from ostinato.serve.settings import ServeOptions

COMMAND: Final = tuple(python_command("-m", "ostinato.cli.verify_start"))


class Started(NamedTuple):
    """What the comparison found: a sentence to say, and how a server that must not start exits (0: it starts)."""

    said: str
    exit_code: int


def verified_start(options: ServeOptions, verify: bool | None) -> Started:
    """Compare the first model's mode with the reference in another process: always or, if `verify` is None, on a GPU
    on which this mode has not passed for the model's family."""
    given = {"verify": verify, "model": options.model, "load": json.loads(options.to_json())["load"]}
    # In a session of its own: Ctrl-C in the terminal reaches this process, which ends that one.
    ran = subprocess.run(COMMAND, input=json.dumps(given).encode(), stdout=subprocess.PIPE, start_new_session=True)
    if ran.returncode:
        raise OstinatoError(
            f"the process that compares {options.model} with the reference ended with {ran.returncode}; "
            "`ostinato verify` says more, and --no-verify starts without it"
        )
    return Started(*json.loads(ran.stdout))


def main() -> None:
    given: dict[str, Any] = json.loads(sys.stdin.read())
    try:
        found = compare(given["model"], LoadOptions(**given["load"]), always=bool(given["verify"]))
    except OstinatoError as error:
        found = Started(f"error: {error}", error.exit_code)
    sys.stdout.write(json.dumps(found))


def compare(model: str, load: LoadOptions, *, always: bool) -> Started:
    """The mode that this model would run in, beside the reference."""
    with opened_bare(model, replace(load, prompts="plain")) as bare:
        settled = bare.settled
        card = card_of(settled, kind_of_kernel(bare.shape, settled.kv_type))
        if not always and (not bare.shape.causal or card is None or has_passed(settled, card)):
            return Started("", 0)
        check_generates(bare.shape)
        talk(f"comparing {settled.mode} with the reference before the port opens (--no-verify starts without)")
        report = short_report(bare)
        if card is not None:
            verified.keep(card, report, bare.checkpoint.path.name, talk, modes=verified.RECORDED)
    wrong = next((check for check in report.checks if check.difference is not None), None)
    if wrong is not None:
        return Started(_refusal(model, wrong), OstinatoError.exit_code)
    against = ", ".join(dict.fromkeys(check.against for check in report.checks))
    return Started(f"{settled.mode} agrees with {against}", 0)


def card_of(settled: Settled, kind: str) -> VerifiedCard | None:
    from ostinato.engine.machine import verified_card

    return verified_card(settled.device, kind) if settled.kind == "cuda" else None


def has_passed(settled: Settled, card: VerifiedCard) -> bool:
    """Whether this mode passed for this kind of kernel: on such a card here, or on the card of the releases' tests."""
    if card.kind in verified.verified_kinds(card, talk).get(settled.mode, ()):
        return True
    major, minor = card.capability.split(".")
    if not is_card_that_ran((int(major), int(minor)), card.name):
        return False
    needs = settled.mode in verified.NEED_VERIFICATION
    return card.kind in PERSISTENT_KINDS if needs else card.kind.partition(" ")[0] not in NOT_RUN


def short_report(bare: Bare) -> VerifyReport:
    """On a GPU one token beside torch's twins, and the mode beside `eager`. On the CPU the native loop beside `eager`
    over the same tiles or, where torch is not installed, beside the plainest object of it."""
    from ostinato.engine.verify_native import NativeVerifier

    settled, n_tokens, loaded = bare.settled, tokenizer_of(bare.checkpoint).vocab_size, bare.load()
    tiles = settled.weights == "tiles"
    if tiles and why_missing("torch", "the reference backend") is not None:
        return NativeVerifier(loaded, settled, n_tokens).verify_level()
    from ostinato.engine.verify import Verifier

    how: dict[str, Any] = {"activations": settled.activations, "threads": settled.threads}
    verifier = Verifier(loaded, settled.kv_type, n_tokens, **how)
    checks = [] if tiles else [verifier.beside_twins(bare.load("cpu"))]
    if settled.mode != "eager":
        checks.append(verifier.compare(settled.mode))
    return VerifyReport(tuple(checks), {})


def _refusal(model: str, wrong: Check) -> str:
    difference = "" if wrong.difference is None else wrong.difference.text
    return (
        f"error: {wrong.name} of {model} differs from {wrong.against} at {difference}; the server does not start: "
        "`ostinato verify` compares everything, `--mode eager` runs the reference's way, and --no-verify starts anyway"
    )


if __name__ == "__main__":
    main()
