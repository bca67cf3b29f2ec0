"""`claude -p`: one command that the model calls, its result, and the answer."""

import os
import tempfile
from pathlib import Path

from agent import FLOWER, QUESTION, SAID, documented, events
from checks import check

with tempfile.TemporaryDirectory() as made:
    folder = Path(made)
    (folder / ".claude").mkdir()
    (folder / ".claude" / "settings.json").write_text(documented("json", os.environ["ANTHROPIC_BASE_URL"]))
    words = ["-p", QUESTION, "--output-format", "stream-json", "--verbose", "--allowedTools", "Bash(cat:*)"]
    printed = events("claude", words, folder, {})

results = [
    block
    for event in printed
    if event["type"] == "user"
    for block in event["message"]["content"]
    if block["type"] == "tool_result"
]
check("it runs the command that the model calls", len(results) == 1 and FLOWER in results[0]["content"])
last = printed[-1]
check("the model gets the result and answers", (last["is_error"], last["result"]) == (False, SAID))
usage = last["usage"]
check("the second request finds the first in the cache", usage["cache_read_input_tokens"] > usage["input_tokens"] * 0.9)
