"""The overlay's self-check in a throwaway container of the serving image, on each node."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from launcher.commands.container import (
    LAUNCH,
    MODEL,
    ROLE,
    Container,
    NodePlace,
    container_name,
)
from launcher.deployment import Rank, Role
from launcher.errors import LauncherError
from launcher.image.results import MODULE
from launcher.runtimes.base import Runtime
from launcher.settings.values import Settings

CHECKER = "dsv41.checker"  # the label with the owner: for a rank's launch it is not in the way
ARGV = ("python3", "-m", MODULE, "--model", MODEL)
LIMIT = 900.0  # seconds; the kernels of a first run are compiled
GRACE = 10.0
POLL = 0.3


def name_of(settings: Settings, role: Role) -> str:
    return f"{container_name(settings, role)}-verify"


def checker(rank: Rank, settings: Settings, place: NodePlace, owner: str) -> Container:
    """The GPU and the checkpoint to read; no network."""
    return Container(
        name=name_of(settings, rank.role),
        image=settings.text("IMAGE"),
        argv=rank.argv,
        env=dict(rank.env),
        labels={LAUNCH: rank.env["SPARK_LAUNCH_ID"], ROLE: rank.role, CHECKER: owner},
        mounts=(place.mount_of("model"),),
        devices=place.devices,
        gpus=place.gpus,
        ulimits=(),
        aside=True,
    )


@dataclass
class Run:
    """One node's: its lines, and how it ended ("" for well)."""

    role: Role
    lines: list[str] = field(default_factory=list)
    ended: str = ""


def run(
    runtime: Runtime,
    role: Role,
    tell: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Run:
    """Raises LauncherError where no container could be started or its node is lost."""
    if runtime.inspect(role).running:  # of a launcher that was killed
        runtime.stop(role, GRACE)
    launch = uuid.uuid4().hex[:12]
    rank = Rank(0 if role == "head" else 1, role, role, ARGV, {"SPARK_LAUNCH_ID": launch}, {}, {})
    found = Run(role)
    until = clock() + LIMIT
    try:
        runtime.start(rank, launch)
        while True:
            status = runtime.inspect(role)  # before its last lines are read
            for line in runtime.lines(role):
                found.lines.append(line)
                tell(line)
            if status.state == "unreachable":
                raise LauncherError(
                    f"the self-check of the {role} cannot be seen: {status.note}",
                    "a node that answers",
                    "./start.sh doctor tells what is wrong with it; then ./start.sh again",
                )
            if not status.running:
                found.ended = "" if status.exit_code == 0 else status.ending()
                return found
            if clock() > until:
                found.ended = f"still ran after {LIMIT:.0f} s"
                return found
            sleep(POLL)
    finally:
        runtime.stop(role, GRACE)
