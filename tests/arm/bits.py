"""Prints a digest of what the native loop computes: products of every type of weights, and the default model's answers.

Runs on its own, on any machine and with the packages that the wheel asks for: the lines of two machines must be equal.
Inputs are made of integers, since NumPy's normal numbers need the C library's functions.

    python bits.py MODEL.gguf
"""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ostinato import LLM, Sampling
from ostinato.backends.native.library import native_status
from ostinato.backends.native.tiles import TILE_TYPES, empty_tiles, fill_tiles
from ostinato.files.quants import BLOCKS

# Where a block's float16 numbers are: these must be sane, all other bytes may be anything.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}
PROMPT = "The lighthouse keeper counts the ships that pass before the storm. " * 22  # over more than 256 positions


def floats(random: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return (random.integers(-(1 << 20), 1 << 20, shape) / np.float64(1 << 19)).astype(np.float32)


def blocks(type: str, rows: int, cols: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Random rows of a type as a file has them."""
    block = BLOCKS[type]
    if type == "BF16":
        return (floats(random, rows, cols).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if block.elements == 1:
        return floats(random, rows, cols).astype(np.float16 if type == "F16" else np.float32).view(np.uint8)
    raw = random.integers(0, 256, (rows * cols // block.elements, block.n_bytes), np.uint8)
    for at in HALVES.get(type, [208]):
        raw[:, at : at + 2] = (floats(random, len(raw)) / 64).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


def products() -> None:
    for number, type in enumerate(TILE_TYPES):
        random = np.random.default_rng(number)
        cols = 768 if type.endswith("_K") else 96 if BLOCKS[type].elements > 1 else 91
        raw, x = blocks(type, 37, cols, random), floats(random, 30, cols)
        for wide in (True, False):
            tiles = empty_tiles(type, 37, cols, wide=wide)
            fill_tiles(tiles, raw)
            total = sha256(b"".join(tiles.product(x[:n], n_threads=1).tobytes() for n in (1, 2, 3, 4, 5, 8, 30)))
            print("product", type, "wide" if wide else "int8", total.hexdigest())


def answers(model: Path) -> None:
    for kv_type in ("f32", "f16", "bf16", "q8_0"):
        with LLM(model, device="cpu", context=512, kv_type=kv_type, threads=2) as llm:
            prompts = ((PROMPT, 0.0),) if kv_type == "f32" else ()  # an emulator takes a minute for it
            for prompt, temperature in (*prompts, ("Once upon a time", 0.0), ("Once upon a time", 1.0)):
                sampling = Sampling(max_tokens=8, temperature=temperature, seed=7, top_p=0.95, logprobs=2)
                answer = llm.generate(prompt, sampling)
                print("answer", kv_type, temperature, answer.token_ids, answer.digest, answer.logprobs)


if __name__ == "__main__":
    print(native_status().line, file=sys.stderr)
    products()
    answers(Path(sys.argv[1]))
