"""The processes of one launch and their sockets, as the kernel tells them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Pair:
    """Both ranks of a launch. A rank's processes share a session numbered as its first pid."""

    launch_id: str
    pids: Mapping[str, int]  # role -> first process of the rank

    @classmethod
    def of(cls, standing: Mapping[str, Any]) -> Pair:
        """From the JSON of ``status --json``."""
        pids = {rank["role"]: rank["pid"] for rank in standing["ranks"] if rank["pid"]}
        return cls(standing["deployment"]["launch_id"], pids)

    def processes(self, role: str | None = None) -> list[psutil.Process]:
        """The living processes of one rank or of both, and all that descend from them."""
        sessions = set(self.pids.values()) if role is None else {self.pids[role]}
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) in sessions and process.status() != "zombie":
                    found[process.pid] = process
        for process in list(found.values()):
            with contextlib.suppress(psutil.Error):
                found |= {child.pid: child for child in process.children(recursive=True)}
        return list(found.values())

    def kill(self, role: str) -> None:
        """SIGKILL to the first process of the rank, as the kernel's OOM killer would."""
        os.kill(self.pids[role], signal.SIGKILL)


def still_alive(processes: Iterable[psutil.Process], within: float = 5.0) -> list[str]:
    """Those that do not end in ``within`` seconds; psutil tells a reused pid apart."""
    end = time.monotonic() + within
    while True:
        left = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != "zombie":
                    left.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


@dataclass(frozen=True)
class Socket:
    status: str  # LISTEN, ESTABLISHED, …; NONE for UDP
    local: str  # address
    port: int
    remote: str  # address, or empty

    @property
    def loopback(self) -> bool:
        """Neither open to another machine nor talking to one."""
        ends = [self.local, self.remote] if self.remote else [self.local]
        return all(_is_loopback(end) for end in ends)


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def sockets(processes: Iterable[psutil.Process]) -> set[Socket]:
    """The internet sockets of the processes, TCP and UDP; those bound to nothing left out, and
    questions to the resolver: torch's store asks it for a peer's name, ::ffff:127.0.0.1's too."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections(kind="inet"):
                asks = each.type == socket.SOCK_DGRAM and each.raddr and each.raddr.port == 53
                if each.laddr and each.laddr.port and not asks:
                    remote = each.raddr.ip if each.raddr else ""
                    found.add(Socket(each.status, each.laddr.ip, each.laddr.port, remote))
    return found


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """The files under /dev/shm that the processes have mapped or open."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for row in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if (at := row.find("/dev/shm/")) >= 0 and not row.endswith(" (deleted)"):
                    found.add(Path(row[at:]))
    return found


def children(pid: int) -> list[psutil.Process]:
    """The living descendants of a process now."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []
