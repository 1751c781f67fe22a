"""The parent of one rank: ``python -m launcher.runtimes.keeper FOLDER LOCK_FD``.

It plays the part that Docker's daemon plays for a container: it outlives the launcher, knows the
rank's pid for as long as it is valid, learns how the rank ended, and ends whatever the rank left
behind. It reads what to run from standard input (so that secrets meet no disk and no argv), answers
with one JSON line, and from then on speaks through files in FOLDER:

    rank.json   written when the rank runs: who it is
    exit.json   written when it has ended: code or signal
    stop.json   read on SIGTERM: the grace in seconds before SIGKILL

LOCK_FD is a lock that the launcher took and this process inherits: while it is held, the role is
taken. No module outside the standard library and launcher's small ones is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import clock, detached, files, processes

GRACE = 15.0  # seconds, where stop.json does not say
LEFTOVER_GRACE = 1.0  # seconds for what the rank left behind, then as many for its trackers
TRACKER = b"multiprocessing.resource_tracker"
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True)
class Order:
    """What to run, as it came through standard input."""

    role: str
    rank: int
    launch_id: str
    argv: list[str]
    env: dict[str, str]  # the whole environment, secrets included
    log: str
    cwd: str


def main(argv: list[str]) -> int:
    folder = Path(argv[0])
    raw = sys.stdin.buffer.read()
    try:
        order = Order(**json.loads(raw))
    except (ValueError, TypeError):
        return 0  # the launcher died while it wrote: nothing was asked
    detached.leave()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
    try:
        child = _start(order)
    except OSError as error:
        _answer({"error": f"{order.argv[0]}: {error.strerror or error}"})
        return 1
    leader = processes.find(child.pid)
    me = processes.myself()
    files.replace_json(
        folder / "rank.json",
        {
            "role": order.role,
            "rank": order.rank,
            "launch_id": order.launch_id,
            "pid": child.pid,
            "ticks": leader.ticks if leader else 0,
            "keeper": me.pid,
            "keeper_ticks": me.ticks,
            "boot_id": processes.boot_id(),
            "argv": order.argv,
            "log": order.log,
            "started": time.time(),
        },
    )
    _answer({"pid": child.pid})
    status, asked = _wait(child.pid, leader.ticks if leader else 0, folder)
    child.returncode = status  # reaped here, not by subprocess
    _leave(order, folder, status, asked)
    return 0


def _start(order: Order) -> subprocess.Popen[bytes]:
    keeper = os.getpid()

    def prepare() -> None:
        processes.die_with(keeper)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        # A core file of a rank may be as large as its weights.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Where memory is short the kernel shall end the rank first, not what works beside it.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")

    with open(order.log, "ab", buffering=0) as log:
        return subprocess.Popen(
            order.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=order.env,
            cwd=order.cwd,
            start_new_session=True,
            preexec_fn=prepare,
        )


def _answer(value: dict[str, Any]) -> None:
    """One line to the launcher, if it still listens; then no tie to it is left."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, (json.dumps(value) + "\n").encode())
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)


def _wait(pid: int, ticks: int, folder: Path) -> tuple[int, bool]:
    """Wait for the rank's end, passing a stop on to it; (status as in Popen, asked to stop)."""
    deadline: float | None = None
    while True:
        while True:
            try:
                ended, raw = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 0, deadline is not None
            if ended == 0:
                break
            if ended == pid:
                return os.waitstatus_to_exitcode(raw), deadline is not None
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            processes.send(pid, ticks, signal.SIGKILL)  # its children: see _leave
            deadline = now + 1.0
        pause = 60.0 if deadline is None else max(0.01, deadline - now)
        got = signal.sigtimedwait(WATCHED, pause)
        if got is not None and got.si_signo == signal.SIGTERM and deadline is None:
            deadline = time.monotonic() + _grace(folder)
            processes.send(pid, ticks, signal.SIGTERM)


def _grace(folder: Path) -> float:
    try:
        asked = files.read_json(folder / "stop.json")
        return GRACE if asked is None else float(asked["grace"])
    except (ValueError, KeyError, TypeError):
        return GRACE


def _leave(order: Order, folder: Path, status: int, asked: bool) -> None:
    """Write how the rank ended, then end what it left behind."""
    now = time.time()
    name = signal.Signals(-status).name if status < 0 else None
    words = f"signal {name}" if name else f"exit code {status}"
    why = ", as asked" if asked else ""
    _note(order, f"[spark] {order.role} ended: {words}{why}, {clock.stamp(now)}\n")
    files.replace_json(
        folder / "exit.json",
        {
            "launch_id": order.launch_id,
            "exit_code": None if name else status,
            "signal": name,
            "asked": asked,
            "at": now,
        },
    )

    def rest() -> list[processes.Process]:
        _reap()
        # This process adopted every orphan of the rank, those that left its session included.
        return processes.below(os.getpid())

    # Python's resource tracker unlinks the shared memory that the others could not, but only once
    # the last of them is gone: it is ended after them.
    count = processes.end(lambda: [p for p in rest() if not _tracks(p)], grace=LEFTOVER_GRACE)
    count += processes.end(rest, grace=LEFTOVER_GRACE)
    if count:
        _note(order, f"[spark] {order.role}: ended {count} processes it left behind\n")


def _tracks(process: processes.Process) -> bool:
    try:
        return TRACKER in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return False


def _note(order: Order, line: str) -> None:
    """Append a line of our own to the rank's log, on a line of its own."""
    with open(order.log, "ab+", buffering=0) as log:
        if log.seek(0, os.SEEK_END):
            log.seek(-1, os.SEEK_END)
            line = line if log.read(1) == b"\n" else f"\n{line}"
        log.write(line.encode())


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
