"""Ids by llama.cpp (the `xllamacpp` package), to hold ours against. It runs in a process of its own.

Its server must not be shut down in an orderly way (that can hang), so the process ends with `os._exit`.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.text.vocabularies import Metadata

_SCRIPT = """
import http.client, json, os, sys, traceback
import xllamacpp

request = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path = request["model"]
params.warmup = False
params.n_parallel = 1
params.n_ctx = 64
params.cpuparams.n_threads = 1
params.port = 0  # any that is free
params.verbosity = -1
server = xllamacpp.Server(params)  # held: letting go of it shuts it down
connection = http.client.HTTPConnection(server.listening_address.removeprefix("http://"), timeout=60)

def ids(text, special):
    body = {"content": text, "add_special": request["bos"], "parse_special": special}
    connection.request("POST", "/tokenize", json.dumps(body), {"Content-Type": "application/json"})
    return json.load(connection.getresponse())["tokens"]

try:
    answer = [[ids(text, False), ids(text, True)] for text in request["texts"]]
    with open(request["answer"], "w") as file:
        json.dump(answer, file)
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
os._exit(0)
"""


def reference_ids(model: Path, texts: Sequence[str], folder: Path, *, bos: bool = False) -> list[list[list[int]]]:
    """For each text its ids with control tokens as text, and with control tokens parsed."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: ids were not compared")
    answer = folder / "ids.json"
    request = {"model": str(model), "texts": list(texts), "bos": bos, "answer": str(answer)}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answered: list[list[list[int]]] = json.loads(answer.read_text())
    return answered


def write_model(path: Path, metadata: Metadata) -> Path:
    """A GGUF file with this vocabulary around one tiny layer of zeros: enough for llama.cpp to load it."""
    import gguf

    tokens = list(metadata["tokenizer.ggml.tokens"])
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(len(tokens))
    _add_metadata(writer, metadata)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    squares = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name, shape in [*shapes.items(), *((f"blk.0.{square}", (32, 32)) for square in squares)]:
        writer.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: object, metadata: Metadata) -> None:
    import gguf

    assert isinstance(writer, gguf.GGUFWriter)
    for key, value in metadata.items():
        if key == "general.name" or key in ("tokenizer.ggml.model", "tokenizer.ggml.pre"):
            writer.add_string(key, value)
        elif key == "tokenizer.ggml.scores":
            writer.add_token_scores([float(score) for score in value])
        elif key == "tokenizer.ggml.token_type":
            writer.add_token_types([int(kind) for kind in value])
        elif key == "tokenizer.ggml.precompiled_charsmap":
            writer.add_precompiled_charsmap(np.asarray(value).tobytes())
        elif key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
            writer.add_array(key, list(value))
        elif key.startswith("tokenizer.ggml.") and isinstance(value, bool):
            writer.add_bool(key, value)
        elif key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            writer.add_uint32(key, int(value))
