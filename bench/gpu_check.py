"""Does CUDA compute what the CPU computes? For machines with a GPU; CI has none.

    python -m bench.gpu_check MODEL...

For each model (a path or a name): logits of 200 tokens and 32 greedy tokens in float32 on both devices, the same
draws from the same seed, and bfloat16 beside them. Ends non-zero where float32 logits differ by more than 1e-2 or
tokens differ.
"""

from __future__ import annotations

import json
import sys

import torch

from bench.note import versions
from ostinato import LLM, Sampling

GREEDY = Sampling(max_tokens=32, temperature=0, ignore_eos=True)
WARM = Sampling(max_tokens=32, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)


def check(model: str) -> dict[str, object]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    with LLM(model, device="cpu", dtype="float32") as cpu, LLM(model, device="cuda", dtype="float32") as gpu:
        ids = [(37 * i) % min(cpu.shape.vocab - 3, 40_000) + 3 for i in range(200)]
        expected, got = cpu.logits(ids), gpu.logits(ids).cpu()
        answers = [(cpu.generate(ids[:40], s).token_ids, gpu.generate(ids[:40], s).token_ids) for s in (GREEDY, WARM)]
        pace = gpu.generate(ids[:40], GREEDY).timings.decode_tok_s
    with LLM(model, device="cuda") as narrow:
        apart = (narrow.logits(ids).float().cpu() - expected).abs().mean()
    return {
        "model": model.rsplit("/", 1)[-1],
        "max_difference": float((expected - got).abs().max()),
        "greedy_equal": answers[0][0] == answers[0][1],
        "draws_equal": answers[1][0] == answers[1][1],
        "bfloat16_mean_difference": float(apart),
        "float32_decode_tok_s": pace,
    }


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here; this check is for machines with one")
    rows = [check(model) for model in sys.argv[1:]]
    for row in rows:
        print(row)
    note = {"question": "does CUDA compute what the CPU computes?", "device": torch.cuda.get_device_name()}
    print(json.dumps(note | {"versions": versions("torch", "tokenizers"), "rows": rows}))
    good = all(r["max_difference"] < 1e-2 and r["greedy_equal"] and r["draws_equal"] for r in rows)  # type: ignore[operator]  # floats
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
