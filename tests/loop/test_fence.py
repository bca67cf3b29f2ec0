"""The host's fence: between an entry and the index that publishes it, on processors that reorder stores."""

from contextlib import closing
from pathlib import Path

import pytest

from ostinato import LLM, Sampling
from ostinato.loop import fence, host


def test_only_x86_has_none() -> None:
    assert fence.fence_of("x86_64") is fence.fence_of("AMD64")
    ours = fence.fence_of("aarch64")
    assert ours is not fence.fence_of("x86_64")
    for _ in range(3):
        ours()


def test_a_loop_answers_alike_with_a_fence(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ids() -> tuple[int, ...]:
        with closing(LLM(tiny_gguf, device="cpu", context=64)) as llm:
            return tuple(llm.generate("hello", Sampling(max_tokens=5, temperature=0.0)).token_ids)

    expected, n_fences = ids(), 0

    def counted() -> None:
        nonlocal n_fences
        fence.fence_of("aarch64")()
        n_fences += 1

    monkeypatch.setattr(host, "fence", counted)
    assert ids() == expected
    assert n_fences >= 3  # one to publish, and two for what was read
