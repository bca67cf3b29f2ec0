"""What llama.cpp's own converter writes of every tiny model, beside the folder that it was made from.

python -m tests.models.converter CHECKOUT      of llama.cpp; prints what differs, and ends with 1 where it does

Folders have their first published config.json. Each is converted in a process of its own to float32, with GPT-2's
splits for a vocabulary that no converter knows. The file and the folder must give the same 24 greedy tokens, with
log-probabilities within 1e-4.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Final

from ostinato import LLM, Sampling
from ostinato.errors import OstinatoError
from ostinato.processes import python_command
from tests.models import tiny

TOLERANCE: Final = 1e-4
DEADLINE_S: Final = 120.0
GREEDY: Final = Sampling(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)
CONVERT: Final = """
import importlib.machinery, json, logging, sys, types
from pathlib import Path
checkout, folder, file = map(Path, sys.argv[1:])
sys.path[:0] = [str(checkout), str(checkout / "gguf-py")]
try:
    import sentencepiece
except ImportError:
    sys.modules["sentencepiece"] = absent = types.ModuleType("sentencepiece")
    absent.__spec__, absent.SentencePieceProcessor = importlib.machinery.ModuleSpec("sentencepiece", None), object
import gguf
import conversion
from conversion.base import ModelBase, ModelType, TextModel, get_model_architecture
logging.disable(logging.WARNING)
by_transformers = ModelBase.load_hparams
def as_published(folder, is_mistral_format=False):
    # transformers, of whichever version is installed, renames keys and leaves some out.
    return {**by_transformers(folder, False), **json.loads((folder / "config.json").read_text())}
ModelBase.load_hparams = staticmethod(as_published)
stated = as_published(folder)
kind = conversion.get_model_class(get_model_architecture(stated, ModelType.TEXT))
kind.no_mtp = True
kind.get_vocab_base_pre = TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
kind.set_vocab = TextModel._set_vocab_gpt2
kind(folder, gguf.LlamaFileType.ALL_F32, file, eager=True).write()
"""
# What a converter cannot know of these, or says of them only in other words than the tiny model's.
LEFT_ALONE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gemma3-stated": "GGUF has no place for its pattern of windows",
        "granite-hybrid": "its two widths differ, and are one in GGUF",
        "glm-4.7-flash": "a file that does not say how experts are scored is known by the published vocabulary",
        "nemotron-h": "transformers states experts for a model without",
    }
)


def convert(checkout: Path, folder: Path, file: Path) -> str | None:
    """Why a folder cannot be converted; None where it was."""
    command = python_command("-c", CONVERT, str(checkout), str(folder), str(file))
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it was not done after {DEADLINE_S:.0f} s"
    return None if file.exists() and ran.returncode == 0 else (ran.stderr.strip().splitlines() or ["no word"])[-1]


def answer(name: str, path: Path) -> list[tuple[int, float]]:
    with LLM(path, device="cpu", context=tiny.TINY[name].context) as llm:
        found = llm.generate(tiny.prompt(name), GREEDY).logprobs
    assert found is not None
    return [(one.token_id, one.logprob) for one in found]


def difference(name: str, folder: Path, file: Path) -> str | None:
    try:
        ours, theirs = answer(name, folder), answer(name, file)
    except OstinatoError as error:
        return f"{type(error).__name__}: {error}"
    if [token for token, _ in ours] != [token for token, _ in theirs]:
        return "other tokens"
    apart = max(abs(one - two) for (_, one), (_, two) in zip(ours, theirs, strict=True))
    return None if apart <= TOLERANCE else f"log-probabilities are {apart:.2g} apart"


def main(checkout: Path) -> int:
    n_equal, wrong, unconverted = 0, 0, list[str]()
    with TemporaryDirectory() as folders:
        for name, model in tiny.TINY.items():
            if model.architecture is None or name in LEFT_ALONE:
                continue
            folder = tiny.folder(name, Path(folders), style="original")
            file = Path(folders) / f"{name}.gguf"
            if (why := convert(checkout, folder, file)) is not None:
                unconverted.append(f"{name}: {why[:100]}")
            elif (what := difference(name, folder, file)) is not None:
                wrong += 1
                print(f"{name}: {what}")
            else:
                n_equal += 1
    print(f"{n_equal} equal, {wrong} not; the converter refuses {len(unconverted)}:", *unconverted, sep="\n  ")
    return int(wrong > 0 or n_equal == 0)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "convert_hf_to_gguf.py").is_file():
        sys.exit("give the folder of a checkout of llama.cpp, in which convert_hf_to_gguf.py lies")
    sys.exit(main(Path(sys.argv[1])))
