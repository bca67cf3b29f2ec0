"""The laboratory on a GPU: every start gives the closed form, the persistent kernel gains what is asked of it, the
stand-alone programs are right, the engine's own step runs in every mode, and a `DecodeSession` does what
docs/decode-mode.md says.

Without a GPU the same checks run over the laboratory of the CPU, whose starts are the counterparts.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.gpu_frame import Check, Ended, Job, Outcome, Record, Setting
from bench.gpu_models import TAPE, model_on
from bench.nvcc import nvcc
from ostinato import LLM, DecodeInvariantError, DecodeSession, Sampling
from ostinato.engine.choose import modes_of
from ostinato.lab.bench import decoded_by_mode
from ostinato.lab.experiment import ASKED_GAIN, SMALL_N, accepted, measured
from ostinato.lab.model import BODIES, Workload
from ostinato.lab.programs import FOLDER
from ostinato.lab.work import LabMachine
from ostinato.options import LoadOptions
from tests.models import tiny_text

PROGRAMS: Final = ("graphs_axpy", "persistent_decode")
# Small sizes, where what is asked holds, one of many kernels a step, and a large one, whose result is compared alone.
SIZES: Final = ((1 << 8, 500, 1), (1 << 12, 500, 1), (1 << 16, 500, 1), (SMALL_N, 500, 1), (1 << 14, 20, 150))
LARGE: Final = (1 << 20, 500, 1)


def _machine(device: str) -> LabMachine:
    if device == "cpu":
        from ostinato.lab.cpu import CpuMachine

        return CpuMachine()
    from ostinato.lab.gpu import GpuMachine

    return GpuMachine(device)


def starts(device: str, *, sizes: Sequence[Sequence[int]], repeats: int = 5) -> Iterator[Record]:
    """Works of these sizes in every start, each result compared, and the laboratory's own acceptance figures."""
    machine = _machine(device)
    rows = []
    for n, steps, kernels in sizes:
        for body in BODIES:
            rows.append(measured(machine, Workload(n, steps, kernels, body=body), repeats))
            yield {"what": "row", **rows[-1].record()}
    yield {
        "what": "acceptance",
        "starts": list(machine.starts),
        "why_not": machine.why_not,
        "figures": [asdict(one) for one in accepted(machine, rows)],
    }


def judge_starts(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    """A wrong result ends its child, so it is a failure of the first outcome; a gain that is not reached is a MISS."""
    found = ended[0].of("acceptance")
    if not found:
        return [Outcome("FAIL", "lab-right", ended[0].error or "it said nothing")]
    right, *gains = found[0]["figures"]
    missed = [one["says"] for one in gains if not one["is_met"]]
    value = f"{right['says']}; starts: {', '.join(found[0]['starts'])}"
    value += "".join(f"; not {start}: {why}" for start, why in found[0]["why_not"].items())
    rows = {f"{row['body']} {row['n']} {row['kernels']}": row["starts"] for row in ended[0].of("row")}
    return [
        Outcome("PASS" if right["is_met"] else "FAIL", "lab-right", value, right["asked"]),
        Outcome(
            "MISS" if missed else "PASS",
            "lab-persistent",
            " || ".join(missed or [one["says"] for one in gains]),
            f"at least {ASKED_GAIN} times the plain loop up to n={SMALL_N}",
            {"rows": rows},
        ),
    ]


def decode(device: str, *, name: str, type: str, n_prompt: int, n_gen: int) -> Iterator[Record]:
    """The engine's own step in every mode, as `ostinato lab decode` has it."""
    for mode, found in decoded_by_mode(model_on(name, type, device), n_prompt=n_prompt, n_gen=n_gen):
        if isinstance(found, str):
            yield {"what": "refused", "mode": mode, "why": found}
        else:
            yield {"what": "decode", "model": name, **found}


def judge_decode(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    """Every mode of this kind of device has its figure; the persistent kernel is CUDA's."""
    rows = {row["mode"]: row for row in ended[0].of("decode")}
    refused = {one["mode"]: one["why"] for one in ended[0].of("refused")}
    outcomes = []
    for mode in modes_of("cuda" if setting.on_gpu else "cpu"):
        name = f"lab-decode-{mode}"
        if mode in rows:
            row = rows[mode]
            value = f"{row['tokens_s']:,.0f} tok/s, {row['launches_per_token']:.3g} launches a token"
            outcomes.append(Outcome("PASS", name, value, "", row))
        elif mode in refused:
            outcomes.append(Outcome("MISS", name, f"cannot run: {refused[mode]}", "every mode runs"))
        else:
            outcomes.append(Outcome("FAIL", name, ended[0].error or "it said nothing"))
    if not setting.on_gpu:
        outcomes.append(Outcome("SKIP", f"lab-decode-{TAPE}", "the persistent kernel is CUDA's"))
    return outcomes


def program(device: str, *, name: str, arch: str = "native") -> Iterator[Record]:
    """A stand-alone program, built by nvcc and run; it exits with 1 if a result is wrong."""
    compiler = nvcc()
    if compiler is None:
        yield {"what": "program", "skipped": "nvcc is not installed; `make test-compilers` installs it"}
        return
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / name
        build = [*compiler, "-O3", "-std=c++17", f"-arch={arch}", str(FOLDER / f"{name}.cu"), "-o", str(built)]
        subprocess.run(build, check=True)
        ran = subprocess.run([built], capture_output=True, text=True, check=False, timeout=100)
    yield {"what": "program", "code": ran.returncode, "said": (ran.stdout + ran.stderr).splitlines()}


def judge_programs(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    if not ended:
        return [Outcome("SKIP", "lab-programs", "they are a GPU's")]
    outcomes = []
    for one in ended:
        name = f"lab-program-{one.job.words['name']}"
        records: Any = one.of("program")
        if not records:
            outcomes.append(Outcome("FAIL", name, one.error or "it said nothing"))
        elif "skipped" in records[0]:
            outcomes.append(Outcome("SKIP", name, records[0]["skipped"]))
        else:
            said = " | ".join(records[0]["said"])
            outcomes.append(Outcome("FAIL" if records[0]["code"] else "PASS", name, said, "every result right"))
    return outcomes


# A session by hand

TEXTS: Final = ("The sea is", "Once upon a time")
LONG: Final = 8_000  # tokens: the loop still runs when the last refusal has come
# What must be refused while the loop runs, by the invariant that it would break.
REFUSED: Final[dict[str, Callable[[DecodeSession], object]]] = {
    "I-2": DecodeSession.trigger,
    "I-3": DecodeSession.close,
    "I-8": DecodeSession.step,
    "I-9": DecodeSession.enter,
}


def session_model(folder: Path) -> Path:
    """A small llama with random weights in bfloat16 that every mode runs, as a folder, which a session needs."""
    vocab, hidden, ff_width, n_layers, head_width, n_heads, n_kv_heads = (
        len(tiny_text.vocabulary()),
        256,
        512,
        2,
        64,
        4,
        2,
    )
    sizes = {"embed_tokens": (vocab, hidden), "norm": (hidden,)}
    for layer in (f"layers.{n}." for n in range(n_layers)):
        sizes |= {f"{layer}{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        sizes |= {f"{layer}self_attn.{name}_proj": (n_kv_heads * head_width, hidden) for name in "kv"}
        sizes |= {f"{layer}self_attn.{name}_proj": (n_heads * head_width, hidden) for name in "qo"}
        sizes |= {f"{layer}mlp.{name}_proj": (ff_width, hidden) for name in ("gate", "up")}
        sizes[f"{layer}mlp.down_proj"] = (hidden, ff_width)
    chance, header, data = np.random.default_rng(0), dict[str, Any](), bytearray()
    for name, shape in sizes.items():
        values = chance.normal(0, shape[-1] ** -0.5, shape) if len(shape) > 1 else np.ones(shape)
        halves = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        offsets = [len(data), len(data) + len(halves)]
        header[f"model.{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        data += halves
    words = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(words).to_bytes(8, "little") + words + data)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ff_width,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_width,
        "max_position_embeddings": 2 * LONG,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tiny_text.write_files(folder)
    return folder


def session(device: str, *, mode: str, n_tokens: int = 16) -> Iterator[Record]:
    """The example of docs/decode-mode.md beside an `LLM` of the same model; then what is refused while the loop runs,
    and that the tokens of that loop come all the same."""
    greedy = Sampling(max_tokens=n_tokens, temperature=0, ignore_eos=True)
    long = replace(greedy, max_tokens=LONG)
    with tempfile.TemporaryDirectory() as folder:
        path = session_model(Path(folder))
        load = LoadOptions(device=device, mode=mode, slots=2, context=LONG + 64)
        with LLM(path, load=load) as llm:
            expected = [list(llm.generate(text, greedy).token_ids) for text in TEXTS]
        with DecodeSession(path, load=load) as session:
            yield {"what": "opened", "mode": session.mode}
            before = session.counts
            slots = [session.admit(text, greedy) for text in TEXTS]
            session.trigger()
            tokens = list(session.tokens())
            after = session.counts
            yield {
                "what": "example",
                "same": [[one.token for one in tokens if one.slot == slot] for slot in slots] == expected,
                "tokens": len(tokens),
                "triggers": after.triggers - before.triggers,
                "launches": after.launches - before.launches,
                "built": after.instantiations - before.instantiations,
                "steps": after.steps - before.steps,
                "live": after.live,
            }
            plan = session.plan
            session.admit(TEXTS[0], long)
            session.trigger()
            refused = {invariant: _refusal(session, strike) for invariant, strike in REFUSED.items()}
            ran_on = session.running
            came = len(list(session.tokens()))
            same = (session.plan, session.counts.instantiations) == (plan, before.instantiations)
            yield {"what": "refused", "by": refused, "ran_on": ran_on, "tokens": came, "same_plan": same}


def _refusal(session: DecodeSession, strike: Callable[[DecodeSession], object]) -> str | None:
    try:
        strike(session)
    except DecodeInvariantError as error:
        return error.invariant
    return None


def judge_session(setting: Setting, ended: Sequence[Ended]) -> list[Outcome]:
    """Of each mode: the tokens of an `LLM` from one launch, and four refusals while the loop runs."""
    outcomes = []
    for one in ended:
        name = f"session-{one.job.words['mode']}"
        said = [*one.of("opened"), *one.of("example"), *one.of("refused")]
        if len(said) < 3 or one.error is not None:
            outcomes.append(Outcome("FAIL", name, one.error or "it said nothing"))
            continue
        opened, example, refused = said
        right = (
            example["same"]
            and (example["triggers"], example["launches"], example["built"], example["live"]) == (1, 1, 0, 0)
            and 2 * (example["steps"] + 1) == example["tokens"]  # first tokens come from prompts
            and opened["mode"] == one.job.words["mode"]
            and refused["by"] == {invariant: invariant for invariant in REFUSED}
            and refused["ran_on"]
            and refused["same_plan"]
            and refused["tokens"] == LONG
        )
        value = (
            f"{opened['mode']}: {example['tokens']} tokens of two prompts, {'' if example['same'] else 'NOT '}those of "
            f"an LLM, by {example['launches']} launches in {example['steps']} steps; refused while it "
            f"{'ran' if refused['ran_on'] else 'NO LONGER ran'}: {refused['by']}; {refused['tokens']} of {LONG} tokens "
            f"then came"
        )
        outcomes.append(Outcome("PASS" if right else "FAIL", name, value, "one launch, every refusal by its name"))
    if not setting.on_gpu:
        outcomes.append(Outcome("SKIP", f"session-{TAPE}", "the persistent kernel is CUDA's"))
    return outcomes


def _session_jobs(setting: Setting) -> list[Job]:
    return [Job("session", {"mode": mode}, 200) for mode in ("loop", *((TAPE,) if setting.on_gpu else ()))]


def _starts_jobs(setting: Setting) -> list[Job]:
    # The large size would take a CPU seconds, and is compared on a GPU alone.
    words: dict[str, Any] = {"sizes": [*SIZES, LARGE]} if setting.on_gpu else {"sizes": SIZES[:2], "repeats": 3}
    return [Job("lab_starts", words, 300)]


def _decode_jobs(setting: Setting) -> list[Job]:
    words: dict[str, Any] = {"name": "llama-1b", "type": "bf16", "n_prompt": 512, "n_gen": 256}
    if not setting.on_gpu:
        words = {"name": "tiny", "type": "f32", "n_prompt": 16, "n_gen": 16}
    return [Job("lab_decode", words, 300)]


def _program_jobs(setting: Setting) -> list[Job]:
    return [Job("lab_program", {"name": name}, 200) for name in PROGRAMS] if setting.on_gpu else []


WORKS: Final = {"session": session, "lab_starts": starts, "lab_decode": decode, "lab_program": program}
CHECKS: Final = (
    Check("lab", "session", _session_jobs, judge_session, alone=True),
    Check("lab", "lab-starts", _starts_jobs, judge_starts, alone=True),
    Check("lab", "lab-decode", _decode_jobs, judge_decode, alone=True),
    Check("lab", "lab-programs", _program_jobs, judge_programs, alone=True),
)
