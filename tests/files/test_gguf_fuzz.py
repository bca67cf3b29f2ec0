"""Mutated GGUF files: whatever the bytes, the reader opens the file or says BadFile, quickly and in little memory."""

import struct
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.errors import BadFile
from ostinato.files.checkpoint import open_checkpoint
from ostinato.files.quants import READABLE
from tests.counts import soak
from tests.files.gguf_bytes import ARCHITECTURE, ARRAY, BOOL, STRING, U16, U32, File, array, pair, string, tensor

EXAMPLE_BYTES = 16 << 20
EXAMPLE_SECONDS = 2.0


def _scalars() -> list[bytes]:
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    one = [pair(f"one.{kind}", kind, b"\1" + bytes(n - 1)) for kind, n in sizes.items()]
    many = [pair(f"many.{kind}", ARRAY, array(kind, [b"\1" + bytes(n - 1)] * 3)) for kind, n in sizes.items()]
    return one + many


def _vocabulary() -> list[bytes]:
    tokens = array(STRING, [string(text) for text in ("<s>", "a", "é", "世", "")])
    nested = array(ARRAY, [array(U32, [bytes(4)] * 2), array(ARRAY, [array(BOOL, [b"\1"])])])
    return [
        pair("general.alignment", U32, struct.pack("<I", 32)),
        pair("tokenizer.ggml.tokens", ARRAY, tokens),
        pair("tokenizer.chat_template", STRING, string("{{ messages }}")),
        pair("nested", ARRAY, nested),
    ]


SEEDS = [
    File(pairs=[ARCHITECTURE, *_scalars()]),
    File(pairs=[ARCHITECTURE, *_vocabulary()], version=2),
    File(
        pairs=[ARCHITECTURE, *_vocabulary(), pair("split.count", U16, struct.pack("<H", 1))],
        tensors=[
            tensor("token_embd.weight", [32, 4], 3, 0),
            tensor("blk.0.norm", [8], 0, 96),
            tensor("blk.0.k", [256, 1, 2], 12, 128),
            tensor("blk.0.iq", [256], 16, 416),
        ],
        data=bytes(range(256)) * 2,
    ),
]
for seed in SEEDS:
    assert len(seed.bytes) - len(seed.data) < 4096

SMALL = [0, 1, 2, 3, 5, 8, 9, 12, 13, 30, 31, 41, 42, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
LARGE = [2**40, 2**53, 2**60, 2**61 + 7, 2**62, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 2, 2**64 - 1]
NUMBERS = [*SMALL, *LARGE]


def mutate(content: bytearray, header_bytes: int, random: Random) -> None:
    """Change the header in one place; the four bytes of magic, tried elsewhere, stay."""
    at = random.randrange(4, max(5, min(header_bytes, len(content))))
    change = random.choice(["flip", "byte", "word", "double", "insert", "delete", "cut", "splice"])
    if change == "flip" and at < len(content):
        content[at] ^= 1 << random.randrange(8)
    elif change == "byte":
        content[at : at + 1] = random.randbytes(1)
    elif change == "word":
        content[at : at + 4] = struct.pack("<I", random.choice(NUMBERS) & 0xFFFFFFFF)
    elif change == "double":
        content[at : at + 8] = struct.pack("<Q", random.choice(NUMBERS))
    elif change == "insert":
        content[at:at] = random.randbytes(random.randint(1, 40))
    elif change == "delete":
        del content[at : at + random.randint(1, 40)]
    elif change == "cut":
        del content[at:]
    elif change == "splice":
        start = random.randrange(header_bytes)
        content[at:at] = content[start : start + random.randint(1, 200)]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid file after one to four changes; places are drawn evenly, which hypothesis' own integers are not."""
    seed = draw(st.sampled_from(SEEDS))
    random = Random(draw(st.integers(0, 2**64 - 1)))
    content = bytearray(seed.bytes)
    for _ in range(draw(st.integers(1, 4))):
        mutate(content, len(seed.header), random)
    return bytes(content)


def _open_and_read(path: Path) -> str | None:
    """Open the file and read all of it; what BadFile says, or None where all went well."""
    try:
        file = open_checkpoint(path)
    except BadFile as error:
        return str(error)
    try:
        for name, info in file.tensors.items():
            assert file.raw(name).nbytes == info.n_bytes
            if info.type in READABLE:
                file.read(name, np.empty(info.shape, np.float32))
    finally:
        file.close()
    return None


@pytest.mark.slow
@pytest.mark.soak
def test_mutated_files_open_or_say_bad_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "mutated.gguf"
    seen: Counter[str] = Counter()

    @settings(
        max_examples=soak(10_000),
        derandomize=True,
        database=None,
        deadline=None,  # bounded below, without hypothesis' own share
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(content=mutated())
    def one(content: bytes) -> None:
        path.write_bytes(content)
        start = time.process_time()
        tracemalloc.start()
        try:
            refusal = _open_and_read(path)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert time.process_time() - start < EXAMPLE_SECONDS
        assert peak < EXAMPLE_BYTES
        assert refusal is None or str(path) in refusal
        seen["opened" if refusal is None else "refused"] += 1

    one()
    assert sum(seen.values()) >= soak(10_000)
    assert seen["refused"] > seen["opened"] > 0, seen


@pytest.mark.parametrize("seed", SEEDS)
def test_the_files_that_are_mutated_are_valid_to_begin_with(tmp_path: Path, seed: File) -> None:
    path = tmp_path / "seed.gguf"
    path.write_bytes(seed.bytes)
    assert _open_and_read(path) is None


@pytest.mark.soak
@settings(max_examples=soak(2_000), derandomize=True, database=None, deadline=None)
@given(content=st.binary(max_size=400), with_magic=st.booleans())
def test_bytes_of_any_kind_open_or_say_bad_file(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, with_magic: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes((b"GGUF\3\0\0\0" if with_magic else b"") + content)
    refusal = _open_and_read(path)
    assert refusal is None or str(path) in refusal
