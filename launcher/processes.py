"""What Linux says of processes: identity across pid reuse, sessions, signals, death with a parent.

A process is known by (boot id, pid, start ticks): a pid alone is reused, and wall-clock start times
move when the clock is set. Field numbers are those of proc(5), /proc/<pid>/stat.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    ticks: int  # clock ticks from boot to its start
    zombie: bool


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def find(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command in field 2 may itself hold spaces and brackets.
    rest = text[text.rindex(")") + 2 :].split()
    return Process(pid, int(rest[1]), int(rest[3]), int(rest[19]), rest[0] in "ZX")


def usage(pid: int) -> tuple[str, float] | None:
    """Name and CPU seconds of a process, None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, rest = text[text.index("(") + 1 :].rsplit(")", 1)
    user, system = rest.split()[11:13]
    return name, (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def myself() -> Process:
    process = find(os.getpid())
    assert process is not None
    return process


def everyone() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := find(int(name))) is not None:
            yield process


def alive(pid: int, ticks: int) -> bool:
    """Whether that very process still runs; a zombie does not."""
    process = find(pid)
    return process is not None and process.ticks == ticks and not process.zombie


def send(pid: int, ticks: int, number: signal.Signals) -> bool:
    """Signal exactly that process; False if it is gone or the pid is another's now."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not alive(pid, ticks):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def in_session(session: int, leader_ticks: int) -> list[Process]:
    """Living processes of the session that a leader with ``leader_ticks`` opened.

    Empty when the session's number now belongs to another leader: the kernel gives a session number
    out again only after the last member left, so then none of ours is left. Members that are older
    than the leader cannot be its descendants and are left out.
    """
    leader = find(session)
    if leader is not None and leader.ticks != leader_ticks:
        return []
    return [
        process
        for process in everyone()
        if process.session == session and process.ticks >= leader_ticks and not process.zombie
    ]


def below(pid: int) -> list[Process]:
    """Living descendants of ``pid``, not itself."""
    children: dict[int, list[Process]] = {}
    for process in everyone():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            todo.append(child.pid)
            if not child.zombie:
                found.append(child)
    return found


def end(
    who: Callable[[], list[Process]],
    *,
    grace: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """SIGTERM what ``who`` names, SIGKILL the rest after ``grace`` seconds; how many there were.

    ``who`` is asked again each time, so that children born meanwhile are met too.
    """
    seen: set[tuple[int, int]] = set()
    deadline = clock() + grace
    while members := who():
        late = clock() >= deadline
        for process in members:
            key = (process.pid, process.ticks)
            if late:
                send(*key, signal.SIGKILL)
            elif key not in seen:
                send(*key, signal.SIGTERM)
            seen.add(key)
        if clock() > deadline + 10:
            break  # in uninterruptible sleep: nothing more can be done from here
        sleep(0.02)
    return len(seen)


def prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """In a fresh child: have the kernel send ``number`` when ``parent`` dies, however it dies."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the line above
        os._exit(128 + number)


def guard(parent: int) -> None:
    """In a fresh child that leads a process group of its own: go on in a child of that one, which
    stays behind and kills the whole group, grandchildren included, when ``parent`` dies.

    It ends as the command ends, so that its exit status is the command's.
    """
    child = os.fork()
    if child == 0:
        return

    def end_all(number: int, frame: FrameType | None) -> None:
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_all)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        os.killpg(0, signal.SIGKILL)
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))  # the command's pipes end with the command
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End the command with its process group if it still runs, whatever ended the waiting."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
