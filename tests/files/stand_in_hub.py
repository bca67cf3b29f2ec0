"""A Hugging Face hub small enough for a test: model info, and files with the headers its client looks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {"gated": (403, "GatedRepo"), "broken": (500, "")}  # by a repository's owner


@dataclass(slots=True)
class Hub:
    """The address, and what it was asked; `stated_sums` are sums it claims in place of the true ones."""

    url: str
    files: Mapping[str, bytes]
    stated_sums: Mapping[str, str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def info(self, repo: str) -> dict[str, Any]:
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "lfs": {"size": len(data), "sha256": self.sum(name), "pointerSize": 130},
            }
            for name, data in self.files.items()
        ]
        return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False}

    def sum(self, name: str) -> str:
        return self.stated_sums.get(name) or hashlib.sha256(self.files[name]).hexdigest()


@contextmanager
def stand_in_hub(repo: str, files: Mapping[str, bytes], stated_sums: Mapping[str, str] | None = None) -> Iterator[Hub]:
    """Serve one repository on localhost for as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            name = path.removeprefix(f"/{repo}/resolve/{COMMIT}/")
            if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
                self.send(json.dumps(hub.info(repo)).encode(), {"Content-Type": "application/json"}, body)
            elif name in hub.files:
                self.send(hub.files[name], {"ETag": f'"{hub.sum(name)}"', "X-Repo-Commit": COMMIT}, body)
            else:
                status, code = REFUSALS.get(path.removeprefix("/api/models/").split("/")[0], (404, "RepoNotFound"))
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def send(self, data: bytes, headers: Mapping[str, str], body: bool) -> None:
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}", files, stated_sums or {})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
