"""The worker over ssh, against a real sshd on 127.0.0.1."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__, "paramiko", "psutil")

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ssh_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ssh_server import Server, reach

from launcher.errors import LauncherError
from launcher.nodes.base import Node
from launcher.nodes.local import LocalNode
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
