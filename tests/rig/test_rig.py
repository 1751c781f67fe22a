"""The rig itself, without the launcher: each thing a story relies on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import roce
import stub_image
from machine import Node
from rig import DRIVER, HEAD, SECOND, USER, WORKER, Rig, sweep

pytestmark = pytest.mark.rig

MODEL = "tiny"
ARGUMENTS = [
    "--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", HEAD.address,
    "--master-port", "29521", "--served-model-name", MODEL,
]  # fmt: skip
SERVE = ["python3", "-m", "spark_overlay.serving.serve", "serve", "/model"]
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3"]


class Pair:
    """Both stubs, started as a person would: by `docker run` on the head and over ssh."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def start(self, **told: dict[str, Any]) -> None:
        for node in (self.rig.worker, self.rig.head):
            node.write("/srv/model/stub.json", json.dumps(told))
        worker = ["docker", "run", *_flags("worker"), *SERVE, *ARGUMENTS, "--node-rank", "1",
                  "--headless"]  # fmt: skip
        self.rig.head.run(*SSH, WORKER.address, *worker, user=USER.name)
        head = ["docker", "run", *_flags("head"), *SERVE, *ARGUMENTS, "--node-rank", "0",
                "--host", "127.0.0.1", "--port", "8888"]  # fmt: skip
        self.rig.head.run(*head, user=USER.name)

    def log(self, role: str) -> str:
        node = self.rig.head if role == "head" else self.rig.worker
        return node.docker.containers.get(role).logs().decode()

    def logs(self, role: str, mark: str, within: float = 15.0) -> str:
        """The role's log once ``mark`` stands in it."""
        end = time.monotonic() + within
        while mark not in (text := self.log(role)):
            assert time.monotonic() < end, f"no {mark!r} of the {role}:\n{text}"
            time.sleep(0.05)
        return text

    def curl(self, path: str, body: object = None, within: float = 5.0) -> tuple[int, str]:
        """curl's status and the answer, on the head."""
        words = ["curl", "-sS", "-m", str(within), f"http://127.0.0.1:8888{path}"]
        if body is not None:
            words += ["-d", json.dumps(body)]
        done = self.rig.head.run(*words, user=USER.name, check=False)
        return done.status, done.out

    def completes(self, within: float = 5.0) -> bool:
        asked = {"model": MODEL, "prompt": "1", "max_tokens": 2}
        status, text = self.curl("/v1/completions", asked, within)
        return status == 0 and json.loads(text)["usage"]["completion_tokens"] == 2


def _flags(name: str) -> list[str]:
    return [
        "-d", "--name", name, "--init", "--gpus", "all", "--network", "host", "--ipc", "host",
        "--oom-score-adj", "1000", "--cap-add", "SYS_PTRACE", "--cap-add", "IPC_LOCK",
        "--ulimit", "core=0", "--device", "/dev/infiniband", "--device", "/dev/nvidia0",
        "-v", "/srv/model:/model:ro", "-v", "/dev/shm:/dev/shm", stub_image.NAME,
    ]  # fmt: skip


@pytest.fixture
def pair(rig: Rig) -> Iterator[Pair]:
    yield Pair(rig)
    for node in (rig.head, rig.worker):
        node.remove_containers()


def test_it_is_up_within_seconds(rig: Rig) -> None:
    """About six on two idle cores; CI brings up several at once."""
    assert rig.took["whole"] < 30, rig.took


def test_the_head_logs_in_to_the_worker(head: Node, worker: Node) -> None:
    for user in (USER, SECOND):
        to = f"{user.name}@{WORKER.address}"
        said = head.run(*SSH, to, "hostname; id -un; pwd; docker ps -q", user=USER.name).out
        assert said.split() == [worker.name, user.name, user.home]
    assert head.run("hostname").out.split() == [head.name] != [worker.name]
    refused = head.run(*SSH, f"nobody@{WORKER.address}", "true", user=USER.name, check=False)
    assert refused.status == 255 and "Permission denied" in refused.err


def test_rsync_and_sftp_bring_files(head: Node, worker: Node) -> None:
    head.write(f"{USER.home}/a file", "of the head\n", user=USER.name)
    target = f"{WORKER.address}:/home/dgx/it's here"
    head.run("rsync", "-s", "-e", " ".join(SSH), "a file", target, user=USER.name, cwd=USER.home)
    assert worker.read("/home/dgx/it's here") == "of the head\n"
    listing = head.run("sftp", "-b", "-", WORKER.address, stdin="ls\n", user=USER.name).out
    assert "it's here" in listing


def test_the_nodes_are_two_machines(head: Node, worker: Node) -> None:
    head.write("/etc/only-here", "")
    assert not worker.path("/etc/only-here").exists() and not Path("/etc/only-here").exists()
    head.write("/dev/shm/only-here", "")
    assert worker.shared_memory() == []
    head.path("/dev/shm/only-here").unlink()
    assert head.docker.info()["ID"] != worker.docker.info()["ID"]
    assert head.host_key != worker.host_key
    assert len({os.readlink(f"/proc/{pid}/ns/net") for pid in (head.pid, worker.pid, "self")}) == 3


def test_both_daemons_have_the_same_image(head: Node, worker: Node) -> None:
    here, there = (node.docker.images.get(stub_image.NAME).attrs for node in (head, worker))
    assert here["Id"] == there["Id"] and here["RootFS"] == there["RootFS"]
    assert here["Architecture"] == {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


@pytest.mark.parametrize("role", ["head", "worker"])
def test_docker_gives_a_container_the_gpu_and_the_adapter(rig: Rig, role: str) -> None:
    node = rig.head if role == "head" else rig.worker
    devices = ["nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
    given = [word for name in devices for word in ("--device", f"/dev/{name}")]
    run = ["docker", "run", "--rm", "--gpus", "all", "--device", "/dev/infiniband", *given]
    run += ["--network", "host", "--init", "--oom-score-adj", "1000", stub_image.NAME]
    seen = node.run(*run, "ls", "/dev", "/dev/infiniband", user=USER.name).out.split()
    assert {*devices, "uverbs0", "rdma_cm"} <= set(seen)
    assert node.read("/run/rig/gpu-hook.log").split()[-1] == "prestart"


def test_nvidia_smi_is_a_sparks(head: Node) -> None:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    assert head.run(*asked).out == "NVIDIA GB10, 580.95.05, [N/A]\n"
    assert head.run("nvidia-smi", "-L").out.startswith("GPU 0: NVIDIA GB10 (UUID: GPU-")
    apps = ["nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv,noheader"]
    assert head.run(*apps).out == ""
    head.gpu_processes("4711, python3, 1024 MiB")
    assert head.run(*apps).out == "4711, python3, 1024 MiB\n"
    apps[-1] += ",nounits"
    assert head.run(*apps).out == "4711, python3, 1024\n"


def test_memory_boot_and_kernel_log_are_as_told(head: Node, worker: Node) -> None:
    worker.memory(available=7.5)
    told = dict(row.split(":") for row in worker.run("cat", "/proc/meminfo").out.splitlines())
    assert told["MemAvailable"].split() == [str(int(7.5 * 1048576)), "kB"]
    worker.boot_id("another")
    assert worker.run("cat", "/proc/sys/kernel/random/boot_id").out == "another\n"
    assert head.run("cat", "/proc/sys/kernel/random/boot_id").out == f"{head.first_boot}\n"
    worker.kernel_log("NVRM: out of memory\n")
    assert worker.run("dmesg").out == worker.run("journalctl", "-k").out == "NVRM: out of memory\n"


def _ping(node: Node, size: int = 56, to: str = WORKER.address) -> bool:
    words = ["ping", "-c1", "-W1", "-M", "do", "-s", str(size), to]
    return node.run(*words, user=USER.name, check=False).status == 0


def _comes_back(node: Node) -> bool:
    """A link that is up again answers once the neighbours have found each other."""
    return any(_ping(node) for _ in range(8))


def test_the_cable(rig: Rig, head: Node, worker: Node) -> None:
    assert _ping(head, 8972) and not _ping(head, 8973) and _ping(head, to=DRIVER)
    carrier = f"/sys/class/net/{HEAD.interface}/carrier"
    assert head.run("cat", carrier).out == "1\n"
    rig.cable(False)
    assert not _ping(head) and head.run("cat", carrier).out == "0\n"
    rig.cable(True)
    assert _comes_back(head)
    rig.unplug(worker)
    assert not _ping(head) and head.run("cat", carrier).out == "1\n"
    rig.unplug(worker, plugged=True)
    worker.link(up=False)
    assert not _ping(head)
    worker.link(up=True)
    assert _comes_back(head)
    worker.mtu(1500)
    assert not _ping(head, 8972) and _ping(head, 1472)


def _table(node: Node) -> list[str]:
    port = f"/sys/class/infiniband/{node.card.hca}/ports/1"
    rows = []
    for slot in range(6):
        kind = node.run("cat", f"{port}/gid_attrs/types/{slot}", check=False)
        gid = node.run("cat", f"{port}/gids/{slot}").out.strip()
        rows.append(f"{slot} {kind.out.strip() if not kind.status else 'EMPTY'} {gid[-9:]}")
    return rows


def test_gid_tables_can_be_replaced(rig: Rig, head: Node) -> None:
    mapped = "0a63:0001"
    fresh = _table(head)
    assert fresh[2:] == [
        f"2 IB/RoCE v1 {mapped}",
        f"3 RoCE v2 {mapped}",
        "4 EMPTY 0000:0000",
        "5 EMPTY 0000:0000",
    ]
    rig.gids(head, roce.drifted)
    assert _table(head)[2:] == [
        "2 EMPTY 0000:0000",
        "3 EMPTY 0000:0000",
        f"4 IB/RoCE v1 {mapped}",
        f"5 RoCE v2 {mapped}",
    ]
    rig.gids(head, roce.private)
    assert _table(head)[3] == "3 RoCE v2 fe01:0203"
    rig.gids(head, roce.without_ipv4)
    assert not any(mapped in row for row in _table(head))
    rig.gids(head)
    assert _table(head) == fresh
    state = f"/sys/class/infiniband/{WORKER.hca}/ports/1/state"
    assert head.read(state) == "1: DOWN\n"  # nothing is plugged in there


def test_sshd_stops_and_changes_its_keys(rig: Rig, head: Node, worker: Node) -> None:
    def login() -> str:
        return head.run(*SSH, WORKER.address, "true", user=USER.name, check=False).err

    assert login() == ""
    worker.sshd_stop()
    assert "Connection refused" in login()
    worker.sshd_start()
    assert login() == ""
    worker.new_host_keys()
    assert "HOST IDENTIFICATION HAS CHANGED" in login()
    rig.know_host_key()
    assert login() == ""
    head.path(f"{USER.home}/.ssh/known_hosts").unlink()
    assert "Host key verification failed" in login()


def test_a_pair_of_stubs_serves(pair: Pair) -> None:
    pair.start()
    pair.logs("head", "Application startup complete")
    assert f"the worker came from {WORKER.address}" in pair.log("head")
    assert f"met the head from {WORKER.address}" in pair.log("worker")
    assert pair.completes()
    assert json.loads(pair.curl("/v1/models")[1])["data"][0]["id"] == MODEL
    chat = {"model": MODEL, "messages": [], "max_tokens": 3, "stream": True}
    assert pair.curl("/v1/chat/completions", chat)[1].rstrip().endswith("data: [DONE]")

    # /health does not know of the worker, a token does.
    pair.rig.worker.docker.containers.get("worker").kill()
    assert pair.curl("/health")[0] == 0
    assert not pair.completes(within=1.0)


def test_a_stub_goes_silent_and_tells_its_stacks(pair: Pair) -> None:
    silent = {"mode": "silent", "at": "Loading model", "every": 0.1}
    pair.start(worker=silent, head={"mode": "hang", "at": "Loading safetensors"})
    pair.logs("worker", "shm_broadcast.py")
    log = pair.logs("head", "Loading model from scratch")
    assert "Loading safetensors" not in log
    time.sleep(0.5)
    assert pair.log("head") == log
    asked = ["python3", "-m", "spark_overlay.stacks"]
    container = pair.rig.head.docker.containers.get("head")
    assert container.exec_run(asked, environment={"SPARK_LAUNCH_ID": "any"}).exit_code == 0
    pair.logs("head", "wait_for_a_kernel_that_never_ends")


def test_a_stub_dies(pair: Pair) -> None:
    pair.start(worker={"mode": "die", "after": 0.1, "code": 3, "boot": 5})
    container = pair.rig.worker.docker.containers.get("worker")
    assert container.wait(timeout=10)["StatusCode"] == 3
    assert "told to die" in pair.log("worker")


def test_a_stub_compiles_then_serves(pair: Pair) -> None:
    pair.start(head={"mode": "compile", "at": "init engine", "last": 1.0})
    pair.logs("head", "GPU KV cache size")
    container = pair.rig.head.docker.containers.get("head")
    end = time.monotonic() + 5
    while "/tmp/ptxas" not in str(container.top()):
        assert time.monotonic() < end, container.top()
    pair.logs("head", "Application startup complete")
    assert pair.completes()


@pytest.mark.parametrize("mode", ["garbage", "mute", "eat"])
def test_a_stub_misbehaves(pair: Pair, mode: str) -> None:
    pair.start(head={"mode": mode, "mib": 64})
    pair.logs("head", "Application startup complete")
    status, text = pair.curl("/v1/models", within=1.0)
    if mode == "garbage":
        assert (status, text) == (0, "<html>")
    elif mode == "mute":
        assert status == 28  # curl: the time is up
    else:
        assert pair.completes()
        stats = pair.rig.head.docker.containers.get("head").stats(stream=False)
        assert stats["memory_stats"]["usage"] > 64 << 20


def test_a_killed_stub_leaves_shared_memory_a_stopped_one_does_not(pair: Pair) -> None:
    pair.start(worker={"deaf": True})
    pair.logs("head", "Application startup complete")
    head, worker = pair.rig.head, pair.rig.worker
    assert len(head.shared_memory()) == 1
    head.docker.containers.get("head").stop(timeout=5)
    assert head.shared_memory() == []
    worker.docker.containers.get("worker").stop(timeout=1)
    assert len(worker.shared_memory()) == 1


def _footprint(folder: Path) -> dict[str, Any]:
    """What a rig could leave on this machine."""
    return {
        "mounts": [
            row
            for row in Path("/proc/self/mountinfo").read_text().splitlines()
            if folder.name in row
        ],
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "shm": sorted(os.listdir("/dev/shm")),
        "cgroups": sorted(map(str, Path("/sys/fs/cgroup").glob(f"**/{folder.name}"))),
    }


SECOND_RIG = """
import sys, time, os, threading
sys.path[:0] = [{here!r}, {tests!r}]
from pathlib import Path
from rig import Rig
made = Rig(Path({folder!r})).up()
made.head.run("docker", "run", "-d", "--network", "host", {image!r}, "sleep", "1000")
print(made.head.pid, made.worker.pid, flush=True)
time.sleep(1000)
"""


def test_a_killed_rig_leaves_nothing_that_lives_and_the_next_removes_the_rest(rig: Rig) -> None:
    folder = rig.folder.with_name(f"second-{rig.folder.name}")
    before = _footprint(folder)
    here = Path(__file__).resolve().parent
    code = SECOND_RIG.format(
        here=str(here), tests=str(here.parent), folder=str(folder), image=stub_image.NAME
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout
        pids = [int(word) for word in owner.stdout.readline().split()]
        spaces = {os.readlink(f"/proc/{pid}/ns/pid") for pid in pids}
        assert len(spaces) == 2 and len(_within(spaces)) > 8
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        end = time.monotonic() + 10
        while left := _within(spaces):
            assert time.monotonic() < end, left
            time.sleep(0.05)
        assert _footprint(folder)["mounts"] == before["mounts"]
        assert (folder / "node1").exists()

        again = Rig(folder).up()
        assert again.head.containers() == {}
        again.down()
        assert not folder.exists()
        assert _footprint(folder) == before
    finally:
        owner.kill()
        owner.wait()
        sweep(folder)


def _within(spaces: set[str]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/ns/pid") in spaces:
                found.append(process)
        except OSError:
            continue
    return found


def test_one_rig_at_a_time(rig: Rig) -> None:
    with pytest.raises(AssertionError, match="another rig is up"):
        Rig(rig.folder).up()
    assert rig.head.docker.ping()
