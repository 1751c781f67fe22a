"""Every way in which ssh to the worker can fail has its own words: real sshd on 127.0.0.1."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__, "paramiko", "psutil")

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ssh_server
from ssh_server import ME, Server, keygen, reach

from launcher.nodes.endpoint import Endpoint
from launcher.nodes.prove import prove
from launcher.nodes.refusals import SshError
from launcher.nodes.ssh import SshNode

pytestmark = pytest.mark.skipif(ssh_server.missing() is not None, reason=str(ssh_server.missing()))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("sshd"))
    yield made
    made.stop()


def refusal(server: Server, endpoint: Endpoint, limit: float = 5) -> SshError:
    node = reach(server, endpoint)
    try:
        with pytest.raises(SshError) as told:
            node.run(["true"], timeout=limit)
        assert told.value.needed
        return told.value
    finally:
        node.close()


# --- what cannot be reached, and why


def test_a_name_that_does_not_resolve(server: Server) -> None:
    told = refusal(server, Endpoint("no-such-worker.invalid"))
    assert told.why == "name" and "getent hosts no-such-worker.invalid" in told.do_next
    assert refusal(server, Endpoint("no..worker")).why == "name"


def test_no_route(server: Server) -> None:
    # The kernel itself refuses this address; no packet leaves the machine.
    told = refusal(server, Endpoint("255.255.255.255"))
    assert told.why == "route" and "ip route get 255.255.255.255" in told.do_next and told.gone


def test_refused(server: Server) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        told = refusal(server, Endpoint("127.0.0.1", port=taken.getsockname()[1]))
    assert told.why == "refused" and "systemctl enable --now ssh" in told.do_next


def test_no_answer_to_a_connection(server: Server) -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for each in (first, second):  # the queue is full: the kernel drops what comes
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        started = time.monotonic()
        told = refusal(server, Endpoint("127.0.0.1", port=full.getsockname()[1]), 1)
    assert told.why == "timeout" and "ping -c 3 127.0.0.1" in told.do_next
    assert time.monotonic() - started < 2


def test_a_listener_that_never_speaks(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        started = time.monotonic()
        told = refusal(server, Endpoint("127.0.0.1", port=mute.getsockname()[1]), 1)
    assert told.why == "silent" and "greeting" in told.found
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"", "closed"),
        (b"Exceeded MaxStartups\r\n", "closed"),
        (b"SSH-2.0-x\r\n", "closed"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not ssh"),
    ],
)
def test_closed_during_the_handshake(server: Server, says: bytes, why: str) -> None:
    def serve() -> None:
        peer, _ = listening.accept()
        with peer:
            peer.sendall(says)
            time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        told = refusal(server, Endpoint("127.0.0.1", port=listening.getsockname()[1]))
    assert told.why == why
    assert ("sshd -t" if why == "closed" else "WORKER_SSH_PORT") in told.do_next


def test_an_unknown_host_key_is_shown_and_not_accepted(server: Server, tmp_path: Path) -> None:
    known = tmp_path / "known hosts"
    told = refusal(server, server.endpoint(known_hosts=str(known)))
    listed = ["ssh-keygen", "-lf", f"{server.hosts[0]}.pub"]
    fingerprint = subprocess.check_output(listed, text=True).split()[1]
    assert told.why == "unknown key" and fingerprint in told.found
    assert str(known) in told.needed and "StrictHostKeyChecking=ask" in told.do_next
    assert not known.exists()


def test_the_command_that_accepts_a_host_key_does(server: Server, tmp_path: Path) -> None:
    known = tmp_path / "known"
    node = reach(server, server.endpoint(known_hosts=str(known)))
    with pytest.raises(SshError) as told:
        node.run(["true"])
    command = told.value.do_next.split("by hand: ")[1].replace("=ask", "=accept-new")
    subprocess.run(["sh", "-c", command], check=True, timeout=20, stdin=subprocess.DEVNULL)
    assert node.run(["true"]).status == 0
    node.close()


def test_a_changed_host_key_names_file_and_line(server: Server, tmp_path: Path) -> None:
    other = Path(f"{keygen(tmp_path / 'other')}.pub").read_text()
    known = tmp_path / "known hosts"
    known.write_text(f"# a comment\nelsewhere {other}{server.name} {other}")
    told = refusal(server, server.endpoint(known_hosts=str(known)))
    assert told.why == "changed key" and f"{known} line 3" in told.found
    assert f"ssh-keygen -f '{known}' -R '{server.name}'" in told.do_next


def test_a_host_key_of_another_type_only(server: Server, tmp_path: Path) -> None:
    other = Path(f"{keygen(tmp_path / 'other', 'ecdsa')}.pub").read_text()
    known = tmp_path / "known"
    known.write_text(f"{server.name} {other}")
    told = refusal(server, server.endpoint(known_hosts=str(known)))
    assert told.why == "other key type" and "ecdsa-sha2-nistp256" in told.found


def test_a_revoked_host_key(server: Server, tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text(f"@revoked * {Path(f'{server.hosts[0]}.pub').read_text()}")
    assert refusal(server, server.endpoint(known_hosts=str(known))).why == "revoked key"


def test_hashed_names_and_patterns_are_known(server: Server, tmp_path: Path) -> None:
    key = Path(f"{server.hosts[0]}.pub").read_text()
    hashed, pattern, bare = tmp_path / "hashed", tmp_path / "pattern", tmp_path / "bare"
    hashed.write_text(f"{server.name} {key}")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(hashed)], check=True, capture_output=True)
    assert "127.0.0.1" not in hashed.read_text()
    pattern.write_text(f"[127.0.0.*]:* {key}")
    bare.write_text(f"127.0.0.1 {key}")
    for known in (hashed, pattern, bare):
        node = reach(server, server.endpoint(known_hosts=str(known)))
        assert node.run(["true"]).status == 0
        node.close()


def test_no_accepted_key_lists_what_was_tried(server: Server, tmp_path: Path) -> None:
    stranger = keygen(tmp_path / "stranger")
    told = refusal(server, server.endpoint(key=str(stranger)))
    assert told.why == "no key" and f"tried: {stranger} (ssh-ed25519 SHA256:" in told.found
    assert f"ssh-copy-id -i {stranger}.pub -p {server.port} {ME}@127.0.0.1" in told.do_next


def test_keys_that_cannot_be_used_say_why(server: Server, tmp_path: Path) -> None:
    locked = keygen(tmp_path / "locked", passphrase="secret")
    told = refusal(server, server.endpoint(key=str(locked)))
    assert told.why == "no key" and f"ssh-add {locked}" in told.found
    loose = Path(shutil.copy(server.key, tmp_path / "loose"))
    loose.chmod(0o644)
    assert f"chmod 600 {loose}" in refusal(server, server.endpoint(key=str(loose))).found
    broken = tmp_path / "broken"
    broken.write_text("no key")
    broken.chmod(0o600)
    assert "no private key" in refusal(server, server.endpoint(key=str(broken))).found
    absent = refusal(server, server.endpoint(key=str(tmp_path / "absent")))
    assert "no key was found" in absent.found and "ssh-keygen -t ed25519" in absent.do_next


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp()) / "agent"  # a socket's path must be short
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(place)], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(place))
    while not place.exists():
        time.sleep(0.02)
    yield place
    process.terminate()
    process.wait(5)
    shutil.rmtree(place.parent)


def add(*keys: Path) -> None:
    subprocess.run(["ssh-add", "-q", *map(str, keys)], check=True, capture_output=True)


def test_keys_of_an_agent(server: Server, agent: Path, tmp_path: Path) -> None:
    strangers = [keygen(tmp_path / f"stranger{n}") for n in range(8)]
    add(server.key, *strangers)
    node = reach(server, server.endpoint(key=""))
    assert node.run(["true"]).status == 0
    node.close()
    # A key with a passphrase is no obstacle once the agent has it: its public half finds it.
    known = Path(shutil.copy(f"{server.key}.pub", tmp_path / "locked.pub"))
    keygen(tmp_path / "other", passphrase="secret").rename(tmp_path / "locked")
    node = reach(server, server.endpoint(key=str(known.with_suffix(""))))
    assert node.run(["true"]).status == 0
    node.close()
    subprocess.run(["ssh-add", "-q", "-d", str(server.key)], check=True, capture_output=True)
    told = refusal(server, server.endpoint(key=""))
    assert told.why == "no key" and "stranger0 of ssh-agent" in told.found
    assert "more: the worker hung up before (its MaxAuthTries)" in told.found


def test_a_wrong_user_is_told_from_a_wrong_key(server: Server) -> None:
    told = refusal(server, server.endpoint(user="zurih"))
    assert told.why == "wrong user" and f"WORKER_USER={ME}" in told.do_next
    assert f"for {ME}, not for zurih" in told.found


def test_broken_ssh_configuration_of_the_user(server: Server, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("NoSuchWord yes\n")
    node = SshNode("worker", server.endpoint(), tmp_path / "ssh", include=str(mine))
    with pytest.raises(SshError) as told:
        node.run(["true"])
    assert told.value.why == "configuration" and f"{mine}: line 1" in told.value.found


# --- the user's own configuration


def test_an_alias_of_the_users_configuration(server: Server, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text(
        f"Host spark2\n  HostName 127.0.0.1\n  Port {server.port}\n  User {ME}\n"
        f"  IdentityFile {server.key}\n  UserKnownHostsFile {server.known}\n"
    )
    node = SshNode("worker", Endpoint("spark2"), tmp_path / "a b'c" / "ssh", include=str(mine))
    assert node.run(["true"]).status == 0
    assert node.config.stat().st_mode & 0o777 == 0o600
    node.close()


def test_a_proxy_command(server: Server, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text(f"Host 127.0.0.1\n  ProxyCommand ssh -F {tmp_path}/jump -W %h:%p door\n")
    (tmp_path / "jump").write_text(
        f"Host door\n  HostName 127.0.0.1\n  Port {server.port}\n  User {ME}\n  LogLevel ERROR\n"
        f"  IdentityFile {server.key}\n  UserKnownHostsFile {server.known}\n  BatchMode yes\n"
    )
    node = SshNode("worker", server.endpoint(), tmp_path / "ssh", include=str(mine))
    assert node.run(["echo", "through"]).text == "through\n"
    proxies = [each for each in psutil.Process().children() if "-W" in each.cmdline()]
    assert len(proxies) == 1
    node.close()
    assert not psutil.wait_procs(proxies, 3)[1]
    mine.write_text("Host 127.0.0.1\n  ProxyCommand sh -c 'echo no way there >&2; exit 1'\n")
    node = SshNode("worker", server.endpoint(), tmp_path / "ssh2", include=str(mine))
    with pytest.raises(SshError, match="no way there") as told:
        node.run(["true"])
    assert told.value.why == "closed"


# --- servers set up otherwise


def test_an_account_without_a_login() -> None:
    if os.getuid():
        pytest.skip("only root's sshd lets another account in")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)  # that account reads authorized_keys there
    server = Server(folder)
    try:
        node = reach(server, server.endpoint(user="daemon"))
        with pytest.raises(SshError) as told:
            prove(node)
        with pytest.raises(SshError) as raised:
            node.run(["true"])
        node.close()
    finally:
        server.stop()
        shutil.rmtree(folder)
    assert raised.value.why == "no login"
    assert "daemon may log in" in told.value.found
    assert "usermod -s /bin/bash daemon" in told.value.do_next


def test_a_server_that_takes_no_keys_and_one_without_sftp(tmp_path: Path) -> None:
    for n, (more, why) in enumerate(
        [("PubkeyAuthentication no\nHostbasedAuthentication yes", "keys refused"), ("", "no sftp")]
    ):
        server = Server(tmp_path / str(n), more, ("ecdsa", "ed25519"))
        server.know(server.hosts[1])  # the second kind that it offers is the one that is known
        config = server.folder / "sshd_config"
        if why == "no sftp":
            config.write_text(config.read_text().replace("Subsystem", "#"))
            server.stop()
            server.start()
        try:
            node = reach(server, server.endpoint())
            with pytest.raises(SshError) as told:
                node.read(Path("/proc/meminfo"))
            node.close()
        finally:
            server.stop()
        assert told.value.why == why
