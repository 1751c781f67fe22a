"""Docker daemons of a test's own, each in a network namespace of its own, and a small image.

In the root namespace a daemon would change the machine's firewall. All that is made here lies in
one folder and in namespaces named after this process, and goes with `down`.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from launcher import processes

IMAGE = "spark-rig/python:1"
PROGRAMS = ("dockerd", "containerd", "runc", "ip", "nsenter", "ldd", "umount")
LEFT_OUT = {"test", "idlelib", "tkinter", "lib2to3", "ensurepip", "pydoc_data", "__pycache__"}
UP = 60.0  # seconds for a daemon to answer


def obstacle() -> str:
    """Why no daemon can be started here, empty if one can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces and Docker daemons"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"needs {', '.join(missing)} (Debian: docker.io iproute2)" if missing else ""


class Daemon:
    """One daemon, as of one node; `client` is a factory for the launcher's runtime."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder / name
        self.netns = f"spark-{name}-{os.getpid()}"
        self.socket = self.folder / "docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def client(self) -> docker.DockerClient:
        return docker.DockerClient(f"unix://{self.socket}", timeout=10)

    def up(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not Path("/run/netns", self.netns).exists():
            _run("ip", "netns", "add", self.netns)
            # `ip netns exec` would hide the control groups by a fresh /sys; nsenter leaves it.
            _run("nsenter", f"--net=/run/netns/{self.netns}", "ip", "link", "set", "lo", "up")
        me = os.getpid()
        with (self.folder / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "nsenter", f"--net=/run/netns/{self.netns}", "dockerd",
                    "--data-root", str(self.folder / "data"),
                    "--exec-root", str(self.folder / "exec"),
                    "--pidfile", str(self.folder / "dockerd.pid"),
                    "-H", f"unix://{self.socket}",
                    "--iptables=false", "--ip6tables=false", "--ip-forward=false",
                    "--bridge=none", "--userland-proxy=false", "--log-level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PATH": _path()},
                preexec_fn=lambda: processes.die_with(me, signal.SIGTERM),
            )  # fmt: skip
        deadline = time.monotonic() + UP
        while True:
            with contextlib.suppress(Exception), contextlib.closing(self.client()) as client:
                client.ping()
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_end = (self.folder / "dockerd.log").read_text()[-3000:]
                raise RuntimeError(f"the Docker daemon {self.name} did not come up:\n{log_end}")
            time.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """End the daemon; its containers end with it, and both are there again after `up`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def clear(self) -> None:
        """Remove every container, whosever it is."""
        with contextlib.closing(self.client()) as client:
            for one in client.containers.list(all=True, ignore_removed=True):
                one.remove(force=True)

    def down(self) -> None:
        with contextlib.suppress(Exception):
            if self._process is not None:
                self._process.send_signal(signal.SIGCONT)
                self.clear()
        self.stop()
        # The deepest first.
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((m for m in mounts if m.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", "-l", mount], check=False)
        if Path("/run/netns", self.netns).exists():
            _run("ip", "netns", "delete", self.netns)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def pair(folder: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """A head's and a worker's daemon, both with `IMAGE`; skips the test where none can be."""
    if why := obstacle():
        if os.environ.get("SPARK_TEST_DEMAND"):
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    both = (Daemon("head", folder), Daemon("worker", folder))
    try:
        rootfs = _rootfs()
        for one in both:
            one.up()
            with contextlib.closing(one.client()) as client:
                name, tag = IMAGE.split(":")
                client.api.import_image_from_data(rootfs, repository=name, tag=tag)
        yield both
    finally:
        for one in both:
            one.down()


def _rootfs() -> bytes:
    """A root file system with this machine's own Python and its standard library, as a tar."""
    python = Path("/usr/bin/python3").resolve()
    library = Path("/usr/lib") / python.name
    objects = [python, *(library / "lib-dynload").glob("*.so")]
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for folder in ("tmp", "root", "run", "proc", "sys", "dev", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        tar.add(python, "usr/bin/python3")
        for path in sorted(library.rglob("*")):
            inside = path.relative_to(library)
            if path.is_file() and not LEFT_OUT & set(inside.parts):
                tar.add(path.resolve(), f"usr/lib/{python.name}/{inside}")
        for path in _libraries(objects):
            tar.add(path.resolve(), str(path).lstrip("/"))
    return raw.getvalue()


def _libraries(objects: list[Path]) -> list[Path]:
    said = subprocess.run(
        ["ldd", *map(str, objects)], capture_output=True, text=True, check=False
    ).stdout
    words = {word for line in said.splitlines() for word in line.split() if word.startswith("/")}
    return sorted(Path(word) for word in words if not word.endswith(":"))


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, env={**os.environ, "PATH": _path()}, stdout=sys.stderr)
