"""The server that is guarded: a container of this node, or a process tree."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from launcher.watch.guard import proc
from launcher.watch.guard.engine import DockerFault, Engine

#: A signal to the process of that pid and start, and to no other. Raises PermissionError.
Send = Callable[[int, int, signal.Signals], None]


class Target(Protocol):
    name: str

    def find(self) -> bool:
        """Whether it is there now; from then on it is that very one, whatever its name becomes."""
        ...

    def runs(self) -> bool: ...

    def headless(self) -> bool:
        """Whether processes of it are left that nobody ends: its first one, who would, has gone."""
        ...

    def pids(self) -> set[int]:
        """Of all its processes, as this node counts them."""
        ...

    def stop(self) -> None:
        """Ask it to end. Raises DockerFault or OSError when it cannot be asked."""
        ...

    def kill(self) -> None: ...


class Tree:
    """A process and all below it, known by pid and start so that a reused pid is not taken for it.

    Members that leave the tree (their parent ended) are kept as long as they live.
    """

    def __init__(self, pid: int, root: Path = proc.PROC, send: Send | None = None) -> None:
        self.name = f"pid {pid}"
        self.pid, self.root = pid, root
        self._send = send or _send
        self._ticks: int | None = None
        self._members: dict[int, int] = {}  # pid -> start

    def find(self) -> bool:
        if self._ticks is not None:
            return self._lives(self.pid, self._ticks)
        try:
            entry = self.root / str(self.pid)
            self._ticks = None if proc.zombie(entry) else proc.ticks(entry)
        except (OSError, ValueError, IndexError):
            self._ticks = None
        return self._ticks is not None

    def runs(self) -> bool:
        """Whether anything of it is left."""
        return bool(self.pids())

    def headless(self) -> bool:
        gone = self._ticks is None or not self._lives(self.pid, self._ticks)
        return gone and self.runs()

    def pids(self) -> set[int]:
        alive = {pid for pid, ticks in self._members.items() if self._lives(pid, ticks)}
        if self._ticks is not None and self._lives(self.pid, self._ticks):
            alive.add(self.pid)
        found: set[int] = set()
        for pid in alive:
            if pid not in found:
                found |= proc.tree(pid, self.root)
        self._members = {}
        for pid in found:
            with contextlib.suppress(OSError, ValueError, IndexError):
                entry = self.root / str(pid)
                if not proc.zombie(entry):
                    self._members[pid] = proc.ticks(entry)
        return set(self._members)

    def stop(self) -> None:
        if self._ticks is not None:
            self._send(self.pid, self._ticks, signal.SIGTERM)

    def kill(self) -> None:
        """Children may be born meanwhile: again until none is left."""
        for _ in range(20):
            members = self.pids()
            if not members:
                return
            for pid in members:
                if (ticks := self._members.get(pid)) is not None:
                    self._send(pid, ticks, signal.SIGKILL)

    def _lives(self, pid: int, ticks: int) -> bool:
        entry = self.root / str(pid)
        try:
            return proc.ticks(entry) == ticks and not proc.zombie(entry)
        except (OSError, ValueError, IndexError):
            return False


class Container:
    """A container of this node, by its name when it is found and by its id from then on.

    Its processes are those below its first one, and those whose control group names its id: that
    holds for cgroup v1 and v2, and for each driver's way of naming.
    """

    def __init__(
        self, name: str, engine: Engine, root: Path = proc.PROC, send: Send | None = None
    ) -> None:
        self.name = name
        self._engine, self._root, self._send = engine, root, send
        self.id = ""
        self._first: Tree | None = None

    def find(self) -> bool:
        found = self._engine.inspect(self.name)
        if found is None or not _running(found):
            return False
        self.id = str(found["Id"])
        self._first = Tree(int(found["State"]["Pid"]), self._root, self._send)
        return self._first.find()

    def runs(self) -> bool:
        """The daemon is asked only when its first process is gone: it may have been restarted."""
        if self._first is not None and self._first.runs():
            return True
        try:
            found = self._engine.inspect(self.id)
        except DockerFault:
            return False  # nothing of it is left, whatever the daemon would say
        if found is None or not _running(found):
            return False
        self._first = Tree(int(found["State"]["Pid"]), self._root, self._send)
        return self._first.find()

    def headless(self) -> bool:
        return False  # the kernel ends all of a container with its first process

    def pids(self) -> set[int]:
        found = set() if self._first is None else self._first.pids()
        if self.id:
            found |= self._in_its_group()
        return found

    def _in_its_group(self) -> set[int]:
        found = set()
        for entry in self._root.iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if self.id in (entry / "cgroup").read_text():
                        found.add(int(entry.name))
        return found

    def stop(self) -> None:
        self._engine.kill(self.id, "SIGTERM")

    def kill(self) -> None:
        """By the daemon; by ourselves where it does not answer and we may."""
        try:
            self._engine.kill(self.id, "SIGKILL")
        except DockerFault:
            if self._first is None:
                raise
            self._first.kill()


def _running(found: dict[str, Any]) -> bool:
    state = found.get("State") or {}
    return bool(state.get("Running")) and int(state.get("Pid") or 0) > 0


def _send(pid: int, ticks: int, number: signal.Signals) -> None:
    """To exactly that process; nothing when it is gone. Raises PermissionError."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if proc.ticks(proc.PROC / str(pid)) == ticks:
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)
