"""Ranks as plain processes of this machine, each under a keeper (see keeper.py)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import files, processes
from launcher.errors import LauncherError
from launcher.runtimes import loglines
from launcher.runtimes.base import Activity, RankStatus
from launcher.runtimes.filelog import FileLog, replaced

if TYPE_CHECKING:  # the rule of launcher.verbs
    from launcher.deployment import Rank

TAIL_BYTES = 1 << 18  # how far back a followed log is read
STACKS = 60.0  # seconds for all processes of a rank to write their stacks


class ProcessRuntime:
    """``logs`` holds ``<role>.log`` and, under ``ranks/<role>/``, the keeper's files."""

    def __init__(
        self,
        root: Path,
        logs: Path,
        environ: Mapping[str, str],
        *,
        start_timeout: float = 20.0,
        patience: float = 2.0,
    ) -> None:
        self.root = root  # the checkout: where ``-m launcher…`` is found
        self._environ = environ
        self.logs = logs
        self._start_timeout = start_timeout
        self._patience = patience  # seconds for a keeper that is about to leave
        self._logs: dict[str, FileLog] = {}

    def log_path(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def start(self, rank: Rank, launch_id: str) -> int:
        folder = self._folder(rank.role)
        folder.mkdir(parents=True, exist_ok=True)
        lock = self._take(rank.role, folder)
        try:
            for name in ("rank.json", "exit.json", "stop.json"):
                (folder / name).unlink(missing_ok=True)
            log = self.log_path(rank.role)
            if log.exists():
                os.replace(log, log.with_suffix(".log.1"))
            order = {
                "role": rank.role,
                "rank": rank.rank,
                "launch_id": launch_id,
                "argv": list(rank.argv),
                "env": rank.process_env(self._environ),
                "log": str(log),
                "cwd": str(folder),
            }
            return self._hand_over(rank.role, folder, lock, order)
        finally:
            os.close(lock)  # the keeper holds it on

    def inspect(self, role: str) -> RankStatus:
        folder = self._folder(role)
        known = self._known(folder)
        if known is None:
            return RankStatus(role, "absent", log=self.log_path(role))
        base = {
            "role": role,
            "launch_id": known["launch_id"],
            "pid": known["pid"],
            "since": known["started"],
            "log": self.log_path(role),
        }
        ended = self._exit(folder, known)
        if ended is None:
            if known["boot_id"] != processes.boot_id():
                return RankStatus(**base, state="exited", note="the machine was started anew since")
            if processes.alive(known["keeper"], known["keeper_ticks"]):
                return RankStatus(**base, state="running")
            ended = self._exit(folder, known)  # it may have written just before it went
        lines = loglines.telling(files.tail(self.log_path(role), 10 * loglines.LAST_LINES))
        if ended is None:
            note = "its keeper process was killed"
            return RankStatus(**base, state="exited", note=note, last_lines=lines)
        return RankStatus(
            **base,
            state="exited",
            exit_code=ended["exit_code"],
            signal=ended["signal"],
            ended=ended["at"],
            note="as asked" if ended["asked"] else "",
            last_lines=lines,
        )

    def stop(self, role: str, grace: float) -> RankStatus:
        folder = self._folder(role)
        known = self._settled(role, folder)
        if known is None:
            return self.inspect(role)
        if known["boot_id"] == processes.boot_id():
            keeper, ticks = known["keeper"], known["keeper_ticks"]
            if processes.alive(keeper, ticks):
                files.replace_json(folder / "stop.json", {"grace": grace})
                processes.send(keeper, ticks, signal.SIGTERM)
                deadline = time.monotonic() + grace + 15
                while processes.alive(keeper, ticks) and time.monotonic() < deadline:
                    time.sleep(0.02)
                processes.send(keeper, ticks, signal.SIGKILL)
            # What a killed keeper could not end any more.
            processes.end(lambda: processes.in_session(known["pid"], known["ticks"]), grace=0.0)
        last = self.inspect(role)
        for name in ("rank.json", "exit.json", "stop.json"):
            (folder / name).unlink(missing_ok=True)
        return last

    def tail(self, role: str, lines: int, emit: Callable[[str], None]) -> None:
        for line in files.tail(self.log_path(role), lines, TAIL_BYTES):
            emit(line)

    def follow(self, role: str, lines: int, emit: Callable[[str], None]) -> None:
        path = self.log_path(role)
        source = None
        rest = b""
        try:
            if path.exists():
                source = path.open("rb")
                start = max(0, source.seek(0, os.SEEK_END) - TAIL_BYTES)
                source.seek(start)
                *whole, rest = source.read().split(b"\n")
                for each in whole[max(1 if start else 0, len(whole) - lines) :]:
                    emit(each.decode("utf-8", "replace"))
            while True:
                running = self.inspect(role).running
                if source is None and path.exists():
                    source = path.open("rb")
                if source is not None:
                    *whole, rest = (rest + source.read()).split(b"\n")
                    for each in whole:
                        emit(each.decode("utf-8", "replace"))
                    if replaced(path, source.fileno()):
                        source.close()
                        source, rest = None, b""
                        continue
                if not running:
                    break
                time.sleep(0.2)
            if rest:
                emit(rest.decode("utf-8", "replace"))
        finally:
            if source is not None:
                source.close()

    def lines(self, role: str) -> list[str]:
        log = self._log(role)
        log.read()
        return log.new()

    def activity(self, role: str) -> Activity | None:
        log = self._log(role)
        log.read()
        rows = (processes.usage(pid) for pid in self._pids(role))
        return Activity(log.count, loglines.compiling(row for row in rows if row))

    def stacks(self, role: str, path: Path) -> str:
        pids = self._pids(role)
        if not pids:
            said = f"the {role} has no process to ask"
        else:
            # By its path and alone: the launcher's Python has no overlay.
            script = self.root / "overlay" / "spark_overlay" / "stacks.py"
            argv = [sys.executable, "-I", "-S", str(script), *map(str, pids)]
            try:
                done = subprocess.run(argv, capture_output=True, text=True, timeout=STACKS)
                said = (done.stdout + done.stderr).strip()
            except subprocess.TimeoutExpired:
                said = f"the {role}'s processes did not write their stacks within {STACKS:g} s"
        saved = self.save_log(role, path)
        return said if saved else f"{said}\nthe {role} has no log"

    def save_log(self, role: str, path: Path) -> bool:
        log = self.log_path(role)
        if not log.exists():
            return False
        if path != log:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, path)
        return True

    def session(self, role: str) -> int | None:
        """The session id that all processes of the role's rank share, while it runs."""
        known = self._known(self._folder(role))
        if known is None or known["boot_id"] != processes.boot_id():
            return None
        return int(known["pid"])

    def _pids(self, role: str) -> list[int]:
        """The role's running rank and all below it."""
        if not self.inspect(role).running or (leader := self.session(role)) is None:
            return []
        return [leader, *(process.pid for process in processes.below(leader))]

    def _log(self, role: str) -> FileLog:
        return self._logs.setdefault(role, FileLog(self.log_path(role)))

    def _folder(self, role: str) -> Path:
        return self.logs / "ranks" / role

    def _known(self, folder: Path) -> dict[str, Any] | None:
        return files.read_json(folder / "rank.json")

    def _settled(self, role: str, folder: Path) -> dict[str, Any] | None:
        """The rank known, after a keeper that a killed launcher just sent off has spoken."""
        known = self._known(folder)
        if known is None and (folder / "lock").exists():
            os.close(self._take(role, folder, give_up=lambda: self._known(folder) is not None))
            known = self._known(folder)
        return known

    def _exit(self, folder: Path, known: dict[str, Any]) -> dict[str, Any] | None:
        ended = files.read_json(folder / "exit.json")
        return ended if ended is not None and ended["launch_id"] == known["launch_id"] else None

    def _take(self, role: str, folder: Path, give_up: Callable[[], bool] = lambda: False) -> int:
        """The role's lock, to be inherited by the keeper; a leaving keeper gets a moment.

        Returns without the lock as soon as ``give_up`` says so.
        """
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + self._patience
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if give_up():
                    return fd
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                os.close(fd)
                raise LauncherError(
                    f"a {role} rank is kept already (pid {self.inspect(role).pid})",
                    f"no {role} rank before a new one starts",
                    "./start.sh stop",
                    self.log_path(role),
                ) from None

    def _hand_over(self, role: str, folder: Path, lock: int, order: dict[str, Any]) -> int:
        notes = folder / "keeper.log"
        with notes.open("wb") as errors:
            child = subprocess.Popen(
                [sys.executable, "-S", "-m", "launcher.runtimes.keeper", str(folder), str(lock)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=(lock,),
                cwd=self.root,
                env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        assert child.stdin and child.stdout
        with child.stdin as into, contextlib.suppress(BrokenPipeError):
            into.write(json.dumps(order).encode())
        with child.stdout as out:
            ready, _, _ = select.select([out], [], [], self._start_timeout)
            line = out.readline() if ready else b""
        child.wait()
        answer = json.loads(line) if line else {"error": "no answer from its keeper"}
        if "error" in answer:
            raise LauncherError(
                f"the {role} rank was not started: {answer['error']}",
                "a program that starts",
                "./start.sh rehearse again; if it stays, look into the log",
                notes,
            )
        return int(answer["pid"])
