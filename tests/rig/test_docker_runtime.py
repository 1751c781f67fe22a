"""Ranks as containers of two real Docker daemons: every way to start, look, read and end."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import daemons
import pytest
from daemons import IMAGE, Daemon

from launcher.commands.container import SECRETS, Container, Mount, Ulimit
from launcher.deployment import Rank, Role
from launcher.errors import LauncherError
from launcher.nodes.daemon import daemon
from launcher.nodes.endpoint import Endpoint
from launcher.nodes.local import LocalNode
from launcher.runtimes.docker import DockerRuntime

pytestmark = pytest.mark.rig

ROOT = Path(__file__).resolve().parents[2]
OWNER = "spark-1:/home/me/kit"
NAMES = {"head": "dsv41-exl3-head", "worker": "dsv41-exl3-worker"}
PYTHON = "/usr/bin/python3"
INSTALL = "from spark_overlay import stacks; stacks.install()\n"
SLEEP = "import time\ndef asleep(): time.sleep(600)\nasleep()\n"
SAY = "print('up', flush=True)\n"


class Pair:
    """Two daemons and the runtime over them; ``code`` is what the next rank runs."""

    def __init__(self, nodes: dict[str, Daemon], folder: Path, owner: str = OWNER) -> None:
        self.nodes = nodes
        self.folder = folder
        self.owner = owner
        self.image = IMAGE
        self.runtime = DockerRuntime(
            {
                "head": nodes["head"].client,
                "worker": lambda: daemon(Endpoint("nowhere"), folder / "ssh", include=""),
            },
            {role: partial(LocalNode, role) for role in nodes},
            NAMES,
            owner,
            folder / "logs",
            describe=self.describe,
            timeout=3,
        )
        self.mounts: Sequence[Mount] = ()

    def describe(self, rank: Rank) -> Container:
        cache = self.folder / rank.role / "cache"
        secret = str(self.folder / rank.role / SECRETS / "ours" / "l1" / "secret.env")
        mounts = [
            Mount(str(ROOT / "overlay"), "/opt/overlay"),
            Mount(str(cache), "/cache", read_only=False),
            *self.mounts,
        ]
        if rank.secret_env:
            mounts.append(Mount(secret, "/run/spark/secret.env"))
        return Container(
            name=NAMES[rank.role],
            image=self.image,
            argv=rank.argv,
            env={
                **rank.env,
                "PYTHONPATH": "/opt/overlay",
                "PYTHONUNBUFFERED": "1",
                "SPARK_LAUNCH_ID": "l1",
                **({"SPARK_SECRET_ENV": "/run/spark/secret.env"} if rank.secret_env else {}),
            },
            labels={"dsv41.launch": "l1", "dsv41.role": rank.role, "dsv41.owner": self.owner},
            mounts=tuple(mounts),
            devices=("/dev/fuse",) if Path("/dev/fuse").exists() else ("/dev/full",),
            gpus=False,  # this machine has no hook for them
            ulimits=(Ulimit("core", 0, 0),),
            secret_file=secret if rank.secret_env else "",
            secret_env=rank.secret_env,
        )

    def start(self, code: str, role: Role = "head", secret: dict[str, str] | None = None) -> int:
        argv = (PYTHON, "-c", code)
        return self.runtime.start(Rank(0, role, role, argv, {}, secret or {}, {}), "l1")

    def raw(self, role: Role = "head") -> dict[str, Any]:
        return dict(self.nodes[role].client().api.inspect_container(NAMES[role]))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Daemon]]:
    with daemons.pair(tmp_path_factory.mktemp("daemons")) as (head, worker):
        yield {"head": head, "worker": worker}


@pytest.fixture
def pair(
    nodes: dict[str, Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    """The worker's daemon is asked as over ssh, with an `ssh` that runs on this machine what it is
    told to run on the other."""
    shim = tmp_path / "bin" / "ssh"
    shim.parent.mkdir()
    socket = nodes["worker"].socket
    shim.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" -G "*) exec /usr/bin/ssh "$@";; esac\n'
        "for last; do :; done\n"
        f"export DOCKER_HOST=unix://{socket}\n"
        'exec sh -c "exec $last"\n'
    )
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    yield Pair(nodes, tmp_path)
    for node in nodes.values():
        node.clear()


def until(true: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def collect(pair: Pair, *wanted: str, role: Role = "head") -> list[str]:
    seen: list[str] = []

    def came() -> bool:
        seen.extend(pair.runtime.lines(role))
        return all(any(want in line for line in seen) for want in wanted)

    until(came)
    return seen


def test_a_pair_starts_runs_and_stops_and_leaves_nothing(pair: Pair) -> None:
    code = (
        "import multiprocessing.shared_memory as m, os, resource\n"
        "m.SharedMemory('spark-left', create=True, size=4096)\n"
        "print('oom', open('/proc/self/oom_score_adj').read().strip())\n"
        "print('core', resource.getrlimit(resource.RLIMIT_CORE))\n"
    )
    shm = set(os.listdir("/dev/shm"))
    for role in ("worker", "head"):
        assert pair.start(code + SAY + SLEEP, role) > 0  # type: ignore[arg-type]
    for role in ("worker", "head"):
        status = pair.runtime.inspect(role)
        assert status.running and status.launch_id == "l1" and status.pid
        assert status.since and abs(time.time() - status.since) < 60
        seen = collect(pair, "up", role=role)  # type: ignore[arg-type]
        assert "oom 1000" in seen and "core (0, 0)" in seen
    assert set(os.listdir("/dev/shm")) == shm
    for role in ("head", "worker"):
        last = pair.runtime.stop(role, 1)
        assert (last.state, last.note) == ("exited", "as asked")
        assert pair.runtime.inspect(role).state == "absent"
        assert "up" in pair.runtime.log_path(role).read_text().splitlines()
        assert pair.runtime.stop(role, 1).state == "absent"
    assert set(os.listdir("/dev/shm")) == shm


def test_secrets_are_in_a_private_file_only_and_go_with_the_rank(pair: Pair) -> None:
    value = 's3cret "q" $(id)\nline two'
    code = (
        "import os\nfrom spark_overlay.serving import secret_env\n"
        "assert 'KEY' not in os.environ\nsecret_env.load(os.environ)\n"
        "print('same', __import__('hashlib').sha256(os.environ['KEY'].encode()).hexdigest())\n"
    )
    pair.start(code + SLEEP, secret={"KEY": value})
    collect(pair, "same " + hashlib.sha256(value.encode()).hexdigest())
    assert "s3cret" not in json.dumps(pair.raw())
    file = pair.folder / "head" / SECRETS / "ours" / "l1" / "secret.env"
    assert file.stat().st_mode & 0o777 == 0o600
    pair.runtime.stop("head", 0)
    assert not file.parent.exists()


def test_how_a_rank_ended_is_told_with_its_last_lines(pair: Pair) -> None:
    pair.start("print('last words'); raise SystemExit(3)")
    until(lambda: pair.runtime.inspect("head").state == "exited")
    status = pair.runtime.inspect("head")
    assert (status.exit_code, status.signal) == (3, None)
    assert status.last_lines == ("last words",)
    assert status.ending() == "ended with exit code 3" and status.ended
    # An ended one of ours makes room.
    pid = pair.start(SAY + "import os; os.kill(os.getpid(), 9)")
    assert pid > 0
    until(lambda: pair.runtime.inspect("head").state == "exited")
    assert pair.runtime.inspect("head").signal == "SIGKILL"


def test_a_deaf_rank_is_forced_after_the_grace(pair: Pair) -> None:
    pair.start("import signal; signal.signal(15, signal.SIG_IGN)\n" + SAY + SLEEP)
    collect(pair, "up")
    began = time.monotonic()
    assert pair.runtime.stop("head", 1).signal == "SIGKILL"
    assert 1 <= time.monotonic() - began < 10


def test_one_rank_a_role(pair: Pair) -> None:
    pair.start(SLEEP)
    with pytest.raises(LauncherError, match="a head rank runs already"):
        pair.start(SLEEP)
    assert pair.runtime.inspect("head").running


def test_a_container_of_another_checkout_is_neither_replaced_nor_stopped(
    pair: Pair, tmp_path: Path
) -> None:
    other = Pair(pair.nodes, tmp_path, owner="spark-1:/elsewhere")
    other.start(SAY + SLEEP)
    ident = pair.raw()["Id"]
    with pytest.raises(LauncherError, match="spark-1:/elsewhere") as told:
        pair.start(SLEEP)
    assert "CONTAINER_HEAD" in told.value.do_next
    assert pair.runtime.inspect("head").state == "absent"
    assert "spark-1:/elsewhere" in pair.runtime.inspect("head").ending()
    assert pair.runtime.stop("head", 0).state == "absent"
    assert not pair.runtime.save_log("head", tmp_path / "log")
    assert "no container" in pair.runtime.stacks("head", tmp_path / "log")
    assert pair.raw()["Id"] == ident and other.runtime.inspect("head").running


def test_a_stranger_without_labels_is_told_as_one(pair: Pair) -> None:
    pair.nodes["head"].client().containers.run(
        IMAGE, [PYTHON, "-c", SLEEP], name=NAMES["head"], detach=True, network_mode="none"
    )
    with pytest.raises(LauncherError, match="not started by a launcher"):
        pair.start(SLEEP)
    assert pair.raw()["State"]["Running"]


def test_what_docker_refuses_is_told_and_leaves_nothing(pair: Pair, tmp_path: Path) -> None:
    pair.image = "spark-rig/none:9"
    with pytest.raises(LauncherError, match="the image spark-rig/none:9 is not there"):
        pair.start(SLEEP, secret={"KEY": "x"})
    assert not (pair.folder / "head" / SECRETS / "ours" / "l1").exists()
    pair.image = IMAGE
    pair.mounts = (Mount(str(tmp_path / "gone"), "/model"),)
    with pytest.raises(LauncherError, match="bind source path does not exist"):
        pair.start(SLEEP)
    pair.mounts = ()
    assert pair.runtime.inspect("head").state == "absent"


def test_a_program_that_is_not_there_is_named_by_the_last_lines(pair: Pair) -> None:
    pair.runtime.start(Rank(0, "head", "head", ("/no/program",), {}, {}, {}), "l1")
    until(lambda: pair.runtime.inspect("head").state == "exited")
    status = pair.runtime.inspect("head")
    assert status.exit_code == 127 and "/no/program" in status.last_lines[-1]


def test_each_line_comes_once_and_only_work_counts(pair: Pair) -> None:
    code = (
        "import sys, time\n"
        "for n in range(40):\n"
        "    print(f'out {n}', flush=True); print(f'err {n}', file=sys.stderr, flush=True)\n"
        "    print('[shm_broadcast.py:878] No available', flush=True); time.sleep(0.05)\n"
    )
    pair.start(code + SAY + SLEEP)
    seen = collect(pair, "up")
    work = [line for line in seen if "shm" not in line]
    assert sorted(work) == sorted([*(f"{k} {n}" for k in ("out", "err") for n in range(40)), "up"])
    activity = pair.runtime.activity("head")
    assert activity is not None and activity.lines == 81 and activity.compiling == 0
    assert pair.runtime.lines("head") == []


def test_the_cpu_time_of_compilers_in_the_container_is_seen(pair: Pair) -> None:
    code = (
        "import os, subprocess\nos.symlink('/usr/bin/python3', '/tmp/cicc')\n"
        "subprocess.Popen(['/tmp/cicc', '-c', 'while True: pass'])\n"
    )
    pair.start(code + SAY + SLEEP)
    collect(pair, "up")
    first = pair.runtime.activity("head")
    time.sleep(2.5)
    second = pair.runtime.activity("head")
    assert first and second and second.compiling > first.compiling
    assert second.lines == first.lines


def test_stacks_of_all_processes_are_saved_with_the_log(pair: Pair, tmp_path: Path) -> None:
    child = f"import subprocess; subprocess.Popen(['{PYTHON}', '-c', {INSTALL + SLEEP!r}])\n"
    plain = f"subprocess.Popen(['{PYTHON}', '-c', {SLEEP!r}])\n"
    pair.start(INSTALL + child + plain + SAY + "time = __import__('time'); time.sleep(1)\n" + SAY
               + SLEEP, "worker")  # fmt: skip
    collect(pair, "up", role="worker")
    time.sleep(1.5)
    path = tmp_path / "stacks" / "worker.log"
    said = pair.runtime.stacks("worker", path)
    assert said.count("wrote its stacks") == 2, said
    told = path.read_text()
    assert told.count(" in asleep\n") == 2 and told.count("[spark] stacks of pid ") == 2
    assert pair.runtime.inspect("worker").running


def test_follow_shows_the_end_then_new_lines_then_ends_with_the_rank(pair: Pair) -> None:
    code = (
        "import time\nfor n in range(9): print('old', n, flush=True)\ntime.sleep(2)\nprint('new')"
    )
    pair.start(code)
    until(lambda: len(pair.runtime.lines("head")) == 9)
    seen: list[str] = []
    pair.runtime.tail("head", 2, seen.append)
    assert seen == ["old 7", "old 8"]
    followed: list[str] = []
    thread = threading.Thread(target=pair.runtime.follow, args=("head", 1, followed.append))
    thread.start()
    thread.join(15)
    assert not thread.is_alive() and followed == ["old 8", "new"]


def test_a_frozen_daemon_is_unreachable_in_time_and_comes_back(pair: Pair) -> None:
    pair.start(SAY + SLEEP, "worker")
    node = pair.nodes["worker"]
    node.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        status = pair.runtime.inspect("worker")
        assert status.state == "unreachable" and "no answer" in status.note
        assert pair.runtime.stop("worker", 1).state == "unreachable"
        assert pair.runtime.activity("worker") is None
        assert time.monotonic() - began < 12
        assert pair.runtime.inspect("head").state == "absent"
    finally:
        node.signal(signal.SIGCONT)
    until(lambda: pair.runtime.inspect("worker").running)


def test_a_daemon_that_is_gone_is_unreachable_and_its_rank_is_found_ended_after(
    pair: Pair,
) -> None:
    pair.start(SAY + SLEEP, "worker")
    node = pair.nodes["worker"]
    node.stop()
    try:
        status = pair.runtime.inspect("worker")
        assert status.state == "unreachable"
        assert "the Docker daemon of the worker cannot be used" in status.note
        with pytest.raises(LauncherError, match="could not be started") as told:
            pair.start(SLEEP, "worker")
        assert "systemctl" in told.value.do_next
    finally:
        node.up()
    assert pair.runtime.inspect("worker").state == "exited"
