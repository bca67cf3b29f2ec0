"""Real clients against a server: `make clients`, or `python -m tests.clients [NAME ...]`.

Each client is a script that uses it as its own documentation does, with the server's address in the variables that the
client reads anyway. The clients are installed into environments of their own below .venv, with the versions that
`requirements.txt` and `package.json` pin. The model is tiny and random: forced calls and schemas make it say what a
check needs; for the command-line coding agents its answers are scripted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from ostinato.serve.script import ScriptedAnswer
from tests.cli import tiny_model
from tests.clients import agents
from tests.serve.program import Program, program

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENT = ROOT / ".venv" / "clients"
MODEL = "tiny"
LONGEST_S = 120.0


@dataclass(frozen=True, slots=True)
class Client:
    """A client: its package, the script that uses it, and what the script uses of it. `answers`: an agent's script."""

    package: str
    script: str
    uses: str
    answers: tuple[ScriptedAnswer, ...] = ()

    @property
    def is_node(self) -> bool:
        """Whether it comes from npm."""
        return self.script.endswith(".mjs") or bool(self.answers)


CLIENTS = (
    Client("openai", "openai_responses.py", "`responses.*`"),
    Client("openai-agents", "openai_agents.py", "its default API"),
    Client("pydantic-ai-slim", "pydantic_ai_openai.py", "an `openai:` model"),
    Client("litellm", "litellm_responses.py", "`litellm.responses`"),
    Client("langchain-openai", "langchain_responses.py", "`use_responses_api`"),
    Client("anthropic", "anthropic_messages.py", "`messages.*`, `models.*`"),
    Client("ollama", "ollama_client.py", "`chat`, `generate`, `embed`, `embeddings`, `list`, `show`, `ps`"),
    Client("openai", "openai_responses.mjs", "`responses.*`, in Node"),
    Client("@ai-sdk/openai", "ai_sdk.mjs", "its default API, in Node"),
    Client("@openai/codex", "codex_exec.py", "`codex exec`, a tool call", agents.CODEX),
    Client("@anthropic-ai/claude-code", "claude_print.py", "`claude -p`, a tool call", agents.CLAUDE),
)


def main(names: Sequence[str]) -> int:
    """Run the clients whose package or script has one of the names, or all; print a table."""
    chosen = [one for one in CLIENTS if not names or any(name in (one.package, one.script) for name in names)]
    if not chosen:
        known = ", ".join(dict.fromkeys(one.package for one in CLIENTS))
        print(f"no client is called {' or '.join(names)}; the clients are: {known}", file=sys.stderr)
        return 2
    python = install_python()
    has_node = shutil.which("npm") is not None and shutil.which("node") is not None
    if has_node:
        install_node()
    n_failed = 0
    print("| client | version | what | result |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for answers, clients in itertools.groupby(chosen, lambda client: client.answers):
            with server_for(answers, Path(folder)) as server:
                for client in clients:
                    if client.is_node and not has_node:
                        result = "not run: there is no Node here"
                    else:
                        result = run(client, server, python)
                    n_failed += result.startswith("failed")
                    print(f"| `{client.package}` | {version(client)} | {client.uses} | {result} |", flush=True)
    return 1 if n_failed else 0


def server_for(answers: tuple[ScriptedAnswer, ...], folder: Path) -> AbstractContextManager[Program]:
    """`ostinato serve` for clients that want these answers, or any."""
    options = ("--alias", MODEL, "--device", "cpu", "--port", "0")
    if answers:
        script = folder / "script.json"
        script.write_text(json.dumps([asdict(answer) for answer in answers]))
        model = agents.write_model(folder / "agent.gguf")
        return program(str(model), *options, "--context", str(agents.CONTEXT), "--slots", "2", "--script", str(script))
    model = tiny_model.write(folder / "tiny.gguf", context=4096)
    return program(str(model), *options, "--context", "2048", "--slots", "8")


def run(client: Client, server: Program, python: Path) -> str:
    """One cell of the table."""
    program = ["node"] if client.script.endswith(".mjs") else [str(python)]
    folder = ENVIRONMENT if client.script.endswith(".mjs") else SCRIPTS
    began = time.monotonic()
    try:
        ran = subprocess.run(
            [*program, str(folder / client.script)],
            env=variables(server),
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            cwd=ENVIRONMENT,
        )
    except subprocess.TimeoutExpired:
        return f"failed: it did not end within {LONGEST_S:.0f} s"
    n_ok = ran.stdout.count("ok: ")
    if ran.returncode:
        print(ran.stdout, ran.stderr, sep="\n", file=sys.stderr)
        return f"failed after {n_ok} checks"
    refused = [f"{one['method']} {one['path']}: {one['status']}" for one in server.log if one["status"] != 200]
    if client.answers and refused:
        return f"failed: the server refused {', '.join(refused)}"
    return f"{n_ok} checks in {time.monotonic() - began:.1f} s"


def variables(server: Program) -> dict[str, str]:
    """The environment of a client: where the server is, and no other traffic."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ANTHROPIC_", "OLLAMA_", "OPENAI_", "PYTHON"))
    }
    return kept | {
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": "none",
        "OLLAMA_HOST": server.url,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
        "CLIENT_MODEL": MODEL,
        "CLIENT_FLOWER": agents.FLOWER,
        "CLIENT_SAID": agents.SAID,
    }


# What is installed


def install_python() -> Path:
    """The interpreter of an environment with the pinned packages."""
    python = ENVIRONMENT / "bin" / "python"
    wanted = SCRIPTS / "requirements.txt"
    if not is_installed(wanted):
        venv.create(ENVIRONMENT, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([*pip, "--requirement", str(wanted)], check=True)
        mark_installed(wanted)
    return python


def install_node() -> None:
    """The pinned packages, and the scripts beside them: Node looks for packages from a script's own folder."""
    for script in SCRIPTS.glob("*.mjs"):
        shutil.copy(script, ENVIRONMENT)
    wanted = SCRIPTS / "package.json"
    if not is_installed(wanted):
        shutil.copy(wanted, ENVIRONMENT)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=ENVIRONMENT, check=True)
        mark_installed(wanted)


def is_installed(wanted: Path) -> bool:
    mark = ENVIRONMENT / f"{wanted.name}.installed"
    return mark.exists() and mark.read_text() == _sum(wanted)


def mark_installed(wanted: Path) -> None:
    (ENVIRONMENT / f"{wanted.name}.installed").write_text(_sum(wanted))


def _sum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def version(client: Client) -> str:
    """The pinned version."""
    if client.is_node:
        pinned: dict[str, str] = json.loads((SCRIPTS / "package.json").read_text())["dependencies"]
        return pinned[client.package]
    lines = (SCRIPTS / "requirements.txt").read_text().split()
    return next(line.partition("==")[2] for line in lines if line.split("[")[0].split("==")[0] == client.package)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
