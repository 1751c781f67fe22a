"""One launcher at a time: an advisory lock on ``logs/lock`` that tells who holds it.

The kernel drops the lock with its holder, so a killed launcher leaves nothing to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher import processes
from launcher.clock import span
from launcher.errors import LauncherError


@dataclass(frozen=True)
class Holder:
    pid: int
    verb: str
    since: float  # seconds since the epoch


@contextlib.contextmanager
def hold(path: Path, verb: str, now: Callable[[], float] = time.time) -> Iterator[None]:
    """Hold the lock for the length of the block.

    Raises LauncherError naming the holder when another launcher has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refusal(path, now()) from None
        os.ftruncate(fd, 0)
        me = processes.myself()
        entry = {"pid": me.pid, "ticks": me.ticks, "verb": verb, "since": now()}
        with contextlib.suppress(OSError):  # on a full disk the lock itself holds all the same
            os.pwrite(fd, json.dumps(entry).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def holder(path: Path) -> Holder | None:
    """Who holds the lock now, None if nobody does. It does not touch the lock itself."""
    try:
        entry = json.loads(path.read_text())
        found = Holder(int(entry["pid"]), str(entry["verb"]), float(entry["since"]))
        ticks = int(entry["ticks"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    # A killed holder leaves its words in the file but not its lock.
    return found if processes.alive(found.pid, ticks) else None


def _refusal(path: Path, now: float) -> LauncherError:
    who = holder(path)
    if who is None:
        return LauncherError(
            f"another launcher holds {path} and has not said yet who it is",
            "one launcher at a time",
            "run the command again in a moment",
        )
    began = time.strftime("%H:%M:%S", time.localtime(who.since))
    return LauncherError(
        f"another launcher is at work: pid {who.pid}, verb {who.verb}, since {began}"
        f" ({span(max(0.0, now - who.since))} ago)",
        "one launcher at a time",
        f"wait for it, or end it with Ctrl-C in its terminal (kill {who.pid});"
        " ./start.sh status and ./start.sh logs work meanwhile",
    )
