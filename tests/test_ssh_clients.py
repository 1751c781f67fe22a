"""rsync and the Docker SDK over the worker's ssh destination, against a real sshd."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__, "paramiko", "docker", "psutil")

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
import ssh_server
from ssh_server import Server

from launcher.errors import LauncherError
from launcher.nodes import prove
from launcher.nodes.daemon import daemon, unusable
from launcher.nodes.ssh import SshNode

pytestmark = pytest.mark.skipif(ssh_server.missing() is not None, reason=str(ssh_server.missing()))

# Stands in for `docker system dial-stdio`: answers requests one after the other, as a daemon does.
DOCKER = """#!{python}
import json, os, sys, time
here = {here!r}
assert sys.argv[1:] == ["system", "dial-stdio"], sys.argv
try:
    mode = open(here + "/mode").read()
except FileNotFoundError:
    mode = ""
if mode == "down":
    sys.exit("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.")
if mode == "forbidden":
    sys.exit("permission denied while trying to connect to the Docker daemon socket")
while True:
    head = b""
    while not head.endswith(b"\\r\\n\\r\\n"):
        byte = sys.stdin.buffer.read(1)
        if not byte:
            sys.exit()
        head += byte
    path = head.split()[1].decode()
    if mode == "mute" or (mode == "mute later" and "version" not in path):
        time.sleep(4)
    with open(here + "/asked", "a") as asked:
        print(path, os.getpid(), file=asked)
    body = b"OK"
    if "version" in path:
        body = json.dumps({{"ApiVersion": "1.41", "Version": "20.10"}}).encode()
    if "/containers/json" in path:
        body = json.dumps([]).encode()
    out = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n"
    sys.stdout.buffer.write(out % len(body) + body)
    sys.stdout.buffer.flush()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    for name in ("bin", "bin2", "home"):
        (folder / name).mkdir()
    docker = folder / "bin" / "docker"
    docker.write_text(DOCKER.format(python=sys.executable, here=str(folder)))
    docker.chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    made = Server(folder, f"SetEnv PATH={path}")
    yield made
    made.stop()


@pytest.fixture
def node(server: Server) -> Iterator[SshNode]:
    (server.folder / "mode").unlink(missing_ok=True)
    (server.folder / "asked").unlink(missing_ok=True)
    made = SshNode("worker", server.endpoint(), server.folder / "a b'c", include="")
    yield made
    made.close()


def mode(server: Server, word: str) -> None:
    (server.folder / "mode").write_text(word)


def client_of(node: SshNode, timeout: float = 10.0):  # type: ignore[no-untyped-def]
    node.destination()
    return daemon(node.endpoint, node.folder, timeout=timeout, include="")


def test_all_three_clients_work(node: SshNode) -> None:
    assert prove.prove(node) == []


def test_requests_share_a_connection_and_know_the_servers_version(
    server: Server, node: SshNode
) -> None:
    client = client_of(node)
    assert client.ping() and client.version()["Version"] == "20.10"
    assert client.containers.list(all=True) == []
    rows = [row.split() for row in (server.folder / "asked").read_text().splitlines()]
    assert rows[0][0] == "/version" and rows[-1][0].startswith("/v1.41/containers/json")
    assert len({pid for _, pid in rows}) == 1
    started = [each for each in psutil.Process().children() if each.name() == "ssh"]
    client.close()
    assert not psutil.wait_procs(started, 3)[1]


def test_a_lost_connection_is_made_again(server: Server, node: SshNode) -> None:
    client = client_of(node)
    server.hang_up()
    time.sleep(0.3)
    assert client.ping()
    client.close()


@pytest.mark.parametrize(
    ("word", "found", "mend"),
    [
        ("down", "Cannot connect to the Docker daemon", "systemctl enable --now docker"),
        ("forbidden", "permission denied", "usermod -aG docker"),
    ],
)
def test_a_daemon_that_cannot_be_used(
    server: Server, node: SshNode, word: str, found: str, mend: str
) -> None:
    mode(server, word)
    (told,) = prove.prove(node)
    assert found in told.found and mend in told.mend and "the worker" in told.found


def test_a_worker_without_docker_or_rsync(server: Server, node: SshNode) -> None:
    only = server.folder / "bin2"
    for name in ("sh", "timeout", "env", "printf", "true"):
        if not (only / name).exists():
            (only / name).symlink_to(f"/usr/bin/{name}")
    config = server.folder / "sshd_config"
    whole = config.read_text()
    config.write_text(
        "\n".join(
            f"SetEnv PATH={only}" if row.startswith("SetEnv") else row for row in whole.splitlines()
        )
        + "\n"
    )
    server.stop()
    server.start()
    try:
        copies, containers = prove.prove(node)
    finally:
        config.write_text(whole)
        server.stop()
        server.start()
    assert "apt install rsync" in copies.mend and "rsync" in copies.found
    assert "apt install docker.io" in containers.mend


def test_a_silent_daemon_is_left_at_the_limit(server: Server, node: SshNode) -> None:
    mode(server, "mute later")
    client = client_of(node)  # a busy machine takes its time to connect
    client.api.timeout = 1
    started = time.monotonic()
    with pytest.raises(requests.RequestException) as told:
        client.ping()
    assert time.monotonic() - started < 3
    assert "timed out" in unusable(node.endpoint, node.folder, told.value).found
    client.close()
    mode(server, "mute")
    with pytest.raises(LauncherError, match="timed out"):
        client_of(node, timeout=1)


def test_a_frozen_worker_is_left_at_the_limit(server: Server, node: SshNode) -> None:
    client = client_of(node)
    assert client.ping()
    client.api.timeout = 1
    server.freeze()
    started = time.monotonic()
    try:
        with pytest.raises(requests.RequestException):
            client.ping()
    finally:
        server.thaw()
    assert time.monotonic() - started < 3
    client.close()


def test_an_unknown_host_key_stops_docker_and_rsync_too(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    endpoint = server.endpoint(known_hosts=str(tmp_path / "none"))
    node = SshNode("worker", endpoint, tmp_path / "ssh", include="")
    node.destination()
    (copies,), (containers,) = prove.copies(node, prove.LocalNode()), prove.containers(node)
    for each in (copies, containers):
        assert "Host key verification failed" in each.found and "ssh -F" in each.mend
    with pytest.raises(LauncherError) as first:
        prove.prove(node)
    assert "SHA256:" in first.value.found
    assert not (tmp_path / "none").exists()
    assert capfd.readouterr().err == ""


def test_this_machines_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    with pytest.raises(LauncherError) as told:
        daemon(None)
    assert "this machine" in told.value.found and told.value.do_next.startswith("sudo systemctl")
