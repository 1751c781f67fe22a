"""One guest: its machine in qemu, the ways into it, and what is asked of it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import base
from machine import Card, Done
from rig import MTU

from launcher import processes

USER, UID = base.USER, base.UID
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


def _process(argv: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """A process that dies with this one; Ctrl-C is for the tests alone."""
    me = os.getpid()
    with (folder / "said.log").open("ab") as said:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            env={**os.environ, "PATH": base.ADMIN, "TMPDIR": str(folder)},
            preexec_fn=lambda: processes.die_with(me, signal.SIGKILL),
        )  # fmt: skip
