"""A server of the Model Context Protocol on standard input and output, with one tool that says its first argument."""

import json
import sys

TOOL = {
    "name": "flower",
    "description": "Names the flower.",
    "inputSchema": {"type": "object", "properties": {"bed": {"type": "integer"}}, "required": ["bed"]},
    "annotations": {"readOnlyHint": True},
}

for line in sys.stdin:
    message = json.loads(line)
    result = {}
    match message.get("method"):
        case "initialize":
            version = message["params"]["protocolVersion"]
            about = {"name": "garden", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            result = {"tools": [TOOL]}
        case "tools/call":
            result = {"content": [{"type": "text", "text": sys.argv[1]}]}
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
