"""A real sshd on 127.0.0.1 for the tests: its own host keys, client key and known_hosts."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

from launcher.nodes.endpoint import Endpoint
from launcher.nodes.ssh import SshNode

SSHD = "/usr/sbin/sshd"
ME = pwd.getpwuid(os.getuid()).pw_name

CONFIG = """\
ListenAddress 127.0.0.1
Port {port}
{keys}
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
AuthorizedKeysFile {folder}/authorized_keys
Subsystem sftp internal-sftp
MaxStartups 100
{more}
"""


def missing() -> str | None:
    """Why no sshd can be started here, None if it can."""
    programs = [SSHD, *(shutil.which(each) or each for each in ("ssh", "ssh-keygen", "rsync"))]
    lacking = [each for each in programs if not Path(each).is_file()]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def keygen(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    argv = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", str(path)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    return path


class Server:
    """`more`: lines of sshd_config. `kinds`: of its host keys."""

    def __init__(self, folder: Path, more: str = "", kinds: tuple[str, ...] = ("ed25519",)) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's own, made by its unit
        self.hosts = [keygen(folder / f"host_{kind}", kind) for kind in kinds]
        self.key = keygen(folder / "client")
        shutil.copy(folder / "client.pub", folder / "authorized_keys")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        keys = "\n".join(f"HostKey {each}" for each in self.hosts)
        (folder / "sshd_config").write_text(
            CONFIG.format(port=self.port, keys=keys, folder=folder, more=more)
        )
        self.known = folder / "known_hosts"
        self.know(*self.hosts)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def know(self, *keys: Path) -> None:
        lines = [f"{self.name} {Path(f'{key}.pub').read_text()}" for key in keys]
        self.known.write_text("".join(lines))

    @property
    def name(self) -> str:
        return f"[127.0.0.1]:{self.port}"

    def endpoint(self, **other: str) -> Endpoint:
        given = {"user": ME, "key": str(self.key), "known_hosts": str(self.known), **other}
        return Endpoint("127.0.0.1", port=self.port, **given)

    def start(self) -> None:
        with (self.folder / "sshd.log").open("ab") as log:
            argv = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
            self.process = subprocess.Popen(argv, stderr=log, stdin=subprocess.DEVNULL)
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert self.process.poll() is None, (self.folder / "sshd.log").read_text()
            time.sleep(0.02)
        raise AssertionError("sshd does not listen")

    def sessions(self) -> list[psutil.Process]:
        """The processes of its connections, with all below them."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def process_connections(self) -> list[psutil.Process]:
        """One process for each connection."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children()

    def hang_up(self) -> None:
        """Ends every connection."""
        self._send(signal.SIGKILL)

    def freeze(self) -> None:
        """Every connection stays, and nobody answers on it."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for each in self.sessions():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def stop(self) -> None:
        assert self.process is not None
        self.thaw()
        self.hang_up()
        self.process.terminate()
        self.process.wait(10)


def reach(server: Server, endpoint: Endpoint) -> SshNode:
    return SshNode("worker", endpoint, server.folder / "ssh", include="")
