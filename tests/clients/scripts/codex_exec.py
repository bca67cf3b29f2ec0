"""`codex exec`: one command that the model calls, its result, and the answer; and the same with a tool of MCP."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from agent import FLOWER, QUESTION, SAID, documented, events
from checks import check

SERVER = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")


def ran(*words: str) -> list[dict[str, Any]]:
    """What it prints in a home of its own."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / ".codex").mkdir()
        (folder / ".codex" / "config.toml").write_text(documented("toml", SERVER))
        # A command runs unguarded: it reads one file, and not every container lets a sandbox be made.
        asked = ["exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", *words, QUESTION]
        return events("codex", asked, folder, {"OSTINATO_API_KEY": os.environ["OPENAI_API_KEY"]})


def items(printed: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    ended = [event["item"] for event in printed if event["type"] == "item.completed"]
    return [item for item in ended if item["type"] == kind]


printed = ran()
commands = items(printed, "command_execution")
check("it runs the command that the model calls", len(commands) == 1 and FLOWER in commands[0]["aggregated_output"])
check("the model gets the result and answers", items(printed, "agent_message")[-1]["text"] == SAID)
usage = printed[-1]["usage"]
check("the second request finds the first in the cache", usage["cached_input_tokens"] > usage["input_tokens"] * 0.4)

garden = {"command": sys.executable, "args": [str(Path(__file__).parent / "mcp_server.py"), FLOWER]}
settings = [f"mcp_servers.garden.{name}={json.dumps(value)}" for name, value in garden.items()]
printed = ran(*(word for one in settings for word in ("-c", one)))
calls = items(printed, "mcp_tool_call")
check("it calls a tool of MCP", [(call["server"], call["tool"]) for call in calls] == [("garden", "flower")])
check("the model gets that result, too", items(printed, "agent_message")[-1]["text"] == SAID)
