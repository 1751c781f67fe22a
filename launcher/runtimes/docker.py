"""Ranks as containers of two Docker daemons, this node's and the worker's.

The daemons keep the ranks and know how they ended, so nothing of a rank is recorded here. A
container is ours by its label: one of another checkout is never touched. Nothing hangs on a node
that is gone: every call ends in time (see reach.py) and such a rank is "unreachable".
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.commands.container import LAUNCH, OWNER, ROLE, SECRET_ENV, SECRETS, Container
from launcher.deployment import Rank
from launcher.errors import LauncherError
from launcher.libraries.sdk import APIError, ImageNotFound, NotFound, docker
from launcher.nodes.base import Node
from launcher.runtimes import loglines
from launcher.runtimes.base import Activity, RankStatus
from launcher.runtimes.dockerlog import DockerLog
from launcher.runtimes.reach import Factory, Reach, Unreachable

START = 60.0  # seconds to make and to start a container: the GPU hook takes some
STACKS = 60.0  # seconds for all processes of a rank to write their stacks
SAVING = 60.0  # seconds to bring a whole log here
FOLLOW = 1.0  # seconds between two looks of `follow`


class DockerRuntime:
    """``clients``, ``nodes`` and ``names`` are by role; a factory in ``clients`` may be called anew
    at any time, one in ``nodes`` when something is to be made or removed there. ``describe`` gives
    the container of a rank; only ``start`` needs it.
    """

    def __init__(
        self,
        clients: Mapping[str, Factory],
        nodes: Mapping[str, Callable[[], Node]],
        names: Mapping[str, str],
        owner: str,
        logs: Path,
        *,
        describe: Callable[[Rank], Container] | None = None,
        timeout: float = 10.0,
        python: str = "python3",
        label: str = OWNER,
    ) -> None:
        self._nodes = nodes
        self._names = names
        self._owner = owner
        self.logs = logs
        self._describe = describe
        self._python = python  # of the image
        self._label = label  # under which ``owner`` stands
        self._reach = {role: Reach(factory, timeout) for role, factory in clients.items()}
        self._logs = {role: DockerLog(self._reach[role], names[role]) for role in clients}

    def log_path(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def start(self, rank: Rank, launch_id: str) -> int:
        if self._describe is None:
            raise ValueError("this runtime was made without `describe`")
        made = self._describe(rank)
        if made.labels.get(self._label) != self._owner or made.labels.get(LAUNCH) != launch_id:
            raise ValueError("the container's labels are not this runtime's and this launch's")
        role = rank.role
        try:
            self._make_room(role)
            self._prepare(role, made)
            return self._run(role, made)
        except Unreachable as fault:
            raise LauncherError(
                f"the {role} rank could not be started: {fault}",
                "a Docker daemon that answers",
                fault.mend or f"./start.sh doctor tells what is wrong with the {role}'s node",
            ) from fault

    def inspect(self, role: str) -> RankStatus:
        log = self.log_path(role)
        try:
            found = self._look(role)
        except (Unreachable, APIError) as fault:
            return RankStatus(role, "unreachable", log=log, note=_said(fault))
        if found is None:
            return RankStatus(role, "absent", log=log)
        if stranger := self._stranger(role, found):
            return RankStatus(role, "absent", log=log, note=stranger)
        status = _status(role, found, log)
        if status.state == "exited":
            # Without its last lines an end is still an end.
            with contextlib.suppress(Unreachable, APIError):
                lines = self._tail(role, 10 * loglines.LAST_LINES)
                status = replace(status, last_lines=loglines.telling(lines))
        return status

    def stop(self, role: str, grace: float) -> RankStatus:
        status = self.inspect(role)
        if status.state in ("absent", "unreachable"):
            return status
        try:
            found = self._look(role)
            if found is None or self._stranger(role, found):
                return status
            # By its id: another container may take the name meanwhile.
            one = str(found["Id"])
            if status.paused:
                self._ask(role, lambda c: c.api.unpause(one), timeout=30.0)
            if status.running:
                seconds = math.ceil(grace)
                self._ask(role, lambda c: c.api.stop(one, timeout=seconds), timeout=grace + 20)
                status = replace(self.inspect(role), note="as asked")
            self.save_log(role, self.log_path(role))
            self._ask(role, lambda c: c.api.remove_container(one, force=True), timeout=30.0)
        except (Unreachable, APIError) as fault:
            return replace(status, state="unreachable", note=_said(fault))
        self._forget_secret(role, found)
        return status

    def tail(self, role: str, lines: int, emit: Callable[[str], None]) -> None:
        try:
            for line in self._tail(role, lines):
                emit(line)
        except (Unreachable, APIError) as fault:
            emit(f"[spark] the {role}'s log cannot be read: {_said(fault)}")

    def follow(self, role: str, lines: int, emit: Callable[[str], None]) -> None:
        log = DockerLog(self._reach[role], self._names[role], first=max(0, lines))
        gone = False
        while True:
            running = True
            try:
                # Asked before the log is read: what it said last is read after its end.
                found = self._look(role)
                running = found is not None and bool(found["State"]["Running"])
                if found is not None:
                    log.read()
                gone = False
            except (Unreachable, APIError) as fault:
                if not gone:
                    emit(f"[spark] the {role}'s log cannot be read, trying on: {_said(fault)}")
                gone = True
            for line in log.new():
                emit(line)
            if not running:
                return
            time.sleep(FOLLOW)

    def lines(self, role: str) -> list[str]:
        log = self._logs[role]
        with contextlib.suppress(Unreachable, APIError):
            log.read()
        return log.new()

    def activity(self, role: str) -> Activity | None:
        log = self._logs[role]
        try:
            log.read()
            return Activity(log.count, self._compiling(role))
        except NotFound:
            return Activity(log.count, 0.0)
        except (Unreachable, APIError):
            return None

    def stacks(self, role: str, path: Path) -> str:
        argv = [self._python, "-m", "spark_overlay.stacks"]

        def ask(client: docker.DockerClient) -> str:
            made = client.api.exec_create(self._names[role], argv)
            said = client.api.exec_start(made["Id"])
            return bytes(said).decode("utf-8", "replace").strip()

        try:
            found = self._look(role)
            if found is None or self._stranger(role, found):
                return f"the {role} has no container to ask"
            said = self._reach[role].call(ask, STACKS)
        except (Unreachable, APIError) as fault:
            said = f"the {role} could not be asked for its stacks: {_said(fault)}"
        time.sleep(0.3)  # Docker copies the last lines into its log
        saved = self.save_log(role, path)
        return said if saved else f"{said}\nthe {role}'s log could not be saved"

    def save_log(self, role: str, path: Path) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.part")
        name = self._names[role]

        def save(client: docker.DockerClient) -> bool:
            with part.open("wb") as out:
                for block in client.api.logs(name, stream=True, follow=False):
                    out.write(block)
            return True

        try:
            found = self._look(role)
            if found is None or self._stranger(role, found):
                return False
            self._reach[role].call(save, SAVING)
            if path.exists() and path == self.log_path(role):
                os.replace(path, path.with_suffix(".log.1"))
            os.replace(part, path)
            return True
        except (Unreachable, APIError, OSError):
            return False
        finally:
            part.unlink(missing_ok=True)

    # -- parts of start

    def _make_room(self, role: str) -> None:
        """Remove an ended container of ours; refuse to start beside anything else of that name."""
        found = self._look(role)
        if found is None:
            return
        name = self._names[role]
        if stranger := self._stranger(role, found):
            raise LauncherError(
                f"the {role} rank was not started: {stranger}",
                f"the name {name}, which only the launcher of this checkout uses",
                f"end that container with what started it, or set CONTAINER_{role.upper()} to "
                "another name in .env",
            )
        if found["State"]["Running"]:
            raise LauncherError(
                f"a {role} rank runs already (container {name})",
                f"no {role} rank before a new one starts",
                "./start.sh stop",
            )
        one = str(found["Id"])
        self._ask(role, lambda c: c.api.remove_container(one, force=True), timeout=30.0)
        self._forget_secret(role, found)

    def _prepare(self, role: str, made: Container) -> None:
        node = self._nodes[role]()
        if made.writable():
            self._make_folders(role, made)
        if made.secret_file:
            # Containers that were removed behind our back have left theirs; the folder is ours.
            folder = Path(made.secret_file).parent.parent
            if folder.parent.name == SECRETS:
                node.remove(folder)
            node.write(Path(made.secret_file), made.secret_text(), 0o600)

    def _make_folders(self, role: str, made: Container) -> None:
        done = self._nodes[role]().run(("mkdir", "-p", "--", *made.writable()), timeout=30)
        if done.status != 0:
            raise LauncherError(
                f"the {role}'s directories {', '.join(made.writable())} cannot be made:"
                f" {done.last(3)}",
                "directories that this user may make",
                "mend their keys in .env, CACHE_ROOT or HEAD_PACKED_DIR, or the rights there",
            )

    def _run(self, role: str, made: Container) -> int:
        def ask(client: docker.DockerClient) -> int:
            api = client.api
            host = api.create_host_config(**made.host())
            made_id = api.create_container(**made.arguments(), host_config=host)["Id"]
            try:
                # Made first, then asked: of two launchers at least one sees the other's.
                if self._label == OWNER:  # beside a rank there is none of another checkout
                    self._refuse_others(role, api.containers(all=True, filters={"label": OWNER}))
                api.start(made_id)
            except (APIError, LauncherError):
                api.remove_container(made_id, force=True)
                raise
            return int(api.inspect_container(made_id)["State"]["Pid"])

        try:
            return self._reach[role].call(ask, START)
        except APIError as fault:
            self._remove_secret(role, made.secret_file)
            if isinstance(fault, ImageNotFound) or "no such image" in _said(fault).lower():
                raise LauncherError(
                    f"the {role} rank was not started: the image {made.image} is not there",
                    "the same image on both nodes",
                    f"bring {made.image} to the {role}, or mend IMAGE in .env",
                ) from fault
            raise LauncherError(
                f"Docker on the {role} did not start the container: {_said(fault)}",
                "a container that starts",
                "mend what Docker says, then ./start.sh again",
            ) from fault

    def _refuse_others(self, role: str, listed: list[dict[str, Any]]) -> None:
        """Raise where the node has a pair of another checkout, running or about to."""
        for each in listed:
            owner = each["Labels"][OWNER]
            if owner != self._owner and each["State"] in ("created", "running", "paused"):
                raise LauncherError(
                    f"the {role}'s node has {each['Names'][0].lstrip('/')} of another checkout"
                    f" ({owner})",
                    "no other pair on these nodes",
                    f"./start.sh stop there ({owner}), then ./start.sh again",
                )

    def _forget_secret(self, role: str, found: dict[str, Any]) -> None:
        for mount in found.get("Mounts") or ():
            if mount.get("Destination") == SECRET_ENV:
                self._remove_secret(role, str(mount.get("Source", "")))

    def _remove_secret(self, role: str, path: str) -> None:
        """Remove a launch's directory, …/<owner>/<launch id>, that holds the file."""
        folder = Path(path).parent
        if path and folder.parent.parent.name == SECRETS:
            # What is left is as private as .env; the next stop will try no more.
            with contextlib.suppress(LauncherError, OSError):
                self._nodes[role]().remove(folder)

    # -- asking

    def _ask(self, role: str, what: Callable[[docker.DockerClient], Any], timeout: float) -> None:
        """A call after which the container is stopped or gone, and which may come too late."""
        with contextlib.suppress(NotFound):
            try:
                self._reach[role].call(what, timeout)
            except APIError as fault:
                if fault.status_code != 409:  # it is being removed already
                    raise

    def _look(self, role: str) -> dict[str, Any] | None:
        name = self._names[role]
        try:
            return dict(self._reach[role].call(lambda client: client.api.inspect_container(name)))
        except NotFound:
            return None

    def _stranger(self, role: str, found: dict[str, Any]) -> str:
        """Whose a container under our name is, if it is not ours."""
        labels = found["Config"].get("Labels") or {}
        if labels.get(self._label) == self._owner and labels.get(ROLE) == role:
            return ""
        whose = labels.get(self._label)
        by = f"started by the launcher of {whose}" if whose else "not started by a launcher"
        return f"a container named {self._names[role]}, {by}, is on the {role}'s node"

    def _tail(self, role: str, lines: int) -> list[str]:
        name = self._names[role]

        def ask(client: docker.DockerClient) -> bytes:
            return bytes(client.api.logs(name, tail=max(0, lines)))

        try:
            raw = self._reach[role].call(ask)
        except NotFound:
            return []
        return raw.decode("utf-8", "replace").removesuffix("\n").split("\n") if raw else []

    def _compiling(self, role: str) -> float:
        name = self._names[role]
        try:
            found = self._reach[role].call(
                lambda client: client.api.top(name, ps_args="-eo pid,cputimes,comm")
            )
        except APIError:  # it does not run
            return 0.0
        rows = (row[-2:] for row in found["Processes"] or ())
        return loglines.compiling((comm, float(seconds)) for seconds, comm in rows)


def _said(fault: Exception) -> str:
    if isinstance(fault, APIError):
        return " ".join(str(fault.explanation or fault).split())
    return str(fault)


def _status(role: str, found: dict[str, Any], log: Path) -> RankStatus:
    """What `docker inspect` says, as a status."""
    state = found["State"]
    base = RankStatus(
        role,
        "running" if state["Running"] else "exited",
        launch_id=str((found["Config"].get("Labels") or {}).get(LAUNCH, "")),
        pid=int(state.get("Pid") or 0) or None,
        since=_time(state.get("StartedAt", "")),
        log=log,
    )
    if base.running:
        return replace(base, paused=bool(state.get("Paused")))
    if state.get("Status") == "created":
        return replace(base, note="its container was made but not started")
    code = int(state.get("ExitCode", 0))
    # Docker's init ends with 128 + n when the rank was ended by signal n.
    name = None
    if 128 < code < 128 + signal.NSIG:
        with contextlib.suppress(ValueError):
            name = signal.Signals(code - 128).name
    notes = [str(state["Error"])] if state.get("Error") else []
    if state.get("OOMKilled"):
        notes.append("the kernel ended a process of it: out of memory")
    return replace(
        base,
        exit_code=None if name else code,
        signal=name,
        ended=_time(state.get("FinishedAt", "")),
        note="; ".join(notes),
    )


def _time(text: str) -> float | None:
    """Docker's time; what has not come yet is in the year 1."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return at.timestamp() if at.year > 1970 else None
