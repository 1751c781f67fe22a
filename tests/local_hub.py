"""A hub on this machine, as far as huggingface_hub asks one: listing, tree, files with ranges.

    python3 tests/local_hub.py FOLDER --bind ADDRESS --port PORT    FOLDER/OWNER/NAME/files…

It serves what lies in the folder, tells what it was asked, and has the faults of real ones.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

PIECE = 16 << 10  # bytes sent at once
LARGE = (".safetensors", ".bin")  # kept as LFS files, by sha256


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class LocalHub:
    """``repos``: by name, files by name. Set the faults while it runs."""

    repos: dict[str, dict[str, bytes]]
    bind: str = "127.0.0.1"
    port: int = 0
    token: str = ""  # needed, when set
    status: int = 0  # answered to everything, when set
    wrong: dict[str, bytes] = field(default_factory=dict)  # sent in the place of a file's bytes
    at: int = -1  # bytes of files after which `then` is called, once
    then: Callable[[], None] = lambda: None
    asked: list[tuple[str, str]] = field(default_factory=list)  # method, path
    begun: list[tuple[str, int]] = field(default_factory=list)  # file, first byte that was sent
    xet: Path | None = None  # large files are served by hf-xet from a store there
    sent: int = 0  # bytes of files
    tokens: set[str] = field(default_factory=set)
    _hashes: dict[tuple[str, str], str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> LocalHub:
        hub = self
        self._hashes = {}
        if self.xet is not None:
            self._store(self.xet)

        class Handler(_Handler):
            served = hub

        self._server = http.server.ThreadingHTTPServer((self.bind, self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _store(self, folder: Path) -> None:
        """Put the large files where hf-xet's own client finds them: a store in a folder."""
        import hf_xet

        with hf_xet.XetSession().new_upload_commit(endpoint=f"local://{folder}") as commit:
            given = {
                (repo, name): commit.start_upload_bytes(data, hf_xet.SKIP_SHA256)
                for repo, files in self.repos.items()
                for name, data in files.items()
                if name.endswith(LARGE)
            }
        self._hashes = {key: each.result().xet_info.hash for key, each in given.items()}

    @property
    def url(self) -> str:
        return f"http://{self.bind}:{self.port}"

    def commit(self, repo: str) -> str:
        """Changes with the content, as a real commit does."""
        rows = [(name, git_id(data)) for name, data in sorted(self.repos[repo].items())]
        return hashlib.sha1(repr(rows).encode()).hexdigest()

    def got(self) -> list[str]:
        """Names of the files whose bytes were asked for, in order."""
        return [
            path.rpartition("/")[2]
            for method, path in self.asked
            if method == "GET" and "/resolve/" in path
        ]

    def forget(self) -> None:
        self.asked.clear()
        self.begun.clear()
        self.sent = 0

    def count(self, size: int) -> None:
        with self._lock:
            self.sent += size
            reached = 0 <= self.at <= self.sent
            if reached:
                self.at = -1
        if reached:
            self.then()


class _Handler(http.server.BaseHTTPRequestHandler):
    served: LocalHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a header and its body are two packets

    def handle(self) -> None:
        with contextlib.suppress(ConnectionResetError):  # a client that was killed
            super().handle()

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        hub, path = self.served, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path))
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        hub.tokens.add(given)
        if hub.status:
            return self._json({"error": "out of order"}, hub.status, body)
        if given != hub.token:
            return self._json({"error": "Invalid username or password."}, 401, body)
        for repo, files in hub.repos.items():
            if path.startswith(f"/api/models/{repo}/"):
                if "/xet-read-token/" in path:
                    store = {"accessToken": "t", "exp": 1 << 40, "casUrl": f"local://{hub.xet}"}
                    more = {
                        "X-Xet-Access-Token": "t",
                        "X-Xet-Token-Expiration": str(1 << 40),
                        "X-Xet-Cas-Url": f"local://{hub.xet}",
                    }
                    return self._json(store, 200, body, more)
                if "/tree/" in path:
                    return self._json([self._row(*each) for each in files.items()], 200, body)
                if "/revision/" in path:
                    return self._json(self._info(repo, files), 200, body)
            if path == f"/api/models/{repo}":
                return self._json(self._info(repo, files), 200, body)
            start = f"/{repo}/resolve/"
            if path.startswith(start):
                name = path.removeprefix(start).partition("/")[2]
                if name in files:
                    return self._file(repo, name, files[name], body)
        self._json({"error": "Repository not found"}, 404, body, {"X-Error-Code": "RepoNotFound"})

    def _row(self, name: str, data: bytes) -> dict[str, object]:
        row: dict[str, object] = {"type": "file", "path": name, "size": len(data)}
        row["oid"] = git_id(data)
        if name.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            row["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
        return row

    def _info(self, repo: str, files: dict[str, bytes]) -> dict[str, object]:
        siblings = []
        for name, data in files.items():
            each: dict[str, object] = {"rfilename": name, "size": len(data)}
            each["blobId"] = git_id(data)
            if name.endswith(LARGE):
                digest = hashlib.sha256(data).hexdigest()
                each["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append(each)
        return {"id": repo, "sha": self.served.commit(repo), "siblings": siblings}

    def _json(
        self, value: object, status: int, body: bool, more: dict[str, str] | None = None
    ) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for key, text in (more or {}).items():
            self.send_header(key, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _file(self, repo: str, name: str, data: bytes, body: bool) -> None:
        large = name.endswith(LARGE)
        etag = hashlib.sha256(data).hexdigest() if large else git_id(data)
        data = self.served.wrong.get(name, data)
        asked = self.headers.get("Range")
        start = int(asked.split("=")[1].split("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", self.served.commit(repo))
        if large:
            self.send_header("X-Linked-Etag", f'"{etag}"')
            self.send_header("X-Linked-Size", str(len(data)))
        if hashed := self.served._hashes.get((repo, name)):
            token = f"/api/models/{repo}/xet-read-token/{self.served.commit(repo)}"
            self.send_header("X-Xet-Hash", hashed)
            self.send_header("X-Xet-Refresh-Route", self.served.url + token)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        self.served.begun.append((name, start))
        try:
            for at in range(start, len(data), PIECE):
                piece = data[at : at + PIECE]
                self.wfile.write(piece)
                self.served.count(len(piece))
        except (BrokenPipeError, ConnectionResetError):  # of the client, or of `then`
            self.close_connection = True


def read(folder: Path) -> dict[str, dict[str, bytes]]:
    return {
        f"{repo.parent.name}/{repo.name}": {
            path.name: path.read_bytes() for path in sorted(repo.iterdir())
        }
        for repo in sorted(folder.glob("*/*"))
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--asked", type=Path, help="a line for each request")
    given = parser.parse_args()
    with LocalHub(read(given.folder), given.bind, given.port) as running:
        print(running.url, flush=True)
        told = 0
        while True:
            threading.Event().wait(0.1)
            if given.asked and len(running.asked) > told:
                told = len(running.asked)
                lines = [f"{method} {path}\n" for method, path in running.asked[:told]]
                given.asked.write_text("".join(lines), encoding="utf-8")
