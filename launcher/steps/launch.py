"""The step that starts the ranks: the worker first, then the head, under one launch id."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import ports, processes
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.findings import Finding
from launcher.record import Record
from launcher.runtimes.base import RankStatus, Runtime
from launcher.state import DeploymentRecord, RankRecord, Store
from launcher.steps import preflight
from launcher.steps.base import ROLES, Context, Step, fingerprint
from launcher.together import together

LAUNCH = "launch"
GRACE = 15.0  # seconds: a headless vLLM takes about five to end


@dataclass(frozen=True)
class Launch(Step):
    key: str = LAUNCH
    title: str = "launch (worker, then head)"
    needs: tuple[str, ...] = ("engine", "overlay", "checkpoint")
    sources: Path | None = None  # of the overlay: ranks that run older ones are stale
    master_port: int | None = None  # None: any free one
    check: Callable[[Context], list[Finding]] = preflight.port
    now: Callable[[], float] = time.time
    # What else the ranks were started from, such as the weights' checksums.
    rests_on: Callable[[], Mapping[str, str]] = dict

    def inputs(self, ctx: Context) -> str:
        # The launch id and the free port differ each time; what else differs, the user changed.
        plan = ctx.plan("any", 1)
        code = digest(self.sources) if self.sources else ""
        parts = {"deployment": plan.fingerprint, "sources": code, **self.rests_on()}
        return fingerprint(parts)

    def done(self, ctx: Context) -> bool:
        recorded = ctx.store.load().deployment
        if recorded is None or recorded.stopping or dict(recorded.reach) != dict(ctx.reach):
            return False
        return both_run(ctx, recorded.launch_id)

    def look_ahead(self, ctx: Context) -> None:
        ctx.plan("any", 1)

    def do(self, ctx: Context) -> None:
        end(ctx)
        # What was free when the boot began may not be so after a long installation.
        preflight.refuse(self.check(ctx))
        launch_id = uuid.uuid4().hex[:12]
        api_port = ctx.settings.int("PORT")
        master_port = self.master_port or ports.free("127.0.0.1", avoid=[api_port])
        plan = ctx.plan(launch_id, master_port)
        for rank in plan.ranks:
            for value in rank.secret_env.values():
                ctx.record.secrets.add(value)
        record = DeploymentRecord(
            name=ctx.name,
            launch_id=launch_id,
            fingerprint=plan.fingerprint,
            served_model_name=plan.served_model_name,
            api_host=plan.api_host,
            api_port=plan.api_port,
            master_port=master_port,
            boot_id=processes.boot_id(),
            started=self.now(),
            run=str(ctx.record.folder),
            reach=ctx.reach,
            memory=ctx.memory(),
            ranks=tuple(
                RankRecord(
                    rank.rank,
                    rank.role,
                    rank.node,
                    str(ctx.runtime.log_path(rank.role)),
                    dict(rank.ports),
                )
                for rank in plan.ranks
            ),
        )
        # Recorded before anything runs: a killed launcher leaves ranks that the next one knows.
        ctx.store.record(record)
        for rank in sorted(plan.ranks, key=lambda rank: ROLES.index(rank.role)):
            try:
                pid = ctx.runtime.start(rank, launch_id)
            except LauncherError:
                end(ctx)  # no half a pair
                raise
            record = record.with_pid(rank.role, pid)
            ctx.store.record(record)
            fields = {"role": rank.role, "pid": pid, "launch_id": launch_id}
            ctx.record.event(self.key, "rank started", **fields)
            told = f"./start.sh logs {rank.role}"
            if not ctx.reach:  # a container's log is Docker's until it is saved
                told = f"log {ctx.runtime.log_path(rank.role)}"
            ctx.console.say(f"  {rank.role} started, pid {pid}, {told}")

    def undo(self, ctx: Context) -> None:
        end(ctx)


def digest(folder: Path) -> str:
    """One hash over the Python files of a folder, names included."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()


def both_run(ctx: Context, launch_id: str) -> bool:
    found = together(ctx.runtime.inspect, ROLES)
    return all(rank.running and not rank.paused and rank.launch_id == launch_id for rank in found)


def end(ctx: Context) -> list[RankStatus]:
    """End both ranks and wait until their nodes have their memory back; how each had been."""
    recorded = ctx.store.load().deployment
    runtime = ctx.runtime
    if ctx.former and recorded is not None and dict(recorded.reach) != dict(ctx.reach):
        runtime = ctx.former(recorded)  # where it was started, whatever the settings say by now
    before = stop_all(ctx.store, runtime, ctx.record, ctx.console, ctx.grace)
    if recorded is not None and any(rank.running for rank in before):
        ctx.settle(recorded)
    return before


def stop_all(
    store: Store, runtime: Runtime, record: Record, console: Console, grace: float = GRACE
) -> list[RankStatus]:
    """End both ranks at the same time, whatever is recorded of them; how each had been.

    The record says so before, so that the watcher does not report an end that was asked for.
    """
    recorded = store.load().deployment
    if recorded is not None and not recorded.stopping:
        try:
            store.record(replace(recorded, stopping=True))
        except OSError as error:  # a full disk must not keep the ranks up
            console.warn(f"{store.path} cannot be written: {error.strerror or error}")
    before = together(runtime.inspect, ROLES)
    running = [rank for rank in before if rank.running]
    for rank in running:
        record.event("stop", "stopping", role=rank.role, pid=rank.pid)
        console.say(f"  ending the {rank.role} (pid {rank.pid})")
    after = together(lambda role: runtime.stop(role, grace), ROLES)
    lost = [rank for rank in after if rank.state == "unreachable"]
    if lost:  # the deployment stays recorded, to be ended later
        raise LauncherError(
            f"the {lost[0].role} could not be ended: {lost[0].note}; the other rank is ended",
            f"a {lost[0].role} that can be reached",
            "mend the way to it (./start.sh doctor shows what is wrong), then ./start.sh stop",
        )
    for rank in running:
        record.event("stop", "stopped", role=rank.role, pid=rank.pid)
    if recorded is not None:
        store.record(None)
    return before
