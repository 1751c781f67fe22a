"""Two virtual machines as two Sparks: what of the link is the kernel's own is real here.

Each guest has its own kernel, systemd, Docker and an RoCE device of rdma_rxe, so its GID table, its
/dev/infiniband, its limits and its reboots are no fakes. qemu emulates (TCG), so no KVM is needed.
The bridge and the taps lie in a network namespace that dies with this process; nothing in it leads
to or from the machine's own network.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import base
import fakes
import head_clone
import stub_image
import vm_clone
import weights
from clone import CHECKOUT
from guest import CONTROL, CONTROL_MAC, UID, USER, Guest
from machine import Init
from rig import HEAD, MTU, WORKER
from vm_clone import CLONE

FOLDER = Path("/var/tmp/spark-vm")


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
            vm_clone.make(home / CLONE)
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


def _venv_python(venv: Path) -> str:
    rows = (row.partition("=") for row in (venv / "pyvenv.cfg").read_text().splitlines())
    return next(text.strip() for key, _, text in rows if key.strip() == "version")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
