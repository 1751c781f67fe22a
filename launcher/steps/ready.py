"""The step that waits until the deployment serves, or can be seen not to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import health
from launcher.clock import span
from launcher.errors import LauncherError
from launcher.http import Api
from launcher.runtimes.base import RankStatus, Runtime
from launcher.state import DeploymentRecord
from launcher.steps.base import ROLES, Context, Step, fingerprint
from launcher.steps.stages import Stages
from launcher.together import together
from launcher.watch.stall import Silence, Stall

API_TIME = 5.0  # seconds for /health and /v1/models
TOKEN_TIME = 120.0  # seconds for the first generated token: kernels may be compiled for it
UNREACHABLE = 30.0  # seconds for which a node that does not answer may come back
SOON = 0.1  # seconds to the second look: a rank that cannot start has ended by then
LOOK = 2.0  # seconds between looks at what the ranks' processes do


@dataclass(frozen=True)
class Ready(Step):
    key: str = "health"
    title: str = "health (both ranks, the API, one token)"
    needs: tuple[str, ...] = ("launch",)
    poll: float = 0.5  # seconds between two looks, after the first few
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.time

    def inputs(self, ctx: Context) -> str:
        return fingerprint({"launch_id": recorded(ctx).launch_id})

    def done(self, ctx: Context) -> bool:
        return False  # proven anew each time: it takes a second

    def do(self, ctx: Context) -> None:
        deployment = recorded(ctx)
        limit = ctx.settings.int("READY_TIMEOUT")
        began = self.clock()
        since = ctx.console.now()
        sight = Sight(ctx.runtime, ctx.settings.int("DSV41_HANG_SECONDS"), self.clock)
        api = api_of(ctx)
        pause = SOON
        while True:
            ranks = inspected(ctx.runtime)
            decided = health.ranks_verdict(deployment.launch_id, ranks)
            if decided is not None and not sight.may_return(ranks):
                raise dead(ctx, decided, ranks, deployment.launch_id)
            silence = sight.look()
            if silence is not None:
                raise hung(ctx, silence)
            left = limit - (self.clock() - began)
            fault: str | None = "a node does not answer"
            if decided is None:
                within = min(API_TIME, max(1.0, left))
                fault = health.api_fault(api, deployment.served_model_name, within, self.clock)
            if fault is None:
                within = max(1.0, min(TOKEN_TIME, left))
                fault = health.token_fault(api, deployment.served_model_name, within)
            if fault is None:
                break
            if left <= 0:
                raise LauncherError(
                    f"no token within {span(limit)}; last seen: {sight.told()}; {fault}",
                    f"a pair that serves within READY_TIMEOUT={limit} s",
                    "./start.sh logs head and ./start.sh logs worker show where each rank stands;"
                    f" both still run: {ctx.verb} waits on, ./start.sh stop ends them",
                    kept_log(ctx, "head"),
                )
            ctx.console.progress(sight.told(), since)
            self.sleep(pause)
            pause = min(2 * pause, self.poll)
        if deployment.ready is None:
            ctx.store.record(replace(deployment, ready=self.now()))
        ctx.record.event(self.key, "serving", launch_id=deployment.launch_id)


class Sight:
    """What is seen of two ranks that come up: their stages, and how long nothing has moved."""

    def __init__(self, runtime: Runtime, limit: float, clock: Callable[[], float]) -> None:
        self._runtime = runtime
        self._clock = clock
        self._stall = Stall(limit)
        self._stages = {role: Stages() for role in ROLES}
        self._looked: float | None = None
        self._lost: dict[str, float] = {}  # role -> since when its node does not answer

    def may_return(self, ranks: list[RankStatus]) -> bool:
        """Whether all that is wrong is a node that has not answered for a short while."""
        now = self._clock()
        gone = {rank.role for rank in ranks if rank.state == "unreachable"}
        self._lost = {role: self._lost.get(role, now) for role in gone}
        others = [rank for rank in ranks if rank.role not in gone]
        return (
            bool(gone)
            and all(rank.running for rank in others)
            and all(now - since < UNREACHABLE for since in self._lost.values())
        )

    def look(self) -> Silence | None:
        """How long nothing has moved, once it is too long."""
        now = self._clock()
        if self._looked is not None and now - self._looked < LOOK:
            return None
        self._looked = now
        for role in ROLES:
            self._stages[role].feed(self._runtime.lines(role))
        found = {role: self._runtime.activity(role) for role in ROLES}
        return self._stall.see(now, found, {role: self._stages[role].now for role in ROLES})

    def told(self) -> str:
        head, worker = self._stages["head"].now, self._stages["worker"].now
        return head if head == worker else f"head: {head}; worker: {worker}"


def inspected(runtime: Runtime) -> list[RankStatus]:
    """Both ranks, asked at the same time: one of them may be on another machine."""
    return together(runtime.inspect, ROLES)


def recorded(ctx: Context) -> DeploymentRecord:
    deployment = ctx.store.load().deployment
    if deployment is None:
        raise LauncherError("no deployment is recorded", "the launch before this", ctx.verb)
    return deployment


def api_of(ctx: Context) -> Api:
    deployment = recorded(ctx)
    key = ctx.settings.secret("VLLM_API_KEY")
    return Api(deployment.api_host, deployment.api_port, key.reveal() if key else "")


def kept_log(ctx: Context, role: str) -> Path:
    """The rank's log as a file of this run, for those who look when its container is gone."""
    path = ctx.record.folder / f"{role}.log"
    return path if ctx.runtime.save_log(role, path) else ctx.runtime.log_path(role)


def dead(
    ctx: Context, verdict: health.Verdict, ranks: list[RankStatus], launch_id: str
) -> LauncherError:
    """The error for a pair that lost a rank, with the end of that rank's log."""
    lost = [rank for rank in ranks if not (rank.running and rank.launch_id == launch_id)]
    # The one that ended first is the likelier cause.
    lost.sort(key=lambda rank: rank.ended or float("inf"))
    lines = "".join(f"\n    {line}" for line in lost[0].last_lines[-20:])
    last = f"; last lines of the {lost[0].role}:{lines}" if lines else ""
    logs = {role: kept_log(ctx, role) for role in ROLES}
    return LauncherError(
        f"{verdict.reason}{last}",
        "two ranks that run",
        f"mend what the lines say, then {ctx.verb}; ./start.sh stop ends what still runs",
        logs[lost[0].role],
    )


def hung(ctx: Context, silence: Silence) -> LauncherError:
    """The error for a pair in which nothing moves, with where each thread of it stands."""
    saved = []
    for role in ROLES:
        path = ctx.record.folder / f"{role}-stacks.txt"
        said = ctx.runtime.stacks(role, path)
        ctx.record.event("health", "stacks", role=role, asked=said, path=str(path))
        saved.append(f"{path} ({said})")
    return LauncherError(
        f"{silence.words()}; Python stacks: {' and '.join(saved)}",
        "new log lines or a compiler at work (DSV41_HANG_SECONDS is the limit)",
        "look where the stacks wait: in NCCL, the link (./start.sh doctor); in a load, the disk;"
        f" then ./start.sh stop and {ctx.verb}; both ranks still run",
        kept_log(ctx, "head"),
    )
