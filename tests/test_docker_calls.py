"""Calls to Docker that end in time, over the SDK's own ssh transport with an ssh that does not."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import docker
import pytest

from launcher.runtimes.docker import DockerRuntime
from launcher.runtimes.reach import MOST_LEFT, Reach, Unreachable

SLOW = "echo $$ >> {here}/pids; exec sleep 60"
DEAD = "echo refused >&2; exit 255"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put an ``ssh`` in the place of the real one; what it started is ended by its pid."""
    here = tmp_path / "bin"
    here.mkdir()
    monkeypatch.setenv("PATH", f"{here}:/usr/bin:/bin")

    def be(code: str) -> None:
        (here / "ssh").write_text(f"#!/bin/sh\n{code.format(here=here)}\n")
        (here / "ssh").chmod(0o755)

    return be


def over_ssh() -> docker.DockerClient:
    return docker.DockerClient("ssh://dsv41-worker", version="1.44", use_ssh_client=True)


def end(here: Path) -> None:

    for pid in (here / "bin" / "pids").read_text().split():
        os.kill(int(pid), signal.SIGKILL)


def test_an_ssh_that_says_nothing_ends_at_the_deadline_and_is_not_piled_up(
    ssh: Callable[[str], None], tmp_path: Path
) -> None:
    ssh(SLOW)
    reach = Reach(over_ssh, timeout=0.5)
    for _ in range(MOST_LEFT):
        began = time.monotonic()
        with pytest.raises(Unreachable, match=r"no answer within 0\.5 s"):
            reach.call(lambda client: client.ping())
        assert time.monotonic() - began < 2
    began = time.monotonic()
    with pytest.raises(Unreachable, match="3 earlier calls"):
        reach.call(lambda client: client.ping())
    assert time.monotonic() - began < 0.2
    end(tmp_path)  # as ssh itself ends after ServerAliveInterval
    time.sleep(0.5)
    ssh(DEAD)
    with pytest.raises(Unreachable, match="cannot be asked"):
        reach.call(lambda client: client.ping())


def test_an_ssh_that_ends_at_once_is_told_at_once(ssh: Callable[[str], None]) -> None:
    ssh(DEAD)
    began = time.monotonic()
    with pytest.raises(Unreachable, match="cannot be asked"):
        Reach(over_ssh).call(lambda client: client.ping())
    assert time.monotonic() - began < 5


def test_a_loss_makes_a_new_client(tmp_path: Path) -> None:
    made: list[int] = []
    path = tmp_path / "docker.sock"

    def factory() -> docker.DockerClient:
        made.append(1)
        return docker.DockerClient(f"unix://{path}", version="1.44")

    reach = Reach(factory, timeout=5)
    for _ in range(2):
        with pytest.raises(Unreachable, match="No such file or directory"):
            reach.call(lambda client: client.ping())
    assert len(made) == 2
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def answer() -> None:
            for _ in range(2):
                peer, _ = server.accept()
                with peer:
                    peer.recv(4096)
                    peer.sendall(
                        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nOK"
                    )

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert reach.call(lambda client: client.ping()) is True
        assert reach.call(lambda client: client.ping()) is True
        thread.join(5)
    assert len(made) == 3


def test_a_factory_that_hangs_is_left_to_itself() -> None:
    went_on = threading.Event()

    def factory() -> docker.DockerClient:
        went_on.wait(10)
        raise OSError(111, "Connection refused")

    reach = Reach(factory, timeout=0.1)
    with pytest.raises(Unreachable, match="no answer"):
        reach.call(lambda client: client.ping())
    went_on.set()
    time.sleep(0.1)
    with pytest.raises(Unreachable, match="Connection refused"):
        reach.call(lambda client: client.ping())


def test_no_method_of_the_runtime_hangs_on_a_worker_that_is_gone(
    ssh: Callable[[str], None], tmp_path: Path
) -> None:
    ssh(SLOW)
    runtime = DockerRuntime(
        {"worker": over_ssh}, {}, {"worker": "w"}, "spark-1:/kit", tmp_path / "logs", timeout=0.3
    )
    said: list[str] = []
    began = time.monotonic()
    status = runtime.inspect("worker")
    assert status.state == "unreachable" and not status.running
    assert status.ending() == ("cannot be reached (its Docker daemon gave no answer within 0.3 s)")
    assert runtime.stop("worker", 5).state == "unreachable"
    assert runtime.lines("worker") == []
    assert runtime.activity("worker") is None
    assert not runtime.save_log("worker", tmp_path / "w.log")
    assert "could not be asked" in runtime.stacks("worker", tmp_path / "w.log")
    runtime.tail("worker", 5, said.append)
    assert "cannot be read" in said[0]
    assert time.monotonic() - began < 5
    end(tmp_path)
