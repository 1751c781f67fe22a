"""The memory guard on nodes with real processes, real control groups and a real Docker.

/proc/meminfo is the node's own file here: what it says is worked out from what the processes really
hold, as if the machine had little to spare beyond them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from head_clone import HeadClone
from machine import Node
from pair import HEAD_NAME, WORKER_NAME, Pair
from rig import USER, Rig

from launcher.steps import guard

pytestmark = pytest.mark.rig

GIB = 1 << 30
SPARE = 2.2  # GiB that the machine has beyond what the test's processes hold
LIMIT = 1600 << 20  # bytes that a test's processes may take at all
SOON = 3.0  # seconds within which the right one is stopped
PYTHON = "/usr/bin/python3"
START = 90.0
# A parent with a child that holds memory, and shared memory between them; it eats on SIGUSR1.
SERVER = """
import multiprocessing.shared_memory as m, os, signal, sys, time
held = []
def eat(*_):
    held.append(bytearray(os.urandom(1 << 20)) * 900)
shm = m.SharedMemory('psm_of_the_server', create=True, size=1 << 20)
from multiprocessing import resource_tracker
resource_tracker.unregister(shm._name, 'shared_memory')
child = os.fork()
if child == 0:
    signal.signal(signal.SIGUSR1, eat)
    print(os.getpid(), flush=True)
else:
    os.waitpid(child, 0)
while True:
    time.sleep(1)
"""
HOG = """
import os, time
held = bytearray(os.urandom(1 << 20)) * 900
print(1, flush=True)
time.sleep(99)
"""


class Machine:
    """Keeps a node's /proc/meminfo in step with what the given processes hold."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.processes: list[psutil.Process] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Machine:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for each in self.processes:
            with contextlib.suppress(psutil.Error):
                each.kill()
        self.node.memory(available=118.0)

    def _run(self) -> None:
        while not self._over.wait(0.05):
            self._write()

    def held(self) -> int:
        total = 0
        for each in list(self.processes):
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
        return total

    def _write(self) -> None:
        have = max(0.05, SPARE - self.held() / GIB)
        rows = {
            "MemTotal": 121.69,
            "MemFree": have * 0.7,
            "MemAvailable": have,
            "Buffers": 0.2,
            "Cached": have * 0.3,
            "AnonPages": 121.69 - have - 0.2,
        }
        text = "".join(f"{k + ':':<15}{int(gib * 1048576):>9} kB\n" for k, gib in rows.items())
        fd = os.open(self.node.folder / "meminfo", os.O_WRONLY)
        os.ftruncate(fd, len(text))
        os.pwrite(fd, text.encode(), 0)
        os.close(fd)

    def add(self, pid: int) -> psutil.Process:
        """A process, as this machine counts it, within the limit."""
        found = psutil.Process(pid)
        limited(self.node, found)
        self.processes.append(found)
        return found


def limited(node: Node, process: psutil.Process) -> None:
    """Put it into a control group of the node that cannot take more than LIMIT."""
    for base, file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = base / node.cgroup / "guarded"
        with contextlib.suppress(OSError):
            group.mkdir(parents=True, exist_ok=True)
            (group / file).write_text(str(LIMIT))
            (group / "cgroup.procs").write_text(str(process.pid))
            return
    pytest.fail("no memory control group could be made")


def outside(node: Node, inner: int) -> int:
    """The pid of a node's process as this machine counts it."""
    for each in node.processes():
        with contextlib.suppress(psutil.Error, OSError):
            for row in Path(f"/proc/{each.pid}/status").read_text().splitlines():
                if row.startswith("NSpid:") and int(row.split()[-1]) == inner:
                    return each.pid
    raise AssertionError(f"no process {inner} on {node.name}")


def soon() -> float:
    """SOON where the processors are ours; else as many times as they are shared."""
    return SOON * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def in_container(name: str) -> psutil.Process:
    """The eater in it, as this machine counts it: by the control group, as the guard does."""
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if "held = bytearray" in " ".join(each.cmdline()) and (
                name in Path(f"/proc/{each.pid}/cgroup").read_text()
            ):
                return each
    raise AssertionError(f"nothing eats in {name}")


@contextlib.contextmanager
def spoken(node: Node, code: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Python in the node, and the number it says first."""
    argv = node.argv([PYTHON, "-c", code])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            node.end(psutil.Process(process.pid).children(recursive=True))
            process.wait()


@pytest.fixture
def machine(rig: Rig) -> Iterator[Machine]:
    with Machine(rig.head) as made:
        yield made


@pytest.fixture
def server(machine: Machine) -> Iterator[tuple[int, psutil.Process]]:
    """The first process as the node counts it, and the child that holds the memory."""
    with spoken(machine.node, SERVER) as (around, child):
        first = psutil.Process(around.pid).children()[0]
        inner = int(Path(f"/proc/{first.pid}/status").read_text().split("NSpid:")[1].split()[1])
        machine.add(first.pid)
        yield inner, machine.add(outside(machine.node, child))


@contextlib.contextmanager
def guarding(node: Node, inner: int, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    node.write("/run/rig/guard.pyz", guard.bundle())
    for name in ("log", "log.low.json", "log.why.json"):
        node.path(f"/run/rig/guard.{name}").unlink(missing_ok=True)
    words = ["--pid", str(inner), "--armed", "--log", "/run/rig/guard.log", *more]
    with subprocess.Popen(node.argv([PYTHON, "-S", "/run/rig/guard.pyz", *words])) as process:
        until(lambda: "armed" in log(node))
        time.sleep(1.5)  # it has seen how things were
        try:
            yield process
        finally:
            if process.poll() is None:
                node.end(psutil.Process(process.pid).children(recursive=True))


def log(node: Node, path: str = "/run/rig/guard.log") -> str:
    try:
        return node.read(path)
    except FileNotFoundError:
        return ""


def until(true: object, within: float = 15.0) -> float:
    began = time.monotonic()
    while not true():  # type: ignore[operator]
        assert time.monotonic() - began < within, "it did not come to pass"
        time.sleep(0.05)
    return time.monotonic() - began


def test_a_server_that_takes_the_last_memory_is_stopped_and_leaves_nothing(
    machine: Machine, server: tuple[int, psutil.Process]
) -> None:
    inner, child = server
    node = machine.node
    assert "psm_of_the_server" in node.shared_memory()
    with guarding(node, inner) as watching:
        child.send_signal(signal.SIGUSR1)
        until(lambda: machine.held() > 800 << 20)
        began = time.monotonic()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        assert time.monotonic() - began < soon()
        assert watching.wait(10) == 3
    assert "asked to stop" in log(node) and "the server +0." in log(node)
    assert "psm_of_the_server" not in node.shared_memory()
    why = json.loads(node.read("/run/rig/guard.log.why.json"))
    assert why["growth"]["server"] > 700 << 20
    low = json.loads(node.read("/run/rig/guard.log.low.json"))
    assert low["available"] < 1.5 * GIB


def test_a_hog_beside_it_is_named_and_the_server_lives(
    machine: Machine, server: tuple[int, psutil.Process]
) -> None:
    inner, child = server
    node = machine.node
    with guarding(node, inner) as watching, spoken(node, HOG) as (around, _):
        hog = machine.add(psutil.Process(around.pid).children()[0].pid)
        until(lambda: "not the server's doing" in log(node))
        time.sleep(2.5)
        assert child.is_running() and watching.poll() is None
        assert "(python3" in log(node) and "asked to stop" not in log(node)
        hog.kill()
        until(lambda: "memory is back" in log(node))
    assert "psm_of_the_server" in node.shared_memory()
    node.path("/dev/shm/psm_of_the_server").unlink()


def test_both_nodes_are_guarded_and_a_container_that_grew_is_stopped(clean: HeadClone) -> None:
    """The guards as the launcher sets them; the worker's control group tells what is its own."""
    clean.env({"DSV41_MEM_GUARD": "1"})
    ran = clean.start("start", timeout=START)
    assert ran.status == 0, ran.said
    pair = Pair.of(clean)
    worker = clean.rig.worker
    folder = f"{USER.home}/.cache/vllm-dsv41-flash-exl3/memguard"
    for node, role, name in ((clean.rig.head, "head", HEAD_NAME), (worker, "worker", WORKER_NAME)):
        assert f"armed: {name}" in log(node, f"{folder}/{role}.log")
    with Machine(worker) as machine:
        time.sleep(2.5)
        # Another's process first: it is left alone.
        with spoken(worker, HOG) as (around, _):
            machine.add(psutil.Process(around.pid).children()[0].pid)
            until(lambda: "not the server's doing" in log(worker, f"{folder}/worker.log"))
            assert len(clean.running()) == 2
        until(lambda: "memory is back" in log(worker, f"{folder}/worker.log"))
        grown = pair.container("worker").exec_run([PYTHON, "-c", HOG], stream=True)
        next(iter(grown.output))
        eater = in_container(pair.worker)
        began = time.monotonic()
        machine.processes.append(eater)
        until(lambda: worker.containers().get(WORKER_NAME) != "running")
        assert time.monotonic() - began < soon() + 1  # Docker's own second
    assert "asked to stop" in log(worker, f"{folder}/worker.log")
    assert clean.rig.head.containers()[HEAD_NAME] == "running", "only on its own node"
    assert clean.start("status").status == 3
    assert clean.start("stop", timeout=START).status == 0
    until(lambda: "is gone" in log(clean.rig.head, f"{folder}/head.log"))


def test_a_soak_of_both_nodes(serving: HeadClone) -> None:
    ran = serving.start("soak", "--tokens", "4000", timeout=START)
    assert ran.status == 0, ran.said
    assert "soak: holds" in ran.out and "went down to 118.0 GiB" in ran.out
    for word in ("head", "worker", "4000    ", "512.0", "4000 tokens in"):
        assert word in ran.out, ran.out
    assert ran.run is None or (ran.run / "soak.json").exists()

    serving.rig.worker.memory(available=1.2)
    ran = serving.start("soak", "--tokens", "400", timeout=START)
    assert ran.status == 1, ran.said
    assert "falls short: worker went down to 1.2 GiB available, floor 1.5 GiB" in ran.out
    serving.rig.worker.memory(available=118.0)

    refused = serving.start("soak", "--tokens", "600000")
    assert refused.status == 2 and "at most 599999" in refused.err, refused.said
