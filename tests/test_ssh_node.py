"""The worker over ssh, against a real sshd on 127.0.0.1."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__, "paramiko", "psutil")

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ssh_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ssh_server import ME, Server, keygen

from launcher.errors import LauncherError
from launcher.nodes.base import Node
from launcher.nodes.endpoint import Endpoint
from launcher.nodes.local import LocalNode
from launcher.nodes.prove import prove
from launcher.nodes.refusals import SshError
from launcher.nodes.ssh import SESSIONS, SshNode

pytestmark = pytest.mark.skipif(ssh_server.missing() is not None, reason=str(ssh_server.missing()))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("sshd"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def worker(server: Server) -> Iterator[SshNode]:
    """One node for all; each test leaves it usable, as it must be."""
    node = reach(server, server.endpoint())
    yield node
    node.close()


def reach(server: Server, endpoint: Endpoint) -> SshNode:
    return SshNode("worker", endpoint, server.folder / "ssh", include="")


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


# --- commands


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=40)
hard = st.one_of(
    texts, st.sampled_from(["$(id)", "`id`", "a'b\"c", "\n", "-n", "*", "~", "\\", ""])
)
names = texts.filter(lambda name: name and "=" not in name)
file_names = texts.filter(
    lambda name: name not in ("", ".", "..") and "/" not in name and len(name.encode()) < 120
)
SHOW = "import os,sys,json; json.dump([sys.argv[1:],dict(os.environ),os.getcwd()],sys.stdout)"


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    argv=st.lists(hard, max_size=8),
    env=st.dictionaries(names, hard, max_size=4),
    path=file_names,
    data=st.binary(max_size=50),
)
def test_values_arrive_unchanged(
    worker: SshNode,
    tmp_path: Path,
    argv: list[str],
    env: dict[str, str],
    path: str,
    data: bytes,
) -> None:
    folder = tmp_path / path
    folder.mkdir(exist_ok=True)
    given_env = {**env, "PYTHONUTF8": "1"}
    done = worker.run([sys.executable, "-c", SHOW, *argv], env=given_env, cwd=str(folder))
    assert done.status == 0, done.err
    there, variables, place = json.loads(done.out)
    assert there == argv and place == str(folder)
    variables.pop("LC_CTYPE", None)
    assert {**variables, **given_env} == variables
    assert set(variables) - set(given_env) <= {"PWD"}
    file = folder / path
    worker.write(file, data, 0o640)
    assert file.read_bytes() == data == worker.read(file)
    assert file.stat().st_mode & 0o777 == 0o640
    assert worker.size(file) == len(data) and os.listdir(folder) == [path]
    worker.remove(folder)
    assert not worker.exists(folder)


def test_it_is_a_node(worker: SshNode) -> None:
    node: Node = worker
    theirs, ours = node.facts(), LocalNode().facts()
    same = ("hostname", "user", "uid", "boot_id", "machine")
    assert all(getattr(theirs, each) == getattr(ours, each) for each in same)
    assert theirs.processors >= 1 and theirs.memory_available > 1 << 20
    free = node.free_bytes(Path("/tmp/not here/nor there"))
    assert abs(free - LocalNode().free_bytes(Path("/tmp"))) < 1 << 30


def test_status_signal_output_and_input(worker: SshNode) -> None:
    lines: list[str] = []
    script = 'cat; printf "last" ; echo oh >&2; exit 3'
    done = worker.run(["sh", "-c", script], stdin=b"one\r\ntwo\n", line=lines.append)
    assert (done.status, done.out, done.err) == (3, b"one\r\ntwo\nlast", b"oh\n")
    assert sorted(lines) == ["last", "oh", "one", "two"]
    assert worker.run(["sh", "-c", "kill -9 $$"]).status == -9
    much = os.urandom(3_000_000)
    assert worker.run(["cat"], stdin=much).out == much[-(1 << 20) :]
    assert worker.run(["true"], stdin=much).status == 0


def test_a_grandchild_that_keeps_the_output_open(worker: SshNode) -> None:
    started = time.monotonic()
    done = worker.run(["sh", "-c", "sleep 4 & echo done"], timeout=20)
    assert done.text == "done\n" and time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("argv", "cwd"), [(["no-such-program"], None), (["/etc/passwd"], None), (["true"], "/no/dir")]
)
def test_a_program_that_cannot_be_started(worker: SshNode, argv: list[str], cwd: str) -> None:
    with pytest.raises(LauncherError, match="could not be started on worker"):
        worker.run(argv, cwd=cwd)


@pytest.mark.parametrize("argv", [[], [""], ["A=1"], ["echo", "a\0b"], ["echo", "x" * 130_000]])
def test_a_command_that_cannot_be_said(worker: SshNode, argv: list[str]) -> None:
    with pytest.raises(LauncherError):
        worker.run(argv)


def running(mark: str) -> list[psutil.Process]:
    return [
        each for each in psutil.process_iter(["cmdline"]) if mark in (each.info["cmdline"] or [])
    ]


def wait_until_gone(mark: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while running(mark):
        assert time.monotonic() < end, running(mark)
        time.sleep(0.05)


def test_a_command_past_its_limit_is_ended(worker: SshNode) -> None:
    started = time.monotonic()
    with pytest.raises(LauncherError, match=r"still ran on worker after 0\.5 s"):
        worker.run(["sleep", "31.4151"], timeout=0.5)
    assert time.monotonic() - started < 2
    wait_until_gone("31.4151", 2)


def test_an_interrupted_call_ends_its_command(worker: SshNode) -> None:
    def interrupt() -> None:
        assert running("31.4152")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.run(["sleep", "31.4152"], tick=interrupt)
    wait_until_gone("31.4152", 3)
    assert worker.run(["true"]).status == 0


def test_many_threads_share_one_connection(server: Server, worker: SshNode) -> None:
    worker.run(["true"])
    before, results = len(server.process_connections()), []

    def ask(n: int) -> None:
        results.append(worker.run(["sh", "-c", f"sleep 0.2; echo {n}"]).text)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(SESSIONS + 4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert sorted(results, key=int) == [f"{n}\n" for n in range(SESSIONS + 4)]
    assert len(server.process_connections()) == before == 1


# --- files


def test_files_are_replaced_whole_and_closed_from_the_start(
    worker: SshNode, tmp_path: Path
) -> None:
    file = tmp_path / "new" / "deep" / "file"
    worker.write(file, b"one", 0o600)
    worker.write(file, b"two", 0o600)
    assert file.read_bytes() == b"two" and file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(file.parent) == ["file"]
    with pytest.raises(LauncherError, match="writing"):
        worker.write(tmp_path / "new" / "deep", b"a directory is there")
    assert os.listdir(tmp_path / "new") == ["deep"]
    source = tmp_path / "source"
    source.write_bytes(os.urandom(1_500_000))
    worker.copy(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_files_that_are_not_there(worker: SshNode, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="worker:"):
        worker.read(tmp_path / "none")
    assert worker.size(tmp_path / "none") is None and worker.size(tmp_path) is None
    worker.remove(tmp_path / "none")
    assert b"MemAvailable" in worker.read(Path("/proc/meminfo"))
    with pytest.raises(LauncherError, match="writing"):
        worker.write(Path("/proc/none/file"), b"")


# --- losses


def test_a_lost_connection_is_made_again(server: Server, worker: SshNode, tmp_path: Path) -> None:
    worker.run(["true"])
    server.hang_up()
    assert worker.run(["true"]).status == 0
    server.hang_up()
    worker.write(tmp_path / "file", b"x")
    assert worker.read(tmp_path / "file") == b"x"


def test_a_loss_under_a_command_is_told_and_not_repeated(server: Server, worker: SshNode) -> None:
    timer = threading.Timer(0.5, server.hang_up)
    timer.start()
    with pytest.raises(SshError) as told:
        worker.run(["sleep", "5"])
    assert told.value.why == "lost" and "while sleep ran" in told.value.found
    assert worker.run(["true"]).status == 0


def test_a_restarted_server(server: Server, worker: SshNode) -> None:
    server.stop()
    with pytest.raises(SshError) as told:
        worker.run(["true"])
    assert told.value.why == "refused"
    server.start()
    assert worker.run(["true"]).status == 0


def test_no_call_waits_for_a_silent_peer(server: Server, worker: SshNode) -> None:
    worker.run(["true"])
    server.freeze()
    started = time.monotonic()
    with pytest.raises(SshError) as told:
        worker.run(["true"], timeout=1)
    assert told.value.why == "silent" and time.monotonic() - started < 2
    server.thaw()
    assert worker.run(["true"]).status == 0


def test_a_peer_that_goes_silent_under_a_command(server: Server, worker: SshNode) -> None:
    timer = threading.Timer(0.3, server.freeze)
    timer.start()
    started = time.monotonic()
    with pytest.raises(SshError) as told:
        worker.run(["sleep", "1"], timeout=1, stdin=b"x" * 8_000_000)
    assert told.value.why == "silent" and time.monotonic() - started < 5
    server.thaw()
    assert worker.run(["true"]).status == 0


def test_the_pulse_ends_a_long_wait(
    server: Server, worker: SshNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.nodes.connection.PULSE", 0.2)
    monkeypatch.setattr("launcher.nodes.connection.SILENCE", 0.6)
    worker.close()
    timer = threading.Timer(0.3, server.freeze)
    timer.start()
    started = time.monotonic()
    with pytest.raises(SshError) as told:
        worker.run(["sleep", "50"], timeout=60)
    assert told.value.why == "silent" and time.monotonic() - started < 3
    server.thaw()
    monkeypatch.undo()
    worker.close()
    assert worker.run(["true"]).status == 0


# --- servers set up otherwise


def test_an_account_without_a_login() -> None:
    if os.getuid():
        pytest.skip("only root's sshd lets another account in")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)  # that account reads authorized_keys there
    server = Server(folder)
    try:
        node = reach(server, server.endpoint(user="daemon"))
        told = prove(node)
        with pytest.raises(SshError) as raised:
            node.run(["true"])
        node.close()
    finally:
        server.stop()
        shutil.rmtree(folder)
    assert raised.value.why == "no login"
    assert len(told) == 1 and "daemon may log in" in told[0].found
    assert "usermod -s /bin/bash daemon" in told[0].mend


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
