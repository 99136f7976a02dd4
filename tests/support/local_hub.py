"""A hub of models on this machine: the endpoints with which huggingface_hub lists and downloads a repository."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class LocalHub:
    """Repositories by name, each a folder, and what was asked of them."""

    repositories: dict[str, Path]
    url: str = ""
    delay_s: float = 0.0
    """Seconds before the second half of each file of weights."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request, in order."""

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

    def downloads(self) -> list[str]:
        """Names of the files whose contents were sent."""
        return [text.rpartition("/")[2] for text in self.requests if text.startswith("GET ") and "/resolve/" in text]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        for name, folder in self.hub.repositories.items():
            if path.startswith(f"/api/models/{name}/tree/"):
                return self._json([{"type": "file", **_facts(file)} for file in _files(folder)])
            if path.removesuffix("/revision/main").removesuffix(f"/revision/{COMMIT}") == f"/api/models/{name}":
                siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in _files(folder)]
                return self._json({"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
            start = f"/{name}/resolve/"
            if path.startswith(start) and (file := folder / path[len(start) :].partition("/")[2]).is_file():
                return self._file(file, body)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, file: Path, body: bool) -> None:
        data = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{_facts(file)["oid"]}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            half = len(data) // 2
            self.wfile.write(data[:half])
            if self.hub.delay_s and file.suffix == ".safetensors":
                self.wfile.flush()
                time.sleep(self.hub.delay_s)
            self.wfile.write(data[half:])

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: `requests` has them."""


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def _facts(file: Path) -> dict[str, Any]:
    return {"path": file.name, "size": file.stat().st_size, "oid": hashlib.sha1(file.read_bytes()).hexdigest()}


@contextmanager
def local_hub(**repositories: Path) -> Iterator[LocalHub]:
    """A hub of `tests/NAME` for each repository."""
    hub = LocalHub({f"tests/{name}": folder for name, folder in repositories.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
