"""Which process listens on a TCP port, read from /proc.

Only sockets in state LISTEN (0A) count: an established connection to the port, or one in TIME_WAIT,
holds nothing.
"""

from __future__ import annotations

import errno
import os
import pwd
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LISTEN = "0A"


@dataclass(frozen=True)
class Listener:
    port: int
    uid: int
    inode: int


@dataclass(frozen=True)
class PortHolder:
    port: int
    user: str
    pid: int | None = None  # None: not ours to see
    command: str = ""

    def __str__(self) -> str:
        if self.pid is None:
            return f"a process of user {self.user} that this user may not look into"
        return f"pid {self.pid} of user {self.user}: {self.command}"


def parse(table: str) -> list[Listener]:
    """The listening sockets in the text of /proc/net/tcp or tcp6."""
    found = []
    for row in table.splitlines()[1:]:
        fields = row.split()
        if len(fields) > 9 and fields[3] == LISTEN:
            port = int(fields[1].rpartition(":")[2], 16)
            found.append(Listener(port, int(fields[7]), int(fields[9])))
    return found


def holders(port: int) -> list[PortHolder]:
    """Who listens on the port, on whatever address."""
    listeners = []
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        if path.exists():
            listeners += [each for each in parse(path.read_text()) if each.port == port]
    return [_holder(each) for each in listeners]


def taken(host: str, port: int) -> str | None:
    """Why a server could not listen there, None if it could. It binds for a moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "is taken"
            return f"cannot be used: {error.strerror or error}"
    return None


def free(host: str, avoid: Iterable[int] = ()) -> int:
    """A port that is free on ``host`` now."""
    avoided = set(avoid)
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port not in avoided:
            return port


def _holder(listener: Listener) -> PortHolder:
    try:
        user = pwd.getpwuid(listener.uid).pw_name
    except KeyError:
        user = str(listener.uid)
    wanted = f"socket:[{listener.inode}]"
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            for fd in os.scandir(f"/proc/{name}/fd"):
                if os.readlink(fd.path) == wanted:
                    raw = Path(f"/proc/{name}/cmdline").read_bytes()
                    command = raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()
                    return PortHolder(listener.port, user, int(name), command[:120])
        except OSError:
            continue  # gone meanwhile, or another user's
    return PortHolder(listener.port, user)
