"""Coordinator as the decoder uses it: bounded windows, one coordinator for each kind, pending updates, saved states."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ostinato.cache.window import Window
from ostinato.decoder.batch.batch import Batch
from ostinato.decoder.cells.decoder import Decoder
from ostinato.decoder.cells.memory.coordinator import Coordinator
from ostinato.decoder.cells.memory.kv_cache import KVCache
from ostinato.decoder.cells.memory.recurrent import RecurrentMemory
from ostinato.errors import AllocationFailed, ComputeFailed, DecodeError, InternalError, InvalidBatch, NoSlot
from tests.decoder.cells.oracle import Row
from tests.decoder.cells.rig import KINDS, N_VOCAB, Kind, Rig, Strike, assert_close, nth, small_decoder
from tests.models import plain_memory
from tests.random_model import random_model

every_kind = pytest.mark.parametrize("kind", KINDS)
ROOT = Path(__file__).parents[3]


def text(n: int, seed: int = 0) -> list[int]:
    return [(7 * k * k + 3 * seed + k) % N_VOCAB for k in range(n)]


# Windows


def test_memory_of_windowed_layers_is_bounded_by_the_window_however_long_the_context() -> None:  # SW-5, SW-6
    model = random_model("swa", n_vocab=N_VOCAB, hidden=32)
    window = model.shape.attention[0].window
    assert window is not None
    decoder = Decoder(model, n_ctx=2048, n_ubatch=64)
    tokens = text(900)
    decoder.decode(Batch(token=tokens))
    assert_close(decoder.logits(-1), plain_memory.logits(model, tokens)[-1], "the last token")
    full, windowed = decoder.parts.full, decoder.parts.windowed
    assert full is not None
    assert windowed is not None
    assert list(windowed[1].keys) == [0]
    assert list(full[1].keys) == [1]
    assert windowed[1].keys[0].values.shape[:2] == (1, 256)
    assert full[1].keys[1].values.shape[:2] == (1, 2048)
    assert full[0].streams[0].cells.used == 900
    assert windowed[0].streams[0].cells.used <= 256
    first = decoder.memory.pos_min(0)
    assert first is not None
    assert 0 < first <= 900 - window


def test_the_bytes_of_windowed_layers_do_not_grow_with_the_context() -> None:
    model = random_model("swa", n_vocab=N_VOCAB, hidden=32)
    taken = {}
    for n_ctx in (1024, 4096):
        decoder = Decoder(model, n_ctx=n_ctx, n_ubatch=64)
        stores = [part[1] for part in (decoder.parts.full, decoder.parts.windowed) if part is not None]
        taken[n_ctx] = [sum(part.nbytes for half in store.halves for part in half.parts) for store in stores]
    assert taken[4096][0] == 4 * taken[1024][0]
    assert taken[4096][1] == taken[1024][1]


# Coordinators


Told = dict[str, Any]
OWN: dict[Kind, Told] = {
    "kv": {"logits": "right", "shared": True, "middle": True, "pos_min": 0, "endless": False, "shifts": True},
    "swa": {
        "logits": "right",
        "shared": True,
        "middle": True,
        "pos_min": "a window",
        "endless": False,
        "shifts": False,
    },
    "recurrent": {"logits": "right", "shared": False, "middle": False, "pos_min": 29, "endless": True, "shifts": True},
    "hybrid": {"logits": "right", "shared": True, "middle": False, "pos_min": 29, "endless": False, "shifts": True},
}


def coordinators(decoder: Decoder) -> dict[Kind, Coordinator]:
    """One of each kind over the parts that a decoder has; parts that it lacks are integers only."""
    parts, cells = decoder.parts, decoder.settings.capacity
    full = parts.full[0] if parts.full else KVCache(cells, n_seq_max=3, unified=True)
    windowed = (
        parts.windowed[0] if parts.windowed else KVCache(16, n_seq_max=3, unified=True, window=Window("standard", 6))
    )
    recurrent = parts.recurrent[0] if parts.recurrent else RecurrentMemory(3)
    return {
        "kv": Coordinator(full),
        "swa": Coordinator(full, windowed),
        "recurrent": Coordinator(recurrent=recurrent),
        "hybrid": Coordinator(full, recurrent=recurrent),
    }


def coordinated(kind: Kind, by: Kind) -> Decoder:
    """A decoder of one kind whose coordinator is another's."""
    decoder = small_decoder(kind, cells=40, n_seq_max=3)
    decoder._parts = replace(decoder.parts, memory=coordinators(decoder)[by])
    return decoder


def told(kind: Kind, by: Kind) -> Told:
    """What a caller finds out about a decoder's memory."""
    decoder = coordinated(kind, by)
    try:
        logits = right_logits(decoder)
        shared = takes_shared(coordinated(kind, by))
        first = decoder.memory.pos_min(0)
        window = first is not None and 0 < first < 29
        middle, shifts = decoder.memory.seq_rm(0, 26, 27), decoder.memory.can_shift
        found = {"logits": logits, "shared": shared, "middle": middle, "pos_min": "a window" if window else first}
        return {**found, "shifts": shifts, "endless": takes(decoder, Batch(token=text(20)))}
    except (DecodeError, InternalError) as failure:
        return {"logits": str(failure)}


def right_logits(decoder: Decoder) -> str:
    texts = {0: text(30), 1: text(3, 1)}
    for s, tokens in texts.items():
        decoder.decode(Batch(token=tokens, seq_id=[[s]] * len(tokens)))
        plain = plain_memory.logits(decoder.model, tokens)[-1]
        found = decoder.logits(-1)
        assert found is not None
        if (found - plain).abs().max() > 1e-4:
            return "wrong"
    return "right"


def takes_shared(decoder: Decoder) -> bool:
    """Whether two sequences can share a token, and each then goes on with one of its own."""
    return takes(decoder, Batch(token=[1, 2, 3], seq_id=[[0, 1], [0], [1]]))


def takes(decoder: Decoder, batch: Batch) -> bool:
    try:
        decoder.decode(batch)
    except (InvalidBatch, NoSlot):
        return False
    return True


@pytest.mark.parametrize("kind", OWN)
def test_each_kind_of_model_has_the_memory_of_its_kind(kind: Kind) -> None:
    assert told(kind, kind) == OWN[kind]
    own = small_decoder(kind, cells=40)
    assert type(own.memory) is type(coordinators(own)[kind])


@pytest.mark.parametrize(("kind", "other"), list(permutations(OWN, 2)))
def test_no_coordinator_can_stand_in_for_another(kind: Kind, other: Kind) -> None:
    assert told(kind, other) != OWN[kind]


# Pending updates


def shifted(kind: Kind) -> Rig:
    """A sequence whose keys still have to turn."""
    rig = Rig.of(kind, (0, 1, 2), cells=40, n_ubatch=16)
    rows = [Row(token, position, (0,)) for position, token in enumerate(text(6))]
    rig.decoder.decode(Batch(token=[row.token for row in rows]))
    rig.oracle.decode(rows)
    rig.decoder.memory.seq_rm(0, 0, 2)
    rig.oracle.remove(0, 0, 2)
    rig.decoder.memory.seq_add(0, None, None, -2)
    rig.oracle.shift(0, None, None, -2)
    return rig


def next_is_right(rig: Rig, s: int = 0) -> None:
    rig.decoder.decode(Batch(token=[5], seq_id=[[s]]))
    at = rig.oracle.next_position(s)
    assert at is not None
    (entry,) = rig.oracle.decode([Row(5, at, (s,))])
    assert_close(rig.decoder.logits(0), rig.oracle.truth.logits(entry), "the next token")
    rig.check_tensors()


@pytest.mark.parametrize("kind", ["kv", "kv-streams"])
@pytest.mark.parametrize(
    ("error", "failure"), [(Strike("the rotation failed"), ComputeFailed), (MemoryError("no memory"), AllocationFailed)]
)
def test_a_shift_that_fails_stays_pending_and_the_decode_fails_with_its_class(
    kind: Kind, error: Exception, failure: type[DecodeError]
) -> None:  # UP-5
    rig = shifted(kind)
    cache = rig.decoder.parts.full
    assert cache is not None
    with patch("ostinato.backends.torch.kv_store.rope_torch", side_effect=error), pytest.raises(failure):
        rig.decoder.decode(Batch(token=[5]))
    assert cache[0].has_shift
    rig.check()
    next_is_right(rig)
    assert not cache[0].has_shift


def test_a_shift_that_is_stopped_stays_pending() -> None:  # UP-5
    rig = shifted("kv")
    with pytest.raises(DecodeError) as stopped:
        rig.decoder.decode(Batch(token=[5]), abort=lambda: True)
    assert stopped.value.code == 2
    rig.check()
    next_is_right(rig)


def test_a_copy_of_a_stream_that_fails_stays_pending() -> None:  # UP-3, UP-5
    rig = shifted("kv-streams")
    rig.decoder.memory.seq_cp(0, 1)
    rig.oracle.copy(0, 1, None, None)
    full = rig.decoder.parts.full
    assert full is not None
    with patch.object(full[1], "copy_stream", side_effect=Strike("copying failed")), pytest.raises(ComputeFailed):
        rig.decoder.decode(Batch(token=[5]))
    assert full[0].pending_copies == [(0, 1)]
    next_is_right(rig)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "hybrid-streams"])
def test_states_that_cannot_be_written_leave_the_sequence_as_it_was(kind: Kind) -> None:  # RM-19, G-4
    rig = Rig.of(kind, (0, 1, 2), n_ubatch=2)
    rows = [Row(token, position, (0,)) for position, token in enumerate(text(6))]
    states = rig.decoder.parts.recurrent
    assert states is not None
    commit, left = states[1].commit, iter([True, False])

    def second_fails(*args: Any) -> None:
        if not next(left):
            raise MemoryError("no memory for the states")
        commit(*args)

    with patch.object(states[1], "commit", second_fails), pytest.raises(DecodeError):
        rig.decoder.decode(Batch(token=[row.token for row in rows]))
    rig.oracle.decode(rows[:2])
    rig.check_tensors()
    next_is_right(rig)


def test_states_that_are_written_in_part_leave_every_sequence_as_it_was() -> None:  # RM-19
    rig = Rig.of("hybrid", (0, 1, 2))
    for s in (0, 1, 2):
        rig.decoder.decode(Batch(token=[s + 1], seq_id=[[s]]))
        rig.oracle.decode([Row(s + 1, 0, (s,))])
    states = rig.decoder.parts.recurrent
    assert states is not None
    commit, clone = states[1].commit, torch.Tensor.clone

    def second_layer_fails(*args: Any) -> None:
        """Sequences 0 and 2 run side by side, so the state of 1 must move; there is no memory to keep it in."""
        with patch.object(torch.Tensor, "clone", nth(len(states[1].layers[0]), MemoryError("no memory"), clone)):
            commit(*args)

    with patch.object(states[1], "commit", second_layer_fails), pytest.raises(DecodeError):
        rig.decoder.decode(Batch(token=[4, 5], seq_id=[[0], [2]]))
    rig.check_tensors()
    next_is_right(rig)


# Roll backs


@pytest.mark.parametrize("fork_first", [False, True])
@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "hybrid-streams"])
def test_a_fork_and_a_roll_back_go_on_from_the_right_states_in_either_order(kind: Kind, fork_first: bool) -> None:
    rig = Rig.of(kind, (0, 1, 2), n_ubatch=8, n_rs_seq=2)  # RM-10, RM-12
    rows = [Row(token, position, (0,)) for position, token in enumerate(text(6))]
    rig.decoder.decode(Batch(token=[row.token for row in rows]))
    rig.oracle.decode(rows)
    for fork in [True, False] if fork_first else [False, True]:
        if fork:
            rig.decoder.memory.seq_cp(0, 1)
            rig.oracle.copy(0, 1, None, None)
        else:
            assert rig.decoder.memory.seq_rm(0, 4)
            rig.oracle.remove(0, 4, None)
    for s in (1, 0):
        next_is_right(rig, s)


# Saved states


KEEP_GOING = 6


def continued(decoder: Decoder) -> str:
    """Digest of every logit that some greedy steps of three sequences give."""
    digest, tokens = hashlib.sha256(), {0: 1, 1: 2, 2: 3}
    for _ in range(KEEP_GOING):
        decoder.decode(Batch(token=list(tokens.values()), seq_id=[[s] for s in tokens], output=[1] * len(tokens)))
        for index, s in enumerate(tokens):
            logits = decoder.logits(index)
            assert logits is not None
            digest.update(logits.numpy().tobytes())
            tokens[s] = int(logits.argmax())
    return digest.hexdigest()


def continued_alone(decoder: Decoder) -> str:
    """The same of one sequence."""
    digest, token = hashlib.sha256(), 1
    for _ in range(KEEP_GOING):
        decoder.decode(Batch(token=[token]))
        logits = decoder.logits(0)
        assert logits is not None
        digest.update(logits.numpy().tobytes())
        token = int(logits.argmax())
    return digest.hexdigest()


def conversation(kind: Kind) -> Decoder:
    """Three sequences, their tokens mixed in memory, windows long left behind, one forked off another."""
    decoder = resting(kind)
    for k in range(12):
        decoder.decode(Batch(token=[k, k + 1, k + 2], seq_id=[[0], [1], [2]]))
    decoder.memory.seq_rm(2)
    decoder.memory.seq_cp(0, 2)
    return decoder


def single(kind: Kind) -> Decoder:
    decoder = resting(kind)
    decoder.decode(Batch(token=text(20)))
    return decoder


def resting(kind: Kind) -> Decoder:
    return small_decoder(kind, cells=96, n_seq_max=3, n_ubatch=8)


def resume(folder: Path) -> Iterator[str]:
    """What comes of the states in a folder: a line for each, in a process that has only the files."""
    for kind in KINDS:
        decoder = resting(kind)
        decoder.load_all((folder / f"{kind}.all").read_bytes())
        yield f"{kind} all {continued(decoder)}"
        decoder = resting(kind)
        decoder.load_sequence(0, (folder / f"{kind}.one").read_bytes())
        yield f"{kind} one {continued_alone(decoder)}"


@pytest.mark.slow
def test_a_state_saved_by_one_process_goes_on_in_another_to_the_bit(tmp_path: Path) -> None:
    wanted = []
    for kind in KINDS:
        together, one = conversation(kind), single(kind)
        (tmp_path / f"{kind}.all").write_bytes(together.save_all())
        (tmp_path / f"{kind}.one").write_bytes(one.save_sequence(0))
        wanted += [f"{kind} all {continued(together)}", f"{kind} one {continued_alone(one)}"]
    script = (
        "import sys; from pathlib import Path; from tests.decoder.cells.test_decoder_memory import resume; "
        "print(*resume(Path(sys.argv[1])), sep='\\n')"
    )
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == wanted
