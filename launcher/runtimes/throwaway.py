"""One program in a throwaway container of the serving image, from its start to its end."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from launcher.deployment import Rank, Role
from launcher.errors import LauncherError
from launcher.runtimes.base import Runtime

GRACE = 10.0
POLL = 0.3


@dataclass
class Ran:
    """Its lines, and how it ended ("" for well)."""

    role: Role
    lines: list[str] = field(default_factory=list)
    ended: str = ""


def run(
    runtime: Runtime,
    role: Role,
    argv: Sequence[str],
    what: str,
    limit: float,
    tell: Callable[[str], None] = lambda line: None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Ran:
    """``runtime`` makes the container from a rank with ``argv``; it is gone afterwards. ``what``
    names the program; ``limit`` is in seconds.

    Raises LauncherError where no container could be started or its node is lost.
    """
    if runtime.inspect(role).running:  # of a launcher that was killed
        runtime.stop(role, GRACE)
    launch = uuid.uuid4().hex[:12]
    number = 0 if role == "head" else 1
    rank = Rank(number, role, role, tuple(argv), {"SPARK_LAUNCH_ID": launch}, {}, {})
    found = Ran(role)
    until = clock() + limit
    try:
        runtime.start(rank, launch)
        while True:
            status = runtime.inspect(role)  # before its last lines are read
            for line in runtime.lines(role):
                found.lines.append(line)
                tell(line)
            if status.state == "unreachable":
                raise LauncherError(
                    f"{what} on the {role} cannot be seen: {status.note}",
                    "a node that answers",
                    "./start.sh doctor tells what is wrong with it; then run this again",
                )
            if not status.running:
                found.ended = "" if status.exit_code == 0 else status.ending()
                return found
            if clock() > until:
                found.ended = f"still ran after {limit:.0f} s"
                return found
            sleep(POLL)
    finally:
        runtime.stop(role, GRACE)
