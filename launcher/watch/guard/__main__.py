"""``scripts/memguard.sh``: watches MemAvailable and PSI of this node beside one server.

    scripts/memguard.sh CONTAINER [GIB [LOG [PIDFILE]]]
    scripts/memguard.sh --pid PID …

Exit status: 0 the server is gone by itself, 3 it was stopped by the guard, 1 it was never there.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.watch.guard import proc, run, shm
from launcher.watch.guard.core import GIB, Guard, Policy, gib
from launcher.watch.guard.engine import DockerFault, Engine, socket_of
from launcher.watch.guard.target import Container, Target, Tree

ARMED = "DSV41_MEM_GUARD"
MCL_BOTH = 3  # MCL_CURRENT | MCL_FUTURE
FIND = 0.5  # seconds between two looks for a server that is not there yet


class Files:
    """Notes beside the log: ``<log>.low.json``, ``<log>.why.json``."""

    def __init__(self, log: Path | None) -> None:
        """Raises OSError where the log cannot be written."""
        self._log = log
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.open("a").close()

    def line(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        row = f"{stamp} [memguard] {text}\n"
        with contextlib.suppress(OSError):  # a full disk or a pipe's end stops no guard
            if self._log is None:
                # Not sys.stdout: it would keep what failed, and fail once more at the end.
                os.write(1, row.encode())
                return
            with self._log.open("a") as out:
                out.write(row)

    def low(self, told: dict[str, Any]) -> None:
        self._replace("low", told)

    def why(self, told: dict[str, Any]) -> None:
        self._replace("why", told)

    def _replace(self, kind: str, told: dict[str, Any]) -> None:
        if self._log is None:
            return
        path = self._log.with_name(f"{self._log.name}.{kind}.json")
        part = path.with_name(f".{path.name}.part")
        with contextlib.suppress(OSError):
            part.write_text(run.told(told))
            os.replace(part, path)


class Shm:
    def used(self, pids: Iterable[int]) -> set[Path]:
        return shm.used(pids)

    def clean(self, left: Iterable[Path]) -> list[Path]:
        return shm.clean(left)


def arguments(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/memguard.sh",
        description="Stops a server of this node before memory runs out, if the server took it.",
        allow_abbrev=False,
    )
    made.add_argument("container", nargs="?", help="name or id of the server's container")
    made.add_argument("gib", nargs="?", type=_gib, default=None, help="floor, as --gib")
    made.add_argument("log", nargs="?", type=Path, default=None, help="as --log")
    made.add_argument("pidfile", nargs="?", type=Path, default=None, help="as --pidfile")
    made.add_argument("--pid", type=_count, help="guard this process and all below it instead")
    made.add_argument(
        "--gib",
        dest="floor",
        type=_gib,
        default=None,
        help="GiB of MemAvailable below which it is low (DSV41_MEM_GUARD_GIB, 1.5)",
    )
    made.add_argument(
        "--samples",
        type=_count,
        default=None,
        help="low looks in a row before it acts (DSV41_MEM_GUARD_SAMPLES, 2)",
    )
    made.add_argument(
        "--any",
        action="store_true",
        default=_flag(environ, "DSV41_MEM_GUARD_ANY"),
        help="act whoever took the memory",
    )
    made.add_argument(
        "--armed",
        action="store_true",
        default=_flag(environ, ARMED),
        help=f"act at all; as {ARMED}=1. Otherwise it only watches and writes",
    )
    made.add_argument("--grace", type=_gib, default=5.0, help="seconds from stop to kill")
    made.add_argument("--wait", type=_gib, default=60.0, help="seconds for the container to come")
    made.add_argument("--log", dest="into", type=Path, default=None, help="file; else stdout")
    made.add_argument(
        "--pidfile",
        dest="lock",
        type=Path,
        default=None,
        help="holds the guard's pid; locked, so that there is one guard",
    )
    made.add_argument("--detach", action="store_true", help="go on in the background")
    return made  # fmt: skip


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = arguments(environ)
    try:
        args = parser.parse_args(list(argv))
        floor = _first(args.floor, args.gib, _read(environ, "DSV41_MEM_GUARD_GIB", _gib), 1.5)
        samples = _first(args.samples, _read(environ, "DSV41_MEM_GUARD_SAMPLES", _count), 2)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if (not args.container) == (args.pid is None):
        parser.error("name one container, or one process with --pid")
    try:
        target: Target = Tree(args.pid) if args.pid else Container(
            args.container, Engine(socket_of(environ)))  # fmt: skip
        there = target.find()  # what cannot be asked is told before anything is left behind
    except DockerFault as fault:
        needed = f"; needed: {fault.needed}" if fault.needed else ""
        print(f"memguard: {fault}{needed}", file=sys.stderr)
        return 1
    if args.pid is not None and not there:  # whoever gets the number later is not the server
        print(f"memguard: no process {args.pid} runs; needed: the pid of a running server (ps -ef)",
              file=sys.stderr)  # fmt: skip
        return 1
    lock = _first(args.lock, args.pidfile, None)
    try:
        notes = Files(_first(args.into, args.log, None))
        if lock is not None:
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock.open("a").close()
    except OSError as error:
        print(f"memguard: {error.filename}: {error.strerror}; needed: a file that this user may"
              " write", file=sys.stderr)  # fmt: skip
        return 1
    if args.detach:
        _detach()
    held = _hold(lock)
    if held is False:
        notes.line("another guard has the pidfile: this one ends")
        return 0
    policy = Policy(int(floor * GIB), samples, args.any, args.armed, args.grace)
    try:
        return _watch(target, policy, notes, args.wait if args.pid is None else 0.0)
    except _Ended as end:
        notes.line(f"ended by {end}: nobody guards {target.name} now")
        return 128 + end.number
    except Exception as error:  # detached, it has no other place to say so
        notes.line(f"a fault in the guard itself, which ends: {error!r}")
        raise


class _Ended(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended(number)


def _watch(target: Target, policy: Policy, notes: Files, wait: float) -> int:
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    locked = ctypes.CDLL(None).mlockall(MCL_BOTH) == 0
    if not _found(target, notes, wait):
        return 1
    if os.getpid() in target.pids():
        notes.line(f"{target.name} holds the guard itself: it cannot be guarded from within")
        return 1
    what = "armed" if policy.armed else f"watching only ({ARMED}=1 arms it)"
    notes.line(
        f"{what}: {target.name}, floor {gib(policy.floor)} GiB, {policy.samples} looks, "
        f"{'whoever took it' if policy.anyone else 'if it took it'}; "
        f"PSI {'is there' if proc.pressure() is not None else 'is not: MemAvailable alone decides'}"
        f"{'' if locked else '; its own memory is not locked (ulimit -l)'}"
    )
    return run.watch(
        target,
        Guard(policy),
        look=lambda: proc.look(target.pids, time.monotonic()),
        notes=notes,
        shm=Shm(),
        clock=time.monotonic,
        wall=time.time,
        sleep=time.sleep,
    )


def _found(target: Target, notes: Files, wait: float) -> bool:
    deadline, said = time.monotonic() + wait, ""
    while True:
        try:
            if target.find():
                return True
            fault = "it does not run"
        except DockerFault as error:
            fault = str(error)
        if fault != said:
            notes.line(f"waiting for {target.name}: {fault}")
            said = fault
        if time.monotonic() >= deadline:
            notes.line(f"{target.name} did not come within {wait:g} s: {fault}")
            return False
        time.sleep(FIND)


def _hold(path: Path | None) -> int | bool:
    """The locked pidfile's descriptor, kept open as long as the guard lives; True without a file,
    False while another guard has it for ten seconds on."""
    if path is None:
        return True
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + 10
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def _detach() -> None:
    """Go on as nobody's child, with no ties to the terminal or to an ssh session."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, 1024)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _read(environ: Mapping[str, str], key: str, kind: Any) -> Any:
    """A variable's value, None where it is unset or empty."""
    text = environ.get(key, "")
    if not text:
        return None
    try:
        return kind(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{key}: {error}") from None


def _flag(environ: Mapping[str, str], key: str) -> bool:
    return environ.get(key, "") == "1"


def _gib(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 86400:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 86400")


def _count(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 1 << 31:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
