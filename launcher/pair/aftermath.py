"""What is to be seen to after the pair's ranks have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from launcher.app import PAIR, App
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.nodes.base import Node
from launcher.nodes.local import LocalNode, memory_available
from launcher.pair import reach
from launcher.state import DeploymentRecord
from launcher.steps.base import ROLES
from launcher.together import together

GRACE = 60.0  # seconds: a rank gives back a hundred GiB
MEMORY_TIME = 120.0  # seconds until a driver has given all of it back
SLACK = 2 << 30  # bytes that others may have taken meanwhile
LOOK = 1.0
PATIENCE = 4.0  # seconds for a node that may not be there


def nodes_of(at: reach.Reach, app: App) -> dict[str, Node]:
    return {"head": LocalNode("head"), "worker": reach.worker(at, app.logs)}


def memory(nodes: Mapping[str, Node]) -> dict[str, int]:
    """MemAvailable of each node in bytes, all asked at once."""

    def of(node: Node) -> int:
        return memory_available(node.run(["cat", "/proc/meminfo"], timeout=10.0).text)

    return dict(zip(nodes, together(of, list(nodes.values())), strict=True))


def settle(app: App, recorded: DeploymentRecord) -> None:
    """Wait until both nodes have about the memory they had before the start; warn if they do not.

    On a GB10 the driver returns a context's memory seconds after its process has ended, and a start
    before that fails for want of it.
    """
    if recorded.name != PAIR or not recorded.memory:
        return
    nodes = nodes_of(reach.Reach.of_record(recorded.reach), app)
    try:
        wait_for_memory(lambda: memory(nodes), recorded.memory, app.console)
    except LauncherError as error:
        app.console.warn(f"whether the memory is back could not be seen: {error.found}")


def wait_for_memory(
    look: Callable[[], Mapping[str, int]],
    before: Mapping[str, int],
    console: Console,
    *,
    limit: float = MEMORY_TIME,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether every node has within ``SLACK`` of what it had, in ``limit`` seconds."""
    began, since = clock(), console.now()
    while True:
        now = look()
        short = {role: now[role] for role in ROLES if now[role] < before[role] - SLACK}
        if not short:
            return True
        told = ", ".join(
            f"{role} {have / 2**30:.1f} of {before[role] / 2**30:.1f} GiB"
            for role, have in short.items()
        )
        if clock() - began >= limit:
            console.warn(
                f"after {limit:.0f} s not all memory is back: {told} available."
                " Another program may have taken it; ./start.sh doctor shows who holds what"
            )
            return False
        console.progress(f"waiting for memory: {told}", since)
        sleep(LOOK)


def left_behind(app: App) -> bool:
    """Whether a node has a container of ours though no deployment is recorded. Nobody is asked
    from a machine that is not the head."""
    from launcher.link import head_ip
    from launcher.survey import local_interfaces

    try:
        settings = app.settings(deployment=PAIR, say=lambda line: None)
        if head_ip(settings.text("HEAD_IP"), local_interfaces(LocalNode("head"))):
            return False
        found = together(app.runtime(PAIR, PATIENCE).inspect, ROLES)
    except LauncherError:
        return False
    return any(rank.state in ("running", "exited") for rank in found)
