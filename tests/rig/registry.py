"""A registry of one image, for a node's own loopback: ``python3 registry.py PORT FOLDER``.

FOLDER has what `furnish` puts there, and gets a line for each request, in the file asked.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar"


def furnish(folder: Path, saved: Path, labels: Mapping[str, str]) -> None:
    """The image of a tar that ``docker save`` reads, with these labels beside its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(saved) as tar:

        def read(name: str) -> bytes:
            member = tar.extractfile(name)
            assert member is not None
            return member.read()

        (entry,) = json.loads(read("manifest.json"))
        config: dict[str, Any] = json.loads(read(entry["Config"]))
        config["config"]["Labels"] = dict(labels)
        whole = json.dumps(config).encode()
        layers = [_layer(folder, read(name)) for name in entry["Layers"]]
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, "size": len(whole), "digest": _put(folder, whole)},
        "layers": layers,
    }
    raw = json.dumps(manifest).encode()
    (folder / "manifest").write_bytes(raw)
    _put(folder, raw)


def _layer(folder: Path, data: bytes) -> dict[str, Any]:
    return {"mediaType": LAYER, "size": len(data), "digest": _put(folder, data)}


def _put(folder: Path, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    (folder / digest).write_bytes(data)
    return f"sha256:{digest}"


class Handler(BaseHTTPRequestHandler):
    folder: Path

    def do_GET(self) -> None:
        with (self.folder / "asked").open("a") as log:
            log.write(f"{self.command} {self.path}\n")
        last = self.path.rpartition("/")[2]
        name = last.removeprefix("sha256:") if last.startswith("sha256:") else "manifest"
        if self.path == "/v2/":
            data = b"{}"
        elif (self.folder / name).is_file():
            data = (self.folder / name).read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        manifest = "/manifests/" in self.path
        self.send_header("Content-Type", MANIFEST if manifest else "application/octet-stream")
        self.send_header("Docker-Content-Digest", f"sha256:{hashlib.sha256(data).hexdigest()}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, *words: Any) -> None:
        pass


if __name__ == "__main__":
    Handler.folder = Path(sys.argv[2])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
