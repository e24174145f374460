"""A hub of our own: folders on this machine, served as the Hugging Face hub serves repositories.

Only what its library asks for when it downloads: a repository's commit, its files, and their bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

COMMIT = "0" * 39 + "1"


class Hub:
    """Serves `root/owner/name` as the repository `owner/name`. `asked`: names of files sent."""

    def __init__(self, root: Path) -> None:
        self.asked: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Answer, root, self.asked))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        """For a program that shall ask this hub, with an empty cache in `home`."""
        own = {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        return {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | own

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Answer(BaseHTTPRequestHandler):
    def __init__(self, root: Path, asked: list[str], *arguments) -> None:
        self.root, self.asked = root, asked
        super().__init__(*arguments)

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def _serve(self, body: bool) -> None:
        parts = urlparse(self.path).path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api(parts[2:4], parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file(self.root.joinpath(*parts[:2], *parts[4:]), body)
        else:
            self._absent("RepoNotFound")

    def _api(self, name: list[str], rest: list[str]) -> None:
        folder = self.root.joinpath(*name)
        if not folder.is_dir():
            self._absent("RepoNotFound")
            return
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [str(path.relative_to(folder)) for path in files]
        if rest[:1] == ["tree"]:
            found = [
                {"type": "file", "path": n, "size": p.stat().st_size, "oid": _digest(p)}
                for n, p in zip(names, files, strict=True)
            ]
        else:
            found = {
                "id": "/".join(name),
                "sha": COMMIT,
                "siblings": [{"rfilename": n} for n in names],
                "private": False,
                "tags": [],
                "downloads": 0,
            }
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _file(self, path: Path, body: bool) -> None:
        if not path.is_file():
            self._absent("EntryNotFound")
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{_digest(path)}"', "X-Repo-Commit": COMMIT}
        if body:
            self.asked.append(path.name)
        self._send(200, content, headers, body)

    def _absent(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code})

    def _send(self, status: int, content: bytes, headers: dict[str, str], body=True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(content)


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
