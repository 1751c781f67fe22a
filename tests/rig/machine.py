"""One node of the rig: a machine in namespaces of its own, acted on from outside.

Commands run in it by nsenter, its files are seen under /proc/PID/root, its Docker daemon is spoken
to through its socket there. Nothing here opens a network connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import docker
import fakes
import psutil
import requests
import roce
import stub_image

HERE = Path(__file__).resolve().parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DOCKERD = (
    "exec setsid dockerd --iptables=false --ip6tables=false --bridge=none --storage-driver=overlay2"
    " --exec-opt native.cgroupdriver=cgroupfs --cgroup-parent=/{cgroup} --group=docker"
    " --host=unix:///run/docker.sock --log-level=warn </dev/null >>/var/log/dockerd.log 2>&1 &"
)
SSHD = """\
HostKey /etc/ssh/ssh_host_rsa_key
HostKey /etc/ssh/ssh_host_ecdsa_key
HostKey /etc/ssh/ssh_host_ed25519_key
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
LogLevel VERBOSE
PidFile /run/sshd.pid
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class User:
    name: str
    uid: int
    home: str


@dataclass(frozen=True)
class Card:
    """The node's end of the cable."""

    interface: str
    hca: str
    pci: str
    mac: str
    address: str


@dataclass(frozen=True)
class Done:
    argv: tuple[str, ...]
    status: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err


class Node:
    def __init__(
        self, folder: Path, name: str, card: Card, users: Sequence[User], binds: Sequence[Path]
    ) -> None:
        self.folder = folder
        self.name = name
        self.card = card
        self.users = {user.name: user for user in (User("root", 0, "/root"), *users)}
        self.cgroup = f"{folder.parent.name}/{folder.name}"
        for each in ("up", "work", "root", "docker"):
            (folder / each).mkdir(parents=True)
        self.memory(available=118.0)
        self.first_boot = "0f9ad5c1-5b1e-4b0e-9d6c-0000000000" + name[-1].zfill(2)
        self.boot_id(self.first_boot)
        self._init = self._boot([str(each) for each in binds])
        assert self._init.stdout
        told = self._init.stdout.readline()
        if not told:
            raise AssertionError(f"{name} did not come up: {self._init.stderr_text()}")
        self.pid = int(told)  # of its init, as this machine counts

    def _boot(self, binds: list[str]) -> Init:
        passable = {str(path) for place in (HERE, Path(sys.executable).resolve())
                    for path in place.parents}  # fmt: skip
        told = {
            "folder": str(self.folder),
            "hostname": self.name,
            "binds": binds,
            "passable": sorted(passable),
        }
        spaces = ["unshare", "-m", "-u", "-i", "-n", "-p", "--fork", "--kill-child=SIGKILL"]
        return Init([*spaces, sys.executable, str(HERE / "node_init.py"), json.dumps(told)])

    # Files, as this machine's root sees them.

    def path(self, path: str | Path) -> Path:
        """Where a file of the node is seen from outside; absolute links are not followed right."""
        return Path(f"/proc/{self.pid}/root") / str(path).lstrip("/")

    def read(self, path: str | Path) -> str:
        return self.path(path).read_text()

    def write(
        self, path: str | Path, text: str | bytes, mode: int = 0o644, user: str = "root"
    ) -> None:
        where = self.path(path)
        owner = self.users[user]
        for folder in reversed([p for p in where.parents if not p.exists()]):
            folder.mkdir()
            os.chown(folder, owner.uid, owner.uid)
        where.write_bytes(text.encode() if isinstance(text, str) else text)
        where.chmod(mode)
        os.chown(where, owner.uid, owner.uid)

    # Commands in it.

    def argv(
        self,
        argv: Sequence[str],
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        session: bool = False,
    ) -> list[str]:
        """What runs ``argv`` in the node with the environment of a fresh login.

        nsenter waits for it, and ends as it ended. ``session``: as in a terminal of its own.
        """
        who = self.users[user]
        environ = {
            "PATH": PATH,
            "HOME": who.home,
            "USER": user,
            "LOGNAME": user,
            "LANG": "C.UTF-8",
            **(env or {}),
        }
        drop = [] if user == "root" else [
            "setpriv", f"--reuid={who.uid}", f"--regid={who.uid}", "--init-groups",
            "--inh-caps=-all",
        ]  # fmt: skip
        return [
            *("nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "--"),
            *(["setsid"] if session else []),
            *drop,
            *("env", "-i", "-C", cwd, *(f"{key}={value}" for key, value in environ.items())),
            *argv,
        ]

    def run(
        self,
        *argv: str,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        stdin: str = "",
        timeout: float = 60.0,
        check: bool = True,
    ) -> Done:
        ran = subprocess.run(
            self.argv(argv, user, env, cwd),
            input=stdin.encode(),
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        done = Done(argv, ran.returncode, ran.stdout.decode(), ran.stderr.decode())
        if check and done.status:
            raise AssertionError(f"{self.name}: {argv} ended with {done.status}:\n{done.said}")
        return done

    @contextlib.contextmanager
    def background(self, *argv: str, listens: int, user: str = "root") -> Iterator[None]:
        """Run ``argv`` in the node for the length of the block, from when it has the port."""
        process = subprocess.Popen(self.argv(argv, user), stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 10
            while f":{listens} " not in self.run("ss", "-Hltn").out:
                if process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(f"{self.name}: {argv} does not listen on {listens}")
                time.sleep(0.05)
            yield
        finally:
            self.end(psutil.Process(process.pid).children())  # nsenter ends with its child
            process.wait()

    def processes(self) -> list[psutil.Process]:
        """All that lives in the node."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    found.append(process)
        return found

    def called(self, *names: str) -> list[psutil.Process]:
        """Those of a name; one that ends while it is looked at is not among them."""
        return [each for each in self.processes() if _name(each).startswith(names)]

    def end(self, processes: Iterable[psutil.Process]) -> None:
        ended = list(processes)
        for process in ended:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(ended, timeout=10)

    # Its services.

    def sshd_start(self) -> None:
        self.write("/etc/ssh/sshd_config", SSHD)
        self.run("/usr/sbin/sshd", "-E", "/var/log/sshd.log")

    def sshd_stop(self) -> None:
        """The daemon and its open connections, as when the machine shuts it down."""
        self.end(self.called("sshd"))

    def sshd_runs(self) -> bool:
        return bool(self.called("sshd"))

    def new_host_keys(self) -> None:
        """Host keys of its own; a running sshd is started anew with them."""
        runs = self.sshd_runs()
        self.sshd_stop()
        for old in self.path("/etc/ssh").glob("ssh_host_*"):
            old.unlink()
        self.run("ssh-keygen", "-A")
        if runs:
            self.sshd_start()

    def callers(self) -> int:
        """How many connections its sshd has been asked for so far."""
        return self.read("/var/log/sshd.log").count("Connection from ")

    @property
    def host_key(self) -> str:
        """Its ed25519 key: type and base64."""
        return " ".join(self.read("/etc/ssh/ssh_host_ed25519_key.pub").split()[:2])

    def dockerd_start(self) -> None:
        shutil.rmtree(self.path("/etc/docker"), ignore_errors=True)  # this machine's, its key too
        self.run("sh", "-c", DOCKERD.format(cgroup=self.cgroup))

    def dockerd_ready(self, timeout: float = 30.0) -> None:
        end = time.monotonic() + timeout
        while True:
            with contextlib.suppress(docker.errors.DockerException, OSError):
                if self.docker.ping():
                    return
            if time.monotonic() > end:
                log = self.read("/var/log/dockerd.log")
                raise AssertionError(f"{self.name}: dockerd does not answer:\n{log[-3000:]}")
            time.sleep(0.05)

    def dockerd_stop(self) -> None:
        """As a shutting-down machine does: asked, and killed if it is not gone in time."""
        asked = self.called("dockerd")
        for each in asked:
            with contextlib.suppress(psutil.Error):
                each.terminate()
        psutil.wait_procs(asked, timeout=30)
        self.end(asked)

    @functools.cached_property
    def docker(self) -> docker.DockerClient:
        socket = self.path("/run/docker.sock")
        return docker.DockerClient(base_url=f"unix://{socket}", version="1.41", timeout=30)

    def image(self, name: str = stub_image.NAME) -> str:
        """The id of an image, empty where there is none."""
        with contextlib.suppress(docker.errors.ImageNotFound):
            return str(self.docker.images.get(name).id)
        return ""

    def image_file(self, name: str, path: str) -> bytes:
        """A file of an image, out of a container that never starts: what a short-lived one says is
        lost to a reader that follows its log from the start, now and then."""
        made = self.docker.containers.create(name, ["true"], network_mode="none")
        try:
            parts, _ = made.get_archive(path)
            with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as packed:
                found = packed.extractfile(packed.getmembers()[0])
                assert found is not None, f"{path} of {name} is no file"
                return found.read()
        finally:
            made.remove()

    def containers(self) -> dict[str, str]:
        """Name and state of each container, ended ones too."""
        return {
            each.name: each.status
            for each in self.docker.containers.list(all=True, ignore_removed=True)
        }

    def account(self, lines: int) -> Iterator[tuple[str, str]]:
        """Each container and the end of its log. For a failed test's report, which a node without
        its daemon must not take away: then its absence is what is told."""
        try:
            for each in self.docker.containers.list(all=True, ignore_removed=True):
                text = each.logs(tail=lines).decode(errors="replace")
                yield f"{self.name}: {each.name} {each.status}", text
        except (docker.errors.DockerException, requests.RequestException) as error:
            yield f"{self.name}: no account of its containers", repr(error)

    def shared_memory(self) -> list[str]:
        """Names of what lies in its /dev/shm."""
        return sorted(each.name for each in self.path("/dev/shm").iterdir())

    def remove_containers(self) -> None:
        """Every container, and what killed ones left in shared memory."""
        for each in self.docker.containers.list(all=True, ignore_removed=True):
            with contextlib.suppress(docker.errors.NotFound):
                each.remove(force=True)
        for name in self.shared_memory():
            self.path(f"/dev/shm/{name}").unlink()

    # Its hardware.

    def ip(self, *words: str) -> str:
        return self.run("ip", *words).out

    def link(self, up: bool) -> None:
        """Its own interface, as ``ip link set`` does it. The cable is Rig.cable."""
        self.ip("link", "set", self.card.interface, "up" if up else "down")

    def mtu(self, size: int) -> None:
        self.ip("link", "set", self.card.interface, "mtu", str(size))

    def speed(self, mbits: int) -> None:
        """What sysfs tells of the interface; a veth would say 10000."""
        self.write("/run/rig/speed", f"{mbits}\n")
        self.run("mount", "--bind", "/run/rig/speed", f"/sys/class/net/{self.card.interface}/speed")

    def gids(self, table: Mapping[int, roce.Gid], state: str = "4: ACTIVE") -> None:
        """Replace the GID table of the RoCE device that belongs to the cable."""
        fakes.roce_tree(self, roce.Device(
            self.card.hca, self.card.interface, self.card.pci, table, state))  # fmt: skip

    def memory(self, available: float, total: float = 121.69) -> None:
        """/proc/meminfo as it shall read, in GiB."""
        fd = os.open(self.folder / "meminfo", os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(fd, fakes.meminfo(available, total).encode())  # always as long: read whole or not
        os.close(fd)

    def boot_id(self, text: str) -> None:
        """Another one is how a program sees that the machine was started anew."""
        (self.folder / "boot").write_text(text + "\n")

    def kernel_log(self, text: str) -> None:
        self.write("/run/rig/kernel.log", text)

    def gpu_processes(self, *rows: str) -> None:
        """What nvidia-smi tells of who computes: ``pid, name, MiB`` each."""
        self.write("/run/rig/compute-apps", "".join(f"{row}\n" for row in rows))

    def down(self) -> None:
        """End it with all that runs in it; its files stay in its folder."""
        self.__dict__.pop("docker", None)
        self._init.end(self.pid)


class Init(subprocess.Popen[str]):
    """``unshare`` with the first process of a namespace. It dies with the thread that made it."""

    def __init__(self, argv: Sequence[str]) -> None:
        libc = ctypes.CDLL(None)
        super().__init__(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG
            start_new_session=True,  # Ctrl-C is for the tests, not for the nodes
        )

    def in_its_network(self, within: float = 10.0) -> None:
        """Wait until it has left this machine's network: what is set there before would be set
        here."""
        end = time.monotonic() + within
        mine = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self.pid}/ns/net") == mine:
            assert time.monotonic() < end and self.poll() is None, "no network namespace was made"
            time.sleep(0.002)

    def stderr_text(self) -> str:
        assert self.stderr
        return self.stderr.read()

    def end(self, first: int | None = None) -> None:
        """SIGKILL: unshare ignores SIGTERM while it waits. ``first`` is pid 1 of the namespace."""
        with contextlib.suppress(ProcessLookupError):
            if first is not None:
                os.kill(first, signal.SIGKILL)
        self.kill()
        self.wait()
        for stream in (self.stdout, self.stderr):
            if stream:
                stream.close()


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def command_of(process: psutil.Process) -> str:
    """Its command line; empty when it has ended since it was listed."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
