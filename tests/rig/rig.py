"""Two nodes as two Sparks with a cable between them, on one machine, within some seconds.

Everything lives in namespaces that die with this process; nothing is mounted, bridged or addressed
in the machine's own. What a killed test run leaves are files and cgroups: the next ``up`` removes
them. Only tests as root can have a rig: see ``obstacle``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fakes
import psutil
import roce
import stub_image
from machine import Card, Init, Node, User

# One for each worker of pytest -n: rigs do not see each other.
FOLDER = Path(
    os.environ.get("SPARK_RIG_DIR", "/var/tmp/spark-rig")
    + os.environ.get("PYTEST_XDIST_WORKER", "")
)
CACHE = FOLDER.parent / "spark-rig-cache"  # the serving image, and which rigs are up
ROOT = Path(__file__).resolve().parents[2]
HEAD = Card("enp1s0f1np1", "rocep1s0f1", "0000:01:00.1", "4c:bb:47:00:00:01", "10.99.0.1")
WORKER = Card("enp1s0f0np0", "rocep1s0f0", "0000:01:00.0", "4c:bb:47:00:00:02", "10.99.0.2")
DRIVER = "10.99.0.254"  # a third machine of the same network
MTU = 9000
USER = User("dgx", 2000, "/home/dgx")
SECOND = User("spark", 2001, "/data/spark")  # on the worker only
TOOLS = ("unshare", "nsenter", "setpriv", "pivot_root", "ip", "ssh", "ssh-keygen", "rsync",
         "dockerd", "docker", "containerd", "runc", "docker-init", "curl", "ldd")  # fmt: skip
ADMIN = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def obstacle() -> str | None:
    """Why this machine cannot have a rig."""
    if os.geteuid() != 0:
        return "the rig needs root: it makes namespaces and runs two Docker daemons"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=ADMIN)]
    missing += [path for path in ("/usr/sbin/sshd", "/usr/bin/python3") if not Path(path).exists()]
    if missing:
        return f"the rig needs {', '.join(missing)}: apt-get install docker.io openssh-server rsync"
    made = subprocess.run(["unshare", "-m", "-n", "-p", "--fork", "true"], capture_output=True)
    if made.returncode:
        return f"no namespaces can be made here: {made.stderr.decode().strip()}"
    return None


class Rig:
    """``up`` makes it; ``down`` removes all of it, whatever state it is in."""

    head: Node
    worker: Node

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self._nodes: list[Node] = []
        self._driver: Init | None = None
        self._lock = -1
        self.image = Path()
        self.took: dict[str, float] = {}

    def up(self) -> Rig:
        began = time.monotonic()
        self._only_one()
        sweep(self.folder)
        self.folder.mkdir(parents=True)
        try:
            self._up(began)
        except BaseException:
            self.down()
            raise
        return self

    def _up(self, began: float) -> None:
        self._driver = Init(["unshare", "-n", "sleep", "infinity"])
        self._driver.in_its_network()
        self._note()
        for name, folder, card, users in (
            ("spark-1", "node1", HEAD, [USER]),
            ("spark-2", "node2", WORKER, [USER, SECOND]),
        ):
            node = Node(self.folder / folder, name, card, users, _elsewhere())
            self._nodes.append(node)
            self._note()
        self.head, self.worker = self._nodes
        self.took["namespaces"] = time.monotonic() - began
        self._cables()
        for node in self._nodes:
            _accounts(node)
            fakes.install(node)
            node.dockerd_start()
        with ThreadPoolExecutor() as pool:
            image = pool.submit(stub_image.make, CACHE)
            list(pool.map(self._furnish, self._nodes))
            self.took["services"] = time.monotonic() - began
            self.image = image.result()
            list(pool.map(self.load, self._nodes))
        self._introduce()
        self.took["whole"] = time.monotonic() - began

    def _furnish(self, node: Node) -> None:
        for card, state in ((HEAD, "1: DOWN"), (WORKER, "1: DOWN")):
            if card.hca != node.card.hca:  # the other port of the adapter, nothing plugged in
                idle = roce.Device(card.hca, card.interface, card.pci, {}, state)
                fakes.roce_tree(node, idle)
        self.gids(node)
        node.new_host_keys()
        node.sshd_start()
        node.dockerd_ready()

    def load(self, node: Node) -> None:
        """The serving image, from the one tar, into a node's daemon."""
        with self.image.open("rb") as tar:
            node.docker.images.load(tar)

    def _introduce(self) -> None:
        """The head's user may log in to the worker as either user, and knows its host key."""
        key = self.folder / "id"
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "rig", "-f", str(key)], check=True
        )
        home = USER.home
        self.head.write(f"{home}/.ssh/id_ed25519", key.read_text(), 0o600, USER.name)
        public = key.with_suffix(".pub").read_text()
        for user in (USER, SECOND):
            self.worker.write(f"{user.home}/.ssh/authorized_keys", public, 0o600, user.name)
        self.know_host_key()

    def know_host_key(self) -> None:
        """The head's user knows the worker by the key it has now, and nobody else."""
        known = f"{WORKER.address} {self.worker.host_key}\n"
        self.head.write(f"{USER.home}/.ssh/known_hosts", known, 0o600, USER.name)

    def _cables(self) -> None:
        assert self._driver
        lines = [
            "link set lo up",
            f"link add rigbr mtu {MTU} type bridge",
            "link set rigbr up",
            f"addr add {DRIVER}/24 dev rigbr",
        ]
        for node in self._nodes:
            port = self.port(node)
            lines += [
                f"link add {port} mtu {MTU} type veth peer name {node.card.interface} mtu {MTU}"
                f" address {node.card.mac} netns {node.pid}",
                f"link set {port} master rigbr up",
            ]
        self.driver("ip", "-batch", "-", stdin="\n".join(lines))
        for node in self._nodes:
            node.ip("link", "set", node.card.interface, "up")
            node.ip("addr", "add", f"{node.card.address}/24", "dev", node.card.interface)
            node.speed(200_000)

    def port(self, node: Node) -> str:
        return f"port{self._nodes.index(node) + 1}"

    def driver(self, *argv: str, stdin: str = "", check: bool = True) -> str:
        """Run in the driver's namespace: the machine's own files, the rig's network."""
        assert self._driver
        ran = subprocess.run(
            ["nsenter", "-t", str(self._driver.pid), "-n", "--", *argv],
            input=stdin, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if check and ran.returncode:
            raise AssertionError(f"driver: {argv} ended with {ran.returncode}: {ran.stderr}")
        return ran.stdout

    # What a test does to the pair.

    def cable(self, plugged: bool) -> None:
        """Both ends see the carrier go and come, as when the cable is drawn."""
        for node in self._nodes:
            self.unplug(node, plugged)

    def unplug(self, node: Node, plugged: bool = False) -> None:
        """One node's end: it is gone for the other, whose own carrier stays."""
        self.driver("ip", "link", "set", self.port(node), "up" if plugged else "down")

    def gids(self, node: Node, make: roce.Table = roce.table, state: str = "4: ACTIVE") -> None:
        """Give the node's adapter a GID table of roce.py, for its address, interface and MAC."""
        node.gids(make(node.card.address, node.card.interface, node.card.mac), state)

    def mend(self) -> None:
        """Everything a test may have broken, as it was; clones and their containers stay."""
        self.cable(True)
        self.driver("ip", "link", "set", "rigbr", "mtu", str(MTU))
        for node in self._nodes:
            node.link(True)
            node.mtu(MTU)
            self.driver("ip", "link", "set", self.port(node), "mtu", str(MTU))
            self.gids(node)
            node.memory(available=118.0)
            node.boot_id(node.first_boot)
            node.gpu_processes()
            fakes.install(node)
            if not node.sshd_runs():
                node.sshd_start()
            for each in node.docker.containers.list(all=True, ignore_removed=True):
                if "dsv41.owner" not in each.labels:
                    each.remove(force=True)
            if node.image() != self.head.image() or not node.image():
                self.load(node)
        self.know_host_key()

    # Its end.

    def down(self) -> None:
        for node in self._nodes:
            node.down()
        self._nodes.clear()
        if self._driver:
            self._driver.end()
            self._driver = None
        try:
            sweep(self.folder)
        finally:
            os.close(self._lock)

    def _only_one(self) -> None:
        CACHE.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(CACHE / f"{self.folder.name}.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AssertionError(f"another rig is up in {self.folder}; wait for it") from None

    def _note(self) -> None:
        """Which processes hold the namespaces, for a run that finds them left."""
        pids = [node.pid for node in self._nodes]
        pids += [self._driver.pid] if self._driver else []
        noted = [[pid, psutil.Process(pid).create_time()] for pid in pids]
        (self.folder / "pids.json").write_text(json.dumps(noted))


def _accounts(node: Node) -> None:
    """Users of the node, with its Docker and a home of their own. No password opens them."""
    passwd, shadow, group = (node.read(f"/etc/{name}") for name in ("passwd", "shadow", "group"))
    users = [user for user in node.users.values() if user.uid]
    names = ",".join(user.name for user in users)
    for user in users:
        passwd += f"{user.name}:x:{user.uid}:{user.uid}::{user.home}:/bin/bash\n"
        shadow += f"{user.name}:*:20000:0:99999:7:::\n"
        group += f"{user.name}:x:{user.uid}:\n"
    rows = [row for row in group.splitlines() if not row.startswith("docker:")]
    rows.append(f"docker:x:2999:{names}")
    node.write("/etc/passwd", passwd)
    node.write("/etc/shadow", shadow, 0o640)
    node.write("/etc/group", "\n".join(rows) + "\n")
    node.write("/etc/hostname", node.name + "\n")
    node.write("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n")
    for user in users:
        node.write(f"{user.home}/.profile", "", user=user.name)
        node.path(user.home).chmod(0o700)


def _elsewhere() -> list[Path]:
    """What the nodes need of this machine and its root file system does not hold."""
    base = Path("/").stat().st_dev
    needed: Sequence[Path] = (ROOT, Path(sys.base_prefix))
    return [path for path in needed if path.stat().st_dev != base]


def sweep(folder: Path) -> None:
    """End and remove all that a rig has left: processes, cgroups, files."""
    for pid, created in _noted(folder):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()
                process.wait(10)
    for path in sorted(Path("/sys/fs/cgroup").glob(f"**/{folder.name}"), reverse=True):
        for each in sorted([path, *path.rglob("*")], key=lambda p: len(p.parts), reverse=True):
            if each.is_dir():
                _remove_cgroup(each)
    if folder.exists():
        shutil.rmtree(folder)


def _noted(folder: Path) -> Sequence[tuple[int, float]]:
    with contextlib.suppress(OSError, ValueError):
        return [(int(pid), float(at)) for pid, at in json.loads((folder / "pids.json").read_text())]
    return []


def _remove_cgroup(path: Path, within: float = 5.0) -> None:
    end = time.monotonic() + within
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:  # its last process is not quite gone
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
