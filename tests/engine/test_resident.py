"""Memory is reserved when a model opens and used as sequences grow: the resident set of a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.backends.machine import resident_bytes
from tests.cli import tiny_model
from tests.models import tiny_gguf

pytestmark = pytest.mark.skipif(resident_bytes() is None, reason="this system does not tell what is resident")
MB = 10**6
FREE = 2000 * MB
HUGE = 2 << 20  # what the system may commit at once
CHILD_S = 120
# Opens a model where the control group may take so much, and asks for one short and one long answer.
CHILD = """
import json, sys
from pathlib import Path
from ostinato import LLM, Sampling
from ostinato.backends import control_groups

model, folder, most, n_long = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
for name, text in {"self": "0::/\\n", "memory.max": most, "memory.current": "0", "memory.stat": ""}.items():
    (folder / name).write_text(text)
control_groups.GROUPS, control_groups.GROUP_OF_SELF = folder, folder / "self"
said = []
with LLM(model, device="cpu", threads=1, talk=said.append) as llm:
    def used(n_prompt):
        answer = llm.generate([5] * n_prompt, Sampling(max_tokens=4, ignore_eos=True))
        assert len(answer.token_ids) == 4
        return llm.stats().resident_bytes

    stats = llm.stats()
    found = {"open": stats.resident_bytes, "short": used(20), "long": used(n_long), "pages": stats.pages}
    found |= {"slots": stats.n_slots, "context": llm.context, "said": said}
print(json.dumps(found))
"""


def in_child(model: Path, folder: Path, n_long: int) -> dict[str, Any]:
    words = [str(model), str(folder), str(FREE), str(n_long)]
    ran = subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, text=True, timeout=CHILD_S)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def wide_model(path: Path) -> Path:
    """One layer of llama whose keys and values take 4 KiB for each position."""
    random, hidden = torch.Generator().manual_seed(5), 512
    sizes = {"hidden_size": hidden, "num_attention_heads": 32, "num_key_value_heads": 32}

    def widened(name: str, tensor: Tensor) -> Tensor:
        size = [hidden if n in (tiny_model.HIDDEN, tiny_model.HIDDEN // 2) else n for n in tensor.shape]
        return torch.ones(size) if len(size) == 1 else torch.randn(size, generator=random) * 0.05

    weights = {name: widened(name, tensor) for name, tensor in tiny_model.tensors().items()}
    tiny_gguf.write(path, "llama", {**tiny_model.config(1 << 16), **sizes}, weights)
    return path


@pytest.mark.slow
def test_pages_are_used_as_sequences_grow_and_not_before(tmp_path: Path) -> None:
    found = in_child(wide_model(tmp_path / "wide.gguf"), tmp_path, n_long=4000)
    assert found["pages"] * 16 * 4096 > 1200 * MB  # reserved: eight contexts of 65,536 positions do not fit
    assert (found["slots"], found["context"], found["said"]) == (8, 1 << 16, [])
    assert found["open"] < 600 * MB
    assert found["short"] - found["open"] < 2 * HUGE + 20 * MB
    assert 4000 * 4096 < found["long"] - found["open"] < 4000 * 4096 + 2 * HUGE + 30 * MB


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_with_default_options_answers_with_two_gigabytes_free(
    default_model: Path, tmp_path: Path
) -> None:
    found = in_child(default_model, tmp_path, n_long=40)
    assert (found["slots"], found["context"], found["said"]) == (8, 8192, [])
    assert 3 * 512 < found["pages"] < 8 * 512  # a context is 512 pages
    assert found["open"] < 600 * MB
    assert found["long"] - found["open"] < 60 * HUGE + 30 * MB  # keys and values of 30 layers
