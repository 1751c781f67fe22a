"""The step that waits until the deployment serves, or can be seen not to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import health
from launcher.clock import span
from launcher.errors import LauncherError
from launcher.http import Api
from launcher.runtimes.base import RankStatus
from launcher.state import DeploymentRecord
from launcher.steps.base import ROLES, Context, Step, fingerprint

POLL = 0.5  # seconds
API_TIME = 5.0  # seconds for /health and /v1/models
TOKEN_TIME = 120.0  # seconds for the first generated token: kernels may be compiled for it

# What a line of vLLM's log means for the one who waits; the latest match is the stage.
STAGES = (
    ("Resolved architecture", "the configuration is read"),
    ("Chunked prefill is enabled", "the engine process starts"),
    ("Initializing a V1 LLM engine", "the worker processes start"),
    ("distributed_init_method", "the ranks have met"),
    ("Loading model from scratch", "the model is built"),
    ("Loading safetensors", "weights are loaded"),
    ("Model loading took", "weights are in memory"),
    ("KV cache size", "the KV cache is laid out"),
    ("init engine", "the engine is warm"),
    ("Starting vLLM API server", "the API starts"),
    ("Application startup complete", "the API is up"),
)


@dataclass(frozen=True)
class Ready(Step):
    key: str = "health"
    title: str = "health (both ranks, the API, one token)"
    needs: tuple[str, ...] = ("launch",)
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
        stages = Stages(ctx.runtime.log_path("head"))
        api = api_of(ctx)
        while True:
            ranks = [ctx.runtime.inspect(role) for role in ROLES]
            decided = health.ranks_verdict(deployment.launch_id, ranks)
            if decided is not None:
                raise dead(decided, ranks, deployment.launch_id)
            left = limit - (self.clock() - began)
            fault = health.api_fault(api, deployment.served_model_name, API_TIME, self.clock)
            if fault is None:
                within = max(1.0, min(TOKEN_TIME, left))
                fault = health.token_fault(api, deployment.served_model_name, within)
            if fault is None:
                break
            if left <= 0:
                raise LauncherError(
                    f"no token within {span(limit)}; last seen: {stages.now()}; {fault}",
                    f"a pair that serves within READY_TIMEOUT={limit} s",
                    "./start.sh logs head and ./start.sh logs worker show where each rank stands;"
                    " both still run: ./start.sh rehearse waits on, ./start.sh stop ends them",
                    ctx.runtime.log_path("head"),
                )
            ctx.console.progress(stages.now(), since)
            self.sleep(POLL)
        if deployment.ready is None:
            ctx.store.record(replace(deployment, ready=self.now()))
        ctx.record.event(self.key, "serving", launch_id=deployment.launch_id)


class Stages:
    """The stage that a rank's log tells of, read on from where it was read to."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = 0
        self._stage = "vLLM is imported"

    def now(self) -> str:
        try:
            with self._log.open("rb") as source:
                if self._at > source.seek(0, os.SEEK_END):
                    self._at = 0
                source.seek(self._at)
                text = source.read()
                self._at += len(text)
        except FileNotFoundError:
            return self._stage
        for line in text.decode("utf-8", "replace").splitlines():
            for mark, stage in STAGES:
                if mark in line:
                    self._stage = stage
        return self._stage


def recorded(ctx: Context) -> DeploymentRecord:
    deployment = ctx.store.load().deployment
    if deployment is None:
        raise LauncherError(
            "no deployment is recorded", "the launch before this", "./start.sh rehearse"
        )
    return deployment


def api_of(ctx: Context) -> Api:
    deployment = recorded(ctx)
    key = ctx.settings.secret("VLLM_API_KEY")
    return Api(deployment.api_host, deployment.api_port, key.reveal() if key else "")


def dead(verdict: health.Verdict, ranks: list[RankStatus], launch_id: str) -> LauncherError:
    """The error for a pair that lost a rank, with the end of that rank's log."""
    lost = [rank for rank in ranks if not (rank.running and rank.launch_id == launch_id)]
    # The one that ended first is the likelier cause.
    lost.sort(key=lambda rank: rank.ended or float("inf"))
    lines = "".join(f"\n    {line}" for line in lost[0].last_lines[-20:])
    last = f"; last lines of the {lost[0].role}:{lines}" if lines else ""
    return LauncherError(
        f"{verdict.reason}{last}",
        "two ranks that run",
        "mend what the lines say, then ./start.sh rehearse; ./start.sh stop ends what still runs",
        lost[0].log,
    )
