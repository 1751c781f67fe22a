"""The image's name; what a registry is asked and believed, and a daemon that pulls."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import hashlib
import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from launcher.image import registry, stamp
from launcher.image.reference import HUB, Reference, reference
from launcher.image.registry import Absent, Login, OutOfReach
from launcher.image.store import ImageStore, PullFailed, split
from launcher.settings.secret import Secret

# ---- names ----


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ubuntu", Reference(HUB, "library/ubuntu", "latest")),
        ("vllm/vllm-openai:v0.33.0", Reference(HUB, "vllm/vllm-openai", "v0.33.0")),
        ("docker.io/a/b:c", Reference(HUB, "a/b", "c")),
        ("ghcr.io/a/b-c.d/e:2.9bpw", Reference("ghcr.io", "a/b-c.d/e", "2.9bpw")),
        ("localhost:5000/a", Reference("localhost:5000", "a", "latest")),
        (f"r.io/a@sha256:{'0' * 64}", Reference("r.io", "a", f"sha256:{'0' * 64}")),
        ("ghcr.io/A/b", None),
        ("ghcr.io/a/../b", None),
        ("ghcr.io/a/b:c/d", None),
        ("a b", None),
        ("r.io/a@sha256:12", None),
        ("", None),
    ],
)
def test_a_name_as_docker_reads_it(name: str, expected: Reference | None) -> None:
    assert reference(name) == expected


def test_repository_and_tag() -> None:
    assert split("localhost:5000/a/b") == ("localhost:5000/a/b", "latest")
    assert split("r.io:1/a:2") == ("r.io:1/a", "2")
    assert split("r.io/a@sha256:ab") == ("r.io/a", "sha256:ab")


# ---- a registry ----

TOKEN = "token-of-the-account"


class Hub:
    """A registry on loopback: an index of two platforms, their manifests and configs; with a login
    where ``closed``."""

    def __init__(self, stamped: str = "s1", closed: bool = False) -> None:
        self.closed = closed
        self.asked: list[tuple[str, str]] = []  # path and Authorization of each request
        self.blobs: dict[str, bytes] = {}
        self.damage = b""
        listed = []
        for architecture in ("amd64", "arm64"):
            config = self._blob(
                {
                    "architecture": architecture,
                    "config": {"Labels": {stamp.LABEL: stamped} if stamped else None},
                    "rootfs": {"diff_ids": [f"sha256:{architecture}", "sha256:2"]},
                }
            )
            manifest = self._blob(
                {
                    "mediaType": registry.MANIFESTS[0],
                    "config": {"digest": config},
                    "layers": [{"size": 30, "digest": "sha256:x"}, {"size": 12}],
                }
            )
            platform = {"os": "linux", "architecture": architecture}
            listed.append({"digest": manifest, "platform": platform})
        self.index = json.dumps({"mediaType": registry.INDEXES[0], "manifests": listed}).encode()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, headers, data = hub.answer(self.path, self.headers.get("Authorization", ""))
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def _blob(self, value: Any) -> str:
        data = json.dumps(value).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return digest

    def answer(self, path: str, auth: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append((path, auth))
        if path.startswith("/token"):
            right = "Basic " + b64encode(f"me:{TOKEN}".encode()).decode()
            if self.closed and auth != right:
                return 403, {}, b"{}"
            return 200, {}, b'{"token": "bearer-1"}'
        if auth != "Bearer bearer-1":
            realm = f'Bearer realm="http://{self.host}/token",service="hub"'
            return 401, {"WWW-Authenticate": realm}, b"{}"
        _, _, rest = path.partition("/v2/a/kit/")
        kind, _, name = rest.partition("/")
        if kind == "manifests" and name == "1":
            return 200, {"Content-Type": registry.INDEXES[0]}, self.index
        if kind == "blobs" and name in self.blobs:
            return 307, {"Location": f"/stored/{name}"}, b""
        if path.startswith("/stored/"):
            return 200, {}, self.blobs[path.removeprefix("/stored/")] + self.damage
        if kind == "manifests" and name in self.blobs:
            return 200, {}, self.blobs[name]
        return 404, {}, b"{}"

    def ask(self, platform: str = "linux/arm64", login: Login | None = None, tag: str = "1") -> Any:
        return registry.ask(Reference(self.host, "a/kit", tag), platform, login)


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_stamp_layers_and_size_without_a_layer_being_moved(hub: Hub) -> None:
    found = hub.ask()
    assert (found.stamp, found.layers, found.size) == ("s1", ("sha256:arm64", "sha256:2"), 42)
    assert hub.ask("linux/amd64").layers[0] == "sha256:amd64"
    assert not any("sha256:x" in path for path, _ in hub.asked)
    with pytest.raises(Absent, match="none for linux/riscv64"):
        hub.ask("linux/riscv64")
    with pytest.raises(Absent, match="404"):
        hub.ask(tag="2")


def test_damaged_bytes_are_no_answer(hub: Hub) -> None:
    hub.damage = b" "
    with pytest.raises(OutOfReach, match="with other bytes"):
        hub.ask()


def test_the_login_goes_to_its_own_registry_alone(hub: Hub) -> None:
    hub.closed = True
    with pytest.raises(Absent, match="gives no token for it"):
        hub.ask()
    assert hub.ask(login=Login("me", Secret(TOKEN), hub.host)).stamp == "s1"
    hub.asked.clear()
    with pytest.raises(Absent):  # it is ghcr.io's
        hub.ask(login=Login("me", Secret(TOKEN)))
    sent = b64encode(f"me:{TOKEN}".encode()).decode()
    assert hub.asked and not any(sent in auth for _, auth in hub.asked)
    assert TOKEN not in repr(Login("me", Secret(TOKEN)))


def test_a_foreign_realm_gets_no_login(hub: Hub) -> None:
    """Nor is a token asked for without TLS, but of this machine."""
    elsewhere = Hub()
    try:
        hub.answer = lambda path, auth: (  # type: ignore[method-assign]
            401, {"WWW-Authenticate": f'Bearer realm="http://{elsewhere.host}/token"'}, b"{}"
        )  # fmt: skip
        with pytest.raises(Absent):
            hub.ask(login=Login("me", Secret(TOKEN), hub.host))
        assert elsewhere.asked and not any("Basic" in auth for _, auth in elsewhere.asked)
        hub.answer = lambda path, auth: (  # type: ignore[method-assign]
            401, {"WWW-Authenticate": 'Bearer realm="http://tokens.example/t"'}, b"{}"
        )  # fmt: skip
        with pytest.raises(OutOfReach, match="without TLS"):
            hub.ask()
    finally:
        elsewhere.server.shutdown()
        elsewhere.server.server_close()


def test_nobody_there_and_no_registry_there(hub: Hub) -> None:
    hub.answer = lambda path, auth: (200, {}, b"<html>log in to the hotel</html>")  # type: ignore
    with pytest.raises(OutOfReach, match="not a registry's"):
        hub.ask()
    hub.answer = lambda path, auth: (500, {}, b"")  # type: ignore
    with pytest.raises(OutOfReach, match="answers 500"):
        hub.ask()
    hub.server.shutdown()
    hub.server.server_close()
    with pytest.raises(OutOfReach, match="cannot be connected to"):
        hub.ask()


# ---- a daemon ----


class Pulling:
    """A Docker client whose pulls say what they were told to."""

    def __init__(self, *lines: dict[str, Any]) -> None:
        self.lines = lines
        self.given: dict[str, Any] = {}
        self.api = self
        self.timeout = 0

    def pull(self, name: str, **given: Any) -> Iterator[dict[str, Any]]:
        self.given = {"name": name, **given}
        yield from self.lines

    def close(self) -> None:
        pass


def test_a_pull_that_breaks_off_is_told_apart_and_its_login_is_its_registry_s() -> None:
    half = {"status": "Downloading", "id": "a", "progressDetail": {"current": 1, "total": 4 << 30}}
    said: list[str] = []
    login = Login("me", Secret(TOKEN))
    client = Pulling(half, {"error": "unexpected EOF"})
    store = ImageStore("head", lambda: client)  # type: ignore[arg-type, return-value]
    with pytest.raises(PullFailed, match="unexpected EOF"):
        store.pull("ghcr.io/a/b:c", "", login, said.append)
    assert said == ["Downloading, 0.00 of 4.29 GB known so far"]
    assert client.given["auth_config"] == {"username": "me", "password": TOKEN}
    assert (client.given["name"], client.given["tag"]) == ("ghcr.io/a/b", "c")
    client.lines = (half,)
    store.pull("r.io/a/b:c", "linux/arm64", login, said.append)
    assert client.given["auth_config"] is None and client.given["platform"] == "linux/arm64"
