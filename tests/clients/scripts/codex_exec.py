"""`codex exec`: one command that the model calls, its result, and the answer."""

import os
import tempfile
from pathlib import Path

from checks import check
from coder import FLOWER, QUESTION, SAID, documented, events

with tempfile.TemporaryDirectory() as made:
    folder = Path(made)
    (folder / ".codex").mkdir()
    server = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    (folder / ".codex" / "config.toml").write_text(documented("toml", server))
    # The command runs unguarded: it reads one file, and not every container lets a sandbox be made.
    words = ["exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", QUESTION]
    printed = events("codex", words, folder, {"OSTINATO_API_KEY": os.environ["OPENAI_API_KEY"]})

items = [event["item"] for event in printed if event["type"] == "item.completed"]
ran = [item for item in items if item["type"] == "command_execution"]
check("it runs the command that the model calls", len(ran) == 1 and FLOWER in ran[0]["aggregated_output"])
check("the model gets the result and answers", items[-1]["text"] == SAID)
usage = printed[-1]["usage"]
check("the second request finds the first in the cache", usage["cached_input_tokens"] > usage["input_tokens"] * 0.4)
