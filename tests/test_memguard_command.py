"""The memory guard as a command: what it refuses, what it says, and how it ends."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from guarded_node import SERVER, Node, Story

from launcher.watch import memguard
from launcher.watch.guard import __main__ as command
from launcher.watch.guard.engine import SOCKET, DockerFault, Engine, socket_of
from launcher.watch.guard.target import Tree


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "proc")


def test_another_daemon_s_address_is_refused(tmp_path: Path) -> None:
    assert socket_of({"DOCKER_HOST": "unix:///x.sock"}) == "/x.sock"
    with pytest.raises(DockerFault, match="this node's own"):
        socket_of({"DOCKER_HOST": "ssh://worker"})
    if not Path(SOCKET).exists():
        (tmp_path / "docker.sock").touch()
        assert socket_of({"XDG_RUNTIME_DIR": str(tmp_path)}) == str(tmp_path / "docker.sock")
    with pytest.raises(DockerFault, match="does not answer") as fault:
        Engine(str(tmp_path / "none")).inspect("x")
    assert "systemctl status docker" in fault.value.needed


@pytest.mark.parametrize(
    ("argv", "environ", "told"),
    [
        ([], {}, "name one container"),
        (["x", "--pid", "1"], {}, "name one container"),
        (["x", "lots"], {}, "'lots' is no number"),
        (["x"], {"DSV41_MEM_GUARD_GIB": "lots"}, "DSV41_MEM_GUARD_GIB: 'lots'"),
        (["x"], {"DSV41_MEM_GUARD_SAMPLES": "0"}, "DSV41_MEM_GUARD_SAMPLES: '0'"),
        (["--pid", "-3"], {}, "no whole number"),
        ([""], {}, "name one container"),
    ],
)
def test_what_cannot_be_is_refused(
    argv: list[str], environ: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(argv, environ)
    assert end.value.code == 2 and told in capsys.readouterr().err


def test_the_dot_env_s_word_is_above_the_environment_s(tmp_path: Path) -> None:
    assert memguard.environment(tmp_path, {"DSV41_MEM_GUARD": "1"}) == {"DSV41_MEM_GUARD": "1"}
    (tmp_path / ".env").write_text("DSV41_MEM_GUARD=1\nDSV41_MEM_GUARD_GIB='2.5'\n")
    found = memguard.environment(tmp_path, {"DSV41_MEM_GUARD": "0", "DSV41_MEM_GUARD_ANY": "1"})
    assert found == {
        "DSV41_MEM_GUARD": "1", "DSV41_MEM_GUARD_GIB": "2.5", "DSV41_MEM_GUARD_ANY": "1"
    }  # fmt: skip
    (tmp_path / ".env").write_text("DSV41_MEM_GUARD=yes\n")
    assert memguard.main(["x"], {}, tmp_path) == 2


SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "memguard.sh"


def test_a_server_that_ends_by_itself(tmp_path: Path) -> None:
    """The script itself, beside a process that lives for a moment."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        words = [str(SCRIPT), "--pid", str(server.pid), "--gib", "0", "--armed"]
        log, held = tmp_path / "guard.log", tmp_path / "guard.pid"
        words += ["--log", str(log), "--pidfile", str(held)]
        with subprocess.Popen(words) as guard:
            while not (tmp_path / "guard.log.low.json").exists():
                assert guard.poll() is None
                time.sleep(0.05)
            assert " armed: " in log.read_text()
            assert held.read_text().strip() == str(guard.pid)
            server.communicate(b"\n")
            assert guard.wait(20) == 0
    assert f"pid {server.pid} is gone" in log.read_text()
    low = json.loads((tmp_path / "guard.log.low.json").read_text())
    assert low["available"] > 0 and not (tmp_path / "guard.log.why.json").exists()


def test_a_pid_is_not_waited_for_and_is_known_by_its_first_look(tmp_path: Path) -> None:
    """Whoever has it later is another, and would be stopped in the server's place."""
    began = time.monotonic()
    done = subprocess.run([str(SCRIPT), "--pid", str(2**30)], capture_output=True, text=True)
    assert done.returncode == 1 and "needed: the pid of a running server" in done.stderr
    assert time.monotonic() - began < 30
    node = Node(tmp_path / "proc")
    node.write()
    tree = Tree(SERVER, node.root)
    assert tree.find() and tree.find()
    stat = node.root / str(SERVER) / "stat"
    stat.write_text(stat.read_text().replace(f" {SERVER * 10} ", " 77 "))
    assert not tree.find() and SERVER not in tree.pids()


def test_a_container_that_never_comes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.names_given = {}
    story = Story(node, lambda at: None)
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    assert not command._found(node.container(), story, 0.0)  # type: ignore[arg-type]
    assert story.told("did not come within 0 s: it does not run")


def test_a_full_disk_behind_its_output_does_not_end_it() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server,
        open("/dev/full", "wb") as full,
        subprocess.Popen(
            [str(SCRIPT), "--pid", str(server.pid)], stdout=full, stderr=subprocess.PIPE
        ) as guard,
    ):
        with pytest.raises(subprocess.TimeoutExpired):
            guard.wait(2)
        server.communicate(b"\n")
        _, told = guard.communicate(timeout=20)
        assert guard.returncode == 0 and told == b""


def test_a_guard_that_is_ended_says_that_nobody_guards(tmp_path: Path) -> None:
    log = tmp_path / "guard.log"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        words = [str(SCRIPT), "--pid", str(server.pid), "--log", str(log)]
        with subprocess.Popen(words) as guard:
            while not (tmp_path / "guard.log.low.json").exists():
                assert guard.poll() is None
                time.sleep(0.05)
            guard.terminate()
            assert guard.wait(20) == 128 + 15
        server.communicate(b"\n")
    assert f"ended by SIGTERM: nobody guards pid {server.pid} now" in log.read_text()


def test_its_own_tree_is_not_guarded_from_within(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(SCRIPT), "--pid", str(os.getpid()), "--wait", "1"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "holds the guard itself" in done.stdout


def test_a_log_that_cannot_be_written_is_told_before_it_goes_into_the_background(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    words = [str(SCRIPT), "--pid", str(os.getpid()), "--detach", "--log", f"{tmp_path}/file/x.log"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "a file that this user may write" in done.stderr


def test_with_no_environment_at_all() -> None:
    words = ["env", "-i", "/bin/sh", str(SCRIPT), "--pid", str(2**30), "--wait", "0"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and f"no process {2**30} runs" in done.stderr, done.stderr
