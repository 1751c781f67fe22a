"""The guests' base image: Debian with ssh, Docker and RDMA, its kernel, and an initial RAM disk.

Made once by debootstrap through apt's own configuration of this machine, and kept in CACHE under a
hash of the recipe: this file, ``guest/`` and the release. Nothing in it differs between the nodes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("SPARK_VM_CACHE", "/var/tmp/spark-vm-cache"))
ADMIN = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Each program and Debian's package of it.
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "debootstrap": "debootstrap",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "modprobe": "kmod",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
    "mkfs.ext4": "e2fsprogs",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "ldd": "libc-bin",
}
PACKAGES = (
    "systemd-sysv", "udev", "openssh-server", "rsync", "iproute2", "iputils-ping", "kmod",
    "docker.io", "rdma-core", "ibverbs-utils", "ibverbs-providers", "python3", "ca-certificates",
    "netbase", "procps", "curl", "nfs-kernel-server", "sudo",
)  # fmt: skip
SIZE = "6G"  # of the file system, sparse
NEEDED_TO_BOOT = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")
KERNEL = "linux-image-amd64"
USER, UID = "dgx", 2000
SSHD = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
UseDNS no
MaxStartups 100
Subsystem sftp internal-sftp
"""
# The containers use the host's network, as on a Spark; a bridge would only cost time.
DOCKERD = {"bridge": "none", "iptables": False, "ip6tables": False}
# What a guest has no use for, and would spend its seconds on.
IDLE = ("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer",
        "e2scrub_reap.service", "fstrim.timer", "systemd-timesyncd.service", "rsync.service",
        "getty@tty1.service", "systemd-pstore.service", "iwpmd.service")  # fmt: skip


@dataclass(frozen=True)
class Base:
    folder: Path
    versions: dict[str, Any]
    made_in: float  # seconds; 0 where it was found

    @property
    def disk(self) -> Path:
        return self.folder / "base.img"

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def ramdisk(self) -> Path:
        return self.folder / "initrd.img"


def missing() -> str:
    """The packages this machine lacks, in words; empty where it has all."""
    lacks = [tool for tool in TOOLS if not shutil.which(tool, path=ADMIN)]
    packages = " ".join(sorted({TOOLS[tool] for tool in lacks}))
    return f"{', '.join(lacks)} (apt-get install {packages})" if lacks else ""


def make() -> Base:
    """The base image, from the cache where its recipe is the same."""
    suite = _os_release()["VERSION_CODENAME"]
    recipe = hashlib.sha256(suite.encode())
    for path in (Path(__file__), *sorted((HERE / "guest").iterdir())):
        if path.name != "setup":  # it is on each node's own disk
            recipe.update(path.read_bytes())
    folder = CACHE / recipe.hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    with _alone():
        if (folder / "versions.json").exists():
            return Base(folder, json.loads((folder / "versions.json").read_text()), 0.0)
        began = time.monotonic()
        for old in CACHE.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
        part = CACHE / "part"
        part.mkdir()
        versions = _make(part, suite)
        shutil.rmtree(part / "root")
        (part / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
        part.rename(folder)
        return Base(folder, versions, time.monotonic() - began)


def _make(folder: Path, suite: str) -> dict[str, Any]:
    root = folder / "root"
    mirror, environ = _mirror(suite)
    _run(
        "debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}",
        suite, str(root), mirror, environ=environ,
    )  # fmt: skip
    kernel = _kernel(folder, root)
    _ramdisk(folder, root, kernel)
    _furnish(root)
    versions = {
        "suite": suite,
        "kernel": kernel,
        "python": _run("chroot", str(root), "python3", "-V").split()[1],
    }
    for package in ("docker.io", "rdma-core", "openssh-server", "systemd"):
        asked = ("dpkg-query", f"--admindir={root}/var/lib/dpkg", "-Wf", "${Version}", package)
        versions[package] = _run(*asked)
    disk = folder / "base.img"
    _run("truncate", "-s", SIZE, str(disk))
    _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=1", "-d", str(root), str(disk))
    return versions


def _mirror(suite: str) -> tuple[str, dict[str, str]]:
    """Where apt has this release from, and the proxy it uses."""
    form = "$(REPO_URI) $(CODENAME) $(COMPONENT)"
    found = _run("apt-get", "indextargets", "--format", form, "Created-By: Packages")
    for row in found.splitlines():
        address, codename, component = row.split()
        if (codename, component) == (suite, "main"):
            break
    else:
        raise AssertionError(f"apt has no source of {suite} main here:\n{found}")
    shell = _run("apt-config", "shell", "proxy", "Acquire::http::Proxy").strip()
    proxy = shell.partition("=")[2].strip("'")
    return address, {"http_proxy": proxy} if proxy else {}


def _kernel(folder: Path, root: Path) -> str:
    """Debian's kernel and its modules, without installing it; its release."""
    depends = _run("apt-cache", "depends", "--important", KERNEL)
    package = next(
        word for word in depends.split() if word.startswith("linux-image-") and word != KERNEL
    )
    unpacked = folder / "kernel"
    unpacked.mkdir()
    _run("apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", package, cwd=unpacked)
    (archive,) = unpacked.glob("*.deb")
    _run("dpkg-deb", "-x", str(archive), str(unpacked))
    release = package.removeprefix("linux-image-")
    shutil.copytree(unpacked / "lib" / "modules", root / "lib" / "modules", dirs_exist_ok=True)
    _run("depmod", "-b", str(root), release)
    shutil.copyfile(unpacked / "boot" / f"vmlinuz-{release}", folder / "vmlinuz")
    shutil.rmtree(unpacked)
    return release


def _ramdisk(folder: Path, root: Path, release: str) -> None:
    tree = folder / "initrd"
    for name in ("bin", "mods", "proc", "sys", "dev", "mnt"):
        (tree / name).mkdir(parents=True)
    busybox = shutil.which("busybox", path=ADMIN)
    assert busybox
    shutil.copy(busybox, tree / "bin" / "busybox")
    order: list[str] = []
    for name in NEEDED_TO_BOOT:
        told = _run("modprobe", "-d", str(root), "-S", release, "--show-depends", name)
        for row in told.splitlines():
            words = row.split()
            if words[0] == "insmod" and Path(words[1]).name not in order:
                order.append(Path(words[1]).name)
                shutil.copy(words[1], tree / "mods")
    (tree / "order").write_text("\n".join(order) + "\n")
    shutil.copy(HERE / "guest" / "init", tree / "init")
    (tree / "init").chmod(0o755)
    names = "\0".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    with (folder / "initrd.img").open("wb") as image:
        subprocess.run(
            ["cpio", "--quiet", "-0", "-o", "-H", "newc"],
            cwd=tree, input=names.encode(), stdout=image, check=True,
        )  # fmt: skip
    shutil.rmtree(tree)


def _furnish(root: Path) -> None:
    """What both guests have in common beyond the packages."""
    etc = root / "etc"
    (etc / "fstab").write_text("/dev/vda / ext4 defaults 0 1\n")
    (etc / "resolv.conf").write_text("")
    for key in (etc / "ssh").glob("ssh_host_*"):
        key.unlink()
    (etc / "ssh" / "sshd_config").write_text(SSHD)
    (etc / "docker").mkdir(exist_ok=True)
    (etc / "docker" / "daemon.json").write_text(json.dumps(DOCKERD))
    chroot = ("chroot", str(root))
    # Without a password, and not locked: sshd refuses a locked account's keys too.
    _run(*chroot, "useradd", "-u", str(UID), "-U", "-s", "/bin/bash", "-M", "-p", "*", USER)
    _run(*chroot, "usermod", "-aG", "docker,adm,systemd-journal", USER)
    unit = "spark-node.service"
    shutil.copy(HERE / "guest" / unit, etc / "systemd" / "system" / unit)
    _run(*chroot, "systemctl", "enable", "-q", unit)
    for idle in IDLE:
        (etc / "systemd" / "system" / idle).unlink(missing_ok=True)
        (etc / "systemd" / "system" / idle).symlink_to("/dev/null")
    shutil.rmtree(root / "var" / "cache" / "apt", ignore_errors=True)


def _os_release() -> dict[str, str]:
    rows = Path("/etc/os-release").read_text().splitlines()
    return {key: text.strip('"') for key, _, text in (row.partition("=") for row in rows)}


@contextmanager
def _alone() -> Iterator[None]:
    with (CACHE / "lock").open("w") as held:
        flock(held, LOCK_EX)
        yield


def _run(*argv: str, environ: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    ran = subprocess.run(
        argv, cwd=cwd, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": ADMIN, "LC_ALL": "C", **(environ or {})},
    )  # fmt: skip
    if ran.returncode:
        said = (ran.stdout + ran.stderr)[-3000:]
        raise AssertionError(f"{' '.join(argv)} ended with {ran.returncode}:\n{said}")
    return ran.stdout


if __name__ == "__main__":  # makes the base image by itself
    print(make(), file=sys.stderr)
