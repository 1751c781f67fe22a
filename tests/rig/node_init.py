"""The first process of a node: makes the node's files visible, then only buries its dead.

``unshare -m -u -i -n -p --fork --kill-child python3 node_init.py JSON`` starts it in namespaces of
its own, as pid 1. When it dies the kernel ends all of the node, mounts and interfaces included.
It needs nothing but the standard library, and nothing after the root has changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

SYS_NULL = (1, 3)
NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}
TERMINALS = {"tty": (5, 0), "console": (5, 1)}
# The devices of a Spark. Whoever opens one gets /dev/null.
GPU = ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
INFINIBAND = ("infiniband/uverbs0", "infiniband/uverbs1", "infiniband/rdma_cm")


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def overlay(folder: Path) -> Path:
    """The machine's own files below, the node's changes above; RAM file systems stay out."""
    root = folder / "root"
    layers = f"lowerdir=/,upperdir={folder / 'up'},workdir={folder / 'work'}"
    mount("-t", "overlay", "overlay", "-o", layers, root)
    return root


def devices(dev: Path) -> None:
    mount("-t", "tmpfs", "-o", "mode=755", "dev", dev)
    os.umask(0)
    for name, (major, minor) in {**NODES, **TERMINALS}.items():
        os.mknod(dev / name, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    for name in (*GPU, *INFINIBAND):
        (dev / name).parent.mkdir(exist_ok=True)
        os.mknod(dev / name, 0o666 | stat.S_IFCHR, os.makedev(*SYS_NULL))
    os.umask(0o022)
    for name, kind, options in (
        ("pts", "devpts", "newinstance,ptmxmode=0666,mode=620"),
        ("shm", "tmpfs", "mode=1777"),
        ("mqueue", "mqueue", "rw"),
    ):
        (dev / name).mkdir()
        mount("-t", kind, "-o", options, kind, dev / name)
    (dev / "ptmx").symlink_to("pts/ptmx")
    (dev / "fd").symlink_to("/proc/self/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        (dev / name).symlink_to(f"/proc/self/fd/{number}")


def system(folder: Path) -> None:
    """A /sys that can be written: the kernel's own folders bound into a tmpfs.

    class/ holds this node's interfaces only; the rig adds class/infiniband.
    """
    real = folder.parent / "sysfs"
    real.mkdir()
    mount("-t", "sysfs", "sysfs", real)
    mount("-t", "tmpfs", "-o", "mode=755", "sys", folder)
    for each in sorted(real.iterdir()):
        if each.name != "class":
            (folder / each.name).mkdir()
            mount("--bind", each, folder / each.name)
    (folder / "class" / "net").mkdir(parents=True)
    mount("--bind", real / "class" / "net", folder / "class" / "net")
    mount("--rbind", "/sys/fs/cgroup", folder / "fs" / "cgroup")
    subprocess.run(["umount", "-l", real], check=True)
    real.rmdir()


def files(root: Path, folder: Path, binds: list[str]) -> None:
    mount("-t", "proc", "proc", root / "proc")
    devices(root / "dev")
    system(root / "sys")
    for name, options in (("run", "mode=755"), ("tmp", "mode=1777")):
        mount("-t", "tmpfs", "-o", options, name, root / name)
    (root / "run" / "sshd").mkdir()
    for place in dict.fromkeys(("/var/tmp", str(folder.parent))):  # the rigs' own files
        if place == "/var/tmp" or not place.startswith("/var/tmp/"):
            mount("-t", "tmpfs", "-o", "mode=1777", "tmp", root / place.lstrip("/"))
    for private in ("root/.ssh", "root/.docker"):
        (root / private).mkdir(mode=0o700, exist_ok=True)
        mount("-t", "tmpfs", "-o", "mode=700", "private", root / private)
    # Docker's layers cannot lie on an overlay.
    (root / "var/lib/docker").mkdir(parents=True, exist_ok=True)
    mount("--bind", folder / "docker", root / "var/lib/docker")
    for path in binds:  # what lies on another file system than /
        mount("--bind", path, root / path.lstrip("/"))
    for path, text in (("/proc/meminfo", "meminfo"), ("/proc/sys/kernel/random/boot_id", "boot")):
        mount("--bind", folder / text, root / path.lstrip("/"))


def enter(root: Path) -> None:
    """Make ``root`` the root of this namespace and let go of all else."""
    os.chdir(root)
    Path(".old").mkdir()
    subprocess.run(["pivot_root", ".", ".old"], check=True)
    os.chdir("/")
    subprocess.run(["umount", "-l", "/.old"], check=True)
    os.rmdir("/.old")


def bury() -> None:
    """Wait for what the node's processes leave behind; never returns."""
    while True:
        signal.sigwait({signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def main() -> None:
    told = json.loads(sys.argv[1])
    folder = Path(told["folder"])
    me = os.readlink("/proc/self")  # as the machine's own pid namespace counts: /proc is still its
    mount("--make-rprivate", "/")
    root = overlay(folder)
    for name in ("root", *told["passable"]):  # a user of the node passes through these
        path = root / name.lstrip("/")
        path.chmod(path.stat().st_mode | 0o011)
    files(root, folder, told["binds"])
    ctypes.CDLL(None).sethostname(told["hostname"].encode(), len(told["hostname"]))
    enter(root)
    Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 2147483647")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    os.write(1, f"{me}\n".encode())
    bury()


if __name__ == "__main__":
    main()
