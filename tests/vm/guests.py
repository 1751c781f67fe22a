"""Two virtual machines as two Sparks: what of the link is the kernel's own is real here.

Each guest has its own kernel, systemd, Docker and an RoCE device of rdma_rxe, so its GID table, its
/dev/infiniband, its limits and its reboots are no fakes. qemu emulates (TCG), so no KVM is needed.
The bridge and the taps lie in a network namespace that dies with this process; nothing in it leads
to or from the machine's own network.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import base
import fakes
import head_clone
import stub_image
import weights
from clone import CHECKOUT, Ran, copy_working_tree
from machine import Card, Done, Init
from rig import HEAD, MTU, WORKER

from launcher import processes
from launcher.settings import dotenv

FOLDER = Path("/var/tmp/spark-vm")
USER, UID, HOME = base.USER, base.UID, f"/home/{base.USER}"
CLONE = "a clean clone"
SETTINGS: Mapping[str, str] = {
    # CONTAINER_ULIMITS is as shipped: here memlock can be raised.
    **{key: text for key, text in head_clone.SETTINGS.items() if key != "CONTAINER_ULIMITS"},
    "READY_TIMEOUT": "240",
    "DSV41_HANG_SECONDS": "120",
}
PATIENCE: Mapping[str, Mapping[str, str]] = {
    "launcher/facts/batch.py": {"SECTION_SECONDS = 5 ": "SECTION_SECONDS = 40 ",
                                "LIMIT = 25.0": "LIMIT = 200.0"},
    "launcher/nodes/daemon.py": {"SECONDS = 10.0": "SECONDS = 80.0"},
}  # fmt: skip
MEMORY = 2048  # MiB of a guest
BOOT = 900.0  # seconds at most; about 40 on two cores with nothing beside
NICE = int(os.environ.get("SPARK_VM_NICE", "5"))  # of emulated cores: they take all there is
LATE = 60  # seconds for a connection, when other work takes the cores
CONTROL = "10.99.1"  # the network by which the tests come
CONTROL_MAC = "52:54:00:aa:00:0"
KERNEL_WORDS = (
    "console=ttyS0 root=/dev/vda rw net.ifnames=0 systemd.unified_cgroup_hierarchy=1 apparmor=0 "
    "selinux=0 audit=0 mitigations=off edd=off quiet"
)


@dataclass(frozen=True)
class Slot:
    """A line of the GID table as sysfs tells of it; ``kind`` is empty where it cannot be read."""

    index: int
    gid: str
    kind: str

    @property
    def empty(self) -> bool:
        return not self.gid.strip("0:")


class Guest:
    def __init__(self, number: int, name: str, card: Card, folder: Path, space: int) -> None:
        self.number = number
        self.name = name
        self.card = card
        self.folder = folder
        self.control = f"{CONTROL}.{number}"
        self._into = ["nsenter", "-t", str(space), "-n", "--"]
        self._machine: subprocess.Popen[bytes] | None = None
        self._masters: dict[str, subprocess.Popen[bytes]] = {}

    # Its machine.

    def power_on(self, image: base.Base) -> None:
        console = self.folder / f"console{self.number}.log"
        disk = "if=virtio,format=raw,file="
        card = "virtio-net-pci,netdev"
        words = [
            *("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "1"),
            *("-m", str(MEMORY), "-nodefaults", "-display", "none", "-serial", f"file:{console}"),
            *("-kernel", str(image.kernel), "-initrd", str(image.ramdisk)),
            *("-append", KERNEL_WORDS, "-device", "virtio-rng-pci"),
            *("-drive", f"{disk}{image.disk},snapshot=on"),  # what it writes is gone at its end
            *("-drive", f"{disk}{self.folder}/node{self.number}.img,cache=unsafe"),
        ]
        for ident, mac, more in (
            ("control", f"{CONTROL_MAC}{self.number}", ""),
            ("cable", self.card.mac, f",host_mtu={MTU},speed=200000,duplex=full"),
        ):
            tap = f"{ident}{self.number}"
            words += ["-netdev", f"tap,id={ident},ifname={tap},script=no,downscript=no"]
            words += ["-device", f"{card}={ident},mac={mac}{more}"]
        self._machine = _process([*self._into, "nice", "-n", str(NICE), *words], self.folder)
        # Where the kernel shares out cores by sessions, that alone counts between them.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._machine.pid}/autogroup").write_text(str(NICE))

    def power_off(self) -> None:
        for each in (*self._masters.values(), *([self._machine] if self._machine else [])):
            each.kill()
            each.wait()
        self._masters.clear()
        self._machine = None

    def wait_up(self, within: float = BOOT) -> None:
        """Until its boot is over."""
        end = time.monotonic() + within
        while self.run("true", check=False, timeout=LATE + 20).status:
            if time.monotonic() > end:
                raise AssertionError(f"{self.name} is not up:\n{self.console()}")
            self._alive()
            time.sleep(0.5)
        self.run("systemctl", "is-system-running", "--wait", check=False, timeout=within)
        asked = ("systemctl", "list-units", "--failed", "--plain", "--no-legend")
        failed = self.run(*asked, timeout=within).out
        if "spark-node" in failed or "docker" in failed or "ssh.service" in failed:
            raise AssertionError(f"{self.name} has failed units:\n{failed}\n{self.console()}")

    def reboot(self) -> None:
        """As its owner does it; back when all of it is up again."""
        before = self.boot_id()
        self.run("systemctl", "reboot", check=False)
        for each in self._masters.values():
            each.kill()
            each.wait()
        self._masters.clear()
        end = time.monotonic() + BOOT
        while self.boot_id() in ("", before):
            if time.monotonic() > end:
                raise AssertionError(f"{self.name} does not come back:\n{self.console()}")
            time.sleep(1.0)
        self.wait_up()
        self.connect()

    def boot_id(self) -> str:
        """Empty while it cannot be asked."""
        asked = self.run("cat", "/proc/sys/kernel/random/boot_id", check=False, timeout=LATE)
        return asked.out.strip()

    def console(self) -> str:
        path = self.folder / f"console{self.number}.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else "(no console yet)"

    def _alive(self) -> None:
        assert self._machine
        if self._machine.poll() is not None:
            said = (self.folder / "said.log").read_text(errors="replace")[-2000:]
            raise AssertionError(f"the machine of {self.name} has ended:\n{said}")

    # Commands in it.

    def _ssh(self, user: str, *options: str) -> list[str]:
        return [
            *self._into, "ssh", "-F", "none", "-i", str(self.folder / "id"),
            "-o", f"UserKnownHostsFile={self.folder}/known_hosts", "-o", "BatchMode=yes",
            "-o", f"ConnectTimeout={LATE}", "-o", "LogLevel=ERROR",
            "-S", f"{self.folder}/{user}-%h", *options, f"{user}@{self.control}",
        ]  # fmt: skip

    def connect(self) -> None:
        """Connections that all commands share: a handshake takes an emulated core a second.

        They die with the thread that calls this, so it must be the tests' own.
        """
        for user in ("root", USER):
            self._masters[user] = _process(self._ssh(user, "-M", "-N"), self.folder)
        end = time.monotonic() + 2 * LATE
        for user, master in self._masters.items():
            while not (self.folder / f"{user}-{self.control}").exists():
                if master.poll() is not None or time.monotonic() > end:
                    said = (self.folder / "said.log").read_text()[-2000:]
                    raise AssertionError(f"no connection of {user} to {self.name}:\n{said}")
                time.sleep(0.05)

    def run(
        self,
        *argv: str,
        user: str = "root",
        cwd: str = "",
        timeout: float = 120.0,
        check: bool = True,
    ) -> Done:
        """Run ``argv`` in a login of the guest. Status 124: not at its end in ``timeout`` seconds,
        as a guest that boots beside other work may be."""
        command = (f"cd {shlex.quote(cwd)} && exec " if cwd else "") + shlex.join(argv)
        try:
            ran = subprocess.run(
                [*self._ssh(user, "-o", "ControlMaster=no"), command],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False,
            )  # fmt: skip
            status, streams = ran.returncode, (ran.stdout, ran.stderr)
        except subprocess.TimeoutExpired as late:
            status, streams = 124, (late.stdout or b"", late.stderr or b"")
        out, err = (each.decode(errors="replace") for each in streams)
        done = Done(argv, status, out, err)
        if check and done.status:
            raise AssertionError(f"{self.name}: {argv} ended with {done.status}:\n{done.said}")
        return done

    # Its end of the link.

    def table(self, slots: int = 5) -> list[Slot]:
        """The first slots of its GID table, read from sysfs without the launcher."""
        port = f"/sys/class/infiniband/{self.card.hca}/ports/1"
        ask = 'for n in $(seq 0 $2); do cat "$1/gids/$n"; cat "$1/gid_attrs/types/$n" || echo; done'
        asked = ("sh", "-c", f"{ask} 2>/dev/null", "sh", port, str(slots - 1))
        rows = self.run(*asked).out.splitlines()
        return [Slot(n, rows[2 * n].strip(), rows[2 * n + 1].strip()) for n in range(slots)]

    def mtu(self, size: int) -> None:
        self.run("ip", "link", "set", self.card.interface, "mtu", str(size))

    def ping(self, to: str, payload: int) -> bool:
        """One packet that may not be split."""
        asked = ("ping", "-c1", "-W5", "-M", "do", "-s", str(payload), to)
        return self.run(*asked, check=False).status == 0

    # Its Docker.

    def load(self) -> None:
        """The serving image, from the one tar that both have."""
        self.run("docker", "load", "-q", "-i", "/home/.node/stub.tar", timeout=BOOT)

    def containers(self) -> dict[str, str]:
        """Name and state of each container, ended ones too."""
        said = self.run("docker", "ps", "-a", "--format", "{{.Names}} {{.State}}").out
        return dict(row.split() for row in said.splitlines())


class Guests:
    """``up`` makes both; ``down`` leaves only the cached base image."""

    head: Guest
    worker: Guest

    def __init__(self) -> None:
        self.folder = FOLDER
        self._space: Init | None = None
        self._lock = -1
        self._guests: list[Guest] = []
        self.base: base.Base
        self.took: dict[str, float] = {}

    def up(self) -> Guests:
        venv = CHECKOUT / ".venv"
        if not (venv / "launcher.lock.sha256").exists():
            raise AssertionError("the clone gets a copy of .venv: run ./start.sh --prepare first")
        self.base = base.make()
        self.took["base image"] = self.base.made_in
        ours, theirs = (_minor(text) for text in (_venv_python(venv), self.base.versions["python"]))
        if ours != theirs:
            raise AssertionError(f".venv is of Python {ours}, the guests have {theirs}")
        self._only_one()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def _up(self) -> None:
        began = time.monotonic()
        self._space = _namespace()
        self._wires(self._space.pid)
        for number, name, card in ((1, "spark-1", HEAD), (2, "spark-2", WORKER)):
            self._guests.append(Guest(number, name, card, self.folder, self._space.pid))
        self.head, self.worker = self._guests
        for key in ("id", "head", "host1", "host2"):
            asked = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)]
            subprocess.run(asked, check=True)
        known = [f"{each.control} {self._host_key(each)}\n" for each in self._guests]
        (self.folder / "known_hosts").write_text("".join(known))
        image = stub_image.make(base.CACHE)
        for guest in self._guests:
            self._disk(guest, image)
        self.took["disks"] = time.monotonic() - began
        began = time.monotonic()
        for guest in self._guests:
            guest.power_on(self.base)
        with ThreadPoolExecutor() as pool:
            list(pool.map(Guest.wait_up, self._guests))
        self.took["boot"] = time.monotonic() - began
        began = time.monotonic()
        for guest in self._guests:
            guest.connect()
        with ThreadPoolExecutor() as pool:
            list(pool.map(Guest.load, self._guests))
        self.took["image"] = time.monotonic() - began

    def _only_one(self) -> None:
        self._lock = os.open(base.CACHE / "guests.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AssertionError(f"other guests are up in {self.folder}; wait for them") from None

    def _wires(self, space: int) -> None:
        lines = ["link set lo up"]
        for bridge, mtu in (("control", 1500), ("cable", MTU)):
            lines += [f"link add {bridge} mtu {mtu} type bridge", f"link set dev {bridge} up"]
            for number in (1, 2):
                tap = f"{bridge}{number}"
                lines += [
                    f"tuntap add {tap} mode tap",
                    f"link set dev {tap} mtu {mtu} master {bridge} up",
                ]
        lines.append(f"addr add {CONTROL}.254/24 dev control")
        subprocess.run(
            ["nsenter", "-t", str(space), "-n", "--", "ip", "-batch", "-"],
            input="\n".join(lines), text=True, check=True,
        )  # fmt: skip

    def _host_key(self, guest: Guest) -> str:
        public = (self.folder / f"host{guest.number}.pub").read_text()
        return " ".join(public.split()[:2])

    def _disk(self, guest: Guest, image: Path) -> None:
        """What only this node has, as the file system that becomes its /home."""
        tree = self.folder / f"node{guest.number}"
        own, home = tree / ".node", tree / USER
        (home / ".ssh").mkdir(parents=True)
        own.mkdir(mode=0o700)
        environ = {
            "NAME": guest.name,
            "LINK": guest.card.interface,
            "LINK_MAC": guest.card.mac,
            "LINK_ADDRESS": f"{guest.card.address}/24",
            "HCA": guest.card.hca,
            "MTU": str(MTU),
            "CONTROL_MAC": f"{CONTROL_MAC}{guest.number}",
            "CONTROL_ADDRESS": f"{guest.control}/24",
        }
        (own / "env").write_text("".join(f"{key}={text}\n" for key, text in environ.items()))
        shutil.copy(base.HERE / "guest" / "setup", own)
        for suffix in ("", ".pub"):
            host = self.folder / f"host{guest.number}{suffix}"
            shutil.copy(host, own / f"ssh_host_ed25519_key{suffix}")
        (own / "meminfo").write_text(fakes.meminfo(118.0, 121.69))
        smi = fakes.NVIDIA_SMI.replace("{node}", guest.name[-1].zfill(12))
        (own / "nvidia-smi").write_text(smi)
        (own / "nvidia-container-runtime-hook").write_text(fakes.GPU_HOOK)
        shutil.copyfile(image, own / "stub.tar")
        tests, head = ((self.folder / f"{key}.pub").read_text() for key in ("id", "head"))
        (own / "authorized_keys").write_text(tests)
        accepted = tests + (head if guest is self.worker else "")
        (home / ".ssh" / "authorized_keys").write_text(accepted)
        if guest is self.head:
            shutil.copy(self.folder / "head", home / ".ssh" / "id_ed25519")
            known = f"{WORKER.address} {self._host_key(self.worker)}\n"
            (home / ".ssh" / "known_hosts").write_text(known)
            _clone(home / CLONE)
            models = home / CLONE
        else:
            models = home / head_clone.CACHE
        for name, files in (("model", weights.checkpoint()), ("engram-src", weights.engram())):
            for path, data in files.items():
                (models / name / path).parent.mkdir(parents=True, exist_ok=True)
                (models / name / path).write_bytes(data)
        home.chmod(0o700)
        for path in (home, *home.rglob("*")):
            os.chown(path, UID, UID, follow_symlinks=False)
        disk = self.folder / f"node{guest.number}.img"
        subprocess.run(["truncate", "-s", "24G", str(disk)], check=True)
        subprocess.run(
            ["mkfs.ext4", "-q", "-E", "lazy_itable_init=1", "-d", str(tree), str(disk)],
            check=True, env={**os.environ, "PATH": base.ADMIN}, stdout=sys.stderr,
        )  # fmt: skip
        shutil.rmtree(tree)

    def down(self) -> None:
        for guest in self._guests:
            guest.power_off()
        self._guests.clear()
        if self._space:
            self._space.end()
            self._space = None
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


class VmClone:
    """The clone on the head, used by its owner in a login there."""

    def __init__(self, guests: Guests) -> None:
        self.guests = guests
        self.history: list[Ran] = []

    def start(self, *words: str, timeout: float = 120.0) -> Ran:
        """``./start.sh WORDS`` to its end."""
        began = time.monotonic()
        asked = ("./start.sh", *words)
        done = self.guests.head.run(*asked, user=USER, cwd=CLONE, timeout=timeout, check=False)
        told = " ".join(asked)
        ran = Ran(told, done.status, done.out, done.err, time.monotonic() - began)
        self.history.append(ran)
        return ran

    def until(self, code: int, words: str = "", timeout: float = 120.0) -> Ran:
        """Ask ``status`` until it ends with ``code`` and says ``words``.

        Once is not always enough: on emulated cores the worker's Docker, or the API, may need
        longer than the 4 s and 0.9 s that status gives them, and it says so.
        """
        end = time.monotonic() + timeout
        while True:
            ran = self.start("status")
            if ran.status == code and words in ran.said:
                return ran
            assert time.monotonic() < end, f"no status {code} {words!r}: {ran.status}\n{ran.said}"

    def containers(self) -> dict[str, str]:
        guests = (self.guests.head, self.guests.worker)
        return {f"{g.name} {k}": v for g in guests for k, v in g.containers().items()}

    def account(self) -> Iterator[tuple[str, str]]:
        """What the last commands said, and the ends of the ranks' logs."""
        for ran in self.history[-4:]:
            yield f"{ran.words}: status {ran.status} after {ran.seconds:.1f} s", ran.said
        for guest in (self.guests.head, self.guests.worker):
            for name, state in guest.containers().items():
                log = guest.run("docker", "logs", "--tail", "30", name, check=False)
                yield f"{guest.name}: {name} {state}", log.said


def _namespace() -> Init:
    """A process in a network namespace of its own. It is asked whether it is there yet: until then
    the machine's own network would be changed in its name."""
    made = Init(["unshare", "-n", "sh", "-c", "echo there; exec sleep infinity"])
    assert made.stdout
    told = made.stdout.readline()
    spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in (made.pid, "self")}
    if told != "there\n" or len(spaces) != 2:
        made.end()
        raise AssertionError("no network namespace could be made")
    return made


def _clone(target: Path) -> None:
    """A clone of the working tree, with .venv as the guests' Python can use it."""
    copy_working_tree(CHECKOUT, target)
    venv = target / ".venv"
    shutil.copytree(CHECKOUT / ".venv", venv, symlinks=True)
    for link in (venv / "bin").glob("python*"):
        link.unlink()
        link.symlink_to("/usr/bin/python3")
    told = (venv / "pyvenv.cfg").read_text()
    (venv / "pyvenv.cfg").write_text(re.sub(r"(?m)^home = .*$", "home = /usr/bin", told))
    lines = [f"{key}={dotenv.quote(text)}\n" for key, text in SETTINGS.items()]
    (target / ".env").write_text("".join(lines))
    (target / ".env").chmod(0o600)
    _patient(target)


def _patient(target: Path) -> None:
    """What takes a Spark a second takes an emulated core ten: the launcher's limits for an answer
    are stretched as much. Nothing else of it is changed."""
    for file, limits in PATIENCE.items():
        path = target / file
        text = path.read_text()
        for was, becomes in limits.items():
            assert text.count(was) == 1, f"{file} has {was!r} {text.count(was)} times, needed once"
            text = text.replace(was, becomes)
        path.write_text(text)


def _venv_python(venv: Path) -> str:
    rows = (row.partition("=") for row in (venv / "pyvenv.cfg").read_text().splitlines())
    return next(text.strip() for key, _, text in rows if key.strip() == "version")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _process(argv: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """A process that dies with this one; Ctrl-C is for the tests alone."""
    me = os.getpid()
    with (folder / "said.log").open("ab") as said:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            env={**os.environ, "PATH": base.ADMIN, "TMPDIR": str(folder)},
            preexec_fn=lambda: processes.die_with(me, signal.SIGKILL),
        )  # fmt: skip
