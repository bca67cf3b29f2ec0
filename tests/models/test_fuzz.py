"""Settings of every family, changed at random in both formats: a model opens, or is refused in one sentence."""

from __future__ import annotations

import copy
import random
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from ostinato.backends.machine import Machine
from ostinato.engine.choose import LoadCase, decide, fit
from ostinato.errors import InternalError, OstinatoError
from ostinato.files.checkpoint import Checkpoint, open_checkpoint
from ostinato.models.header import tensors_of
from ostinato.models.registry import describe, read_shape
from ostinato.models.rope import frequencies_of
from ostinato.options import LoadOptions
from tests.counts import soak
from tests.models import tiny

HUGE: Final = 10**400  # JSON knows it; no float does
MACHINE: Final = Machine("cpu", 8 << 30, 8 << 30)
WRONG: Final[tuple[Any, ...]] = (
    None, -1, 0, 1, 3, 7, 10**6, 2**31 - 1, 2**31, 2**40, 2**63, HUGE, -HUGE, 0.5, -0.5, 1e-300, 1e300, float("nan"),
    float("inf"), float("-inf"), True, False, "", "four", "full_attention", [], [0], [1, 2], [-1], [HUGE],
    [float("nan")], ["x"], [None], [[1]], {}, {"a": 1}, {"rope_type": "yarn", "factor": 0.0},
    {"full_attention": 3}, {"rope_theta": HUGE},
)  # fmt: skip


def places(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every setting, and those inside of settings; the vocabulary is another test's."""
    for key, value in values.items():
        if not key.startswith("tokenizer."):
            yield (*above, key)
            if isinstance(value, Mapping):
                yield from places(value, (*above, key))


# What GGUF has a type for
IN_GGUF: Final = tuple(
    value for value in WRONG if value is not None and not isinstance(value, dict) and "None" not in str(value)
    and str(HUGE) not in str(value) and value != [[1]]
)  # fmt: skip


def changed(values: Mapping[str, Any], wrong: Sequence[Any], chance: random.Random) -> tuple[dict[str, Any], str]:
    """The settings after one or two changes, and what was changed."""
    made, said = copy.deepcopy(dict(values)), []
    for _ in range(chance.choice((1, 1, 1, 2))):
        place = chance.choice(sorted(places(made)))
        inside = made
        for key in place[:-1]:
            inside = inside[key]
        old, key = inside[place[-1]], place[-1]
        value = copy.deepcopy(chance.choice(wrong))
        if isinstance(old, (list, np.ndarray)) and len(old) and chance.random() < 0.5:
            listed = list(old)
            at = chance.randrange(len(listed))
            value = chance.choice([listed[:at], listed * 2, [*listed[:at], value, *listed[at + 1 :]]])
        elif type(old) in (int, float) and abs(old) < 1e300 and chance.random() < 0.4:
            value = chance.choice([old + 1, old - 1, old * 2, old * 1000, -old, float(old), str(old), [old]])
        if chance.random() < 0.15:
            del inside[key]
            value = "removed"
        else:
            inside[key] = value
        said.append(f"{'.'.join(place)}: {str(value)[:60]}")
    return made, " and ".join(said)


def opened(checkpoint: Checkpoint) -> None:
    """What is done with a model's header before its weights are read."""
    shape = read_shape(checkpoint)
    describe(checkpoint, shape)
    case = LoadCase(shape, tensors_of(checkpoint), LoadOptions(device="cpu"), MACHINE)
    fit(decide(case), case, lambda _: None)
    for layer in shape.layers:
        if layer.attention is not None and layer.attention.rope is not None:
            frequencies_of(layer.attention.rope)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), tiny.CASES)
def test_changed_settings_open_or_are_refused_in_one_sentence(name: str, form: str, tiny_files: Path) -> None:
    chance = random.Random(f"{name} {form}")
    checkpoint = open_checkpoint(tiny.written(name, form, tiny_files))
    stated, wrong = dict(checkpoint.metadata), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(soak(2000, part=100)):
        checkpoint.metadata, what = changed(stated, IN_GGUF if form == "gguf" else WRONG, chance)
        try:
            opened(checkpoint)
        except InternalError as error:
            wrong.append(f"{what}: {error!r}")
        except OstinatoError as error:
            if ("\n" in str(error) and "is not known" not in str(error)) or len(str(error)) > 3000:
                wrong.append(f"{what}: {error}")
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}"[:300])
    checkpoint.close()
    assert wrong == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "a GiB was taken"
