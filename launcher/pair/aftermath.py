"""What is to be seen to after the pair's ranks have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launcher.app import PAIR, App
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.nodes.base import Node
from launcher.nodes.local import LocalNode, memory_available
from launcher.pair import reach
from launcher.runtimes.base import RankStatus
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


@dataclass(frozen=True)
class Unrecorded:
    """What both nodes have of a pair of which no deployment is recorded. ``unseen``: why that is
    not known, "" where both were asked; ``strangers``: containers of its names that are others'."""

    there: bool = False
    unseen: str = ""
    strangers: tuple[str, ...] = ()

    def told(self) -> str:
        """Why nothing of the pair was ended, where nothing was ``there``."""
        if self.unseen:
            return f"whether anything of the pair runs was not seen: {self.unseen}"
        others = f" ({'; '.join(self.strangers)})" if self.strangers else ""
        return f"the pair has no container of this checkout on the head or the worker{others}"


def left_behind(app: App) -> Unrecorded:
    """What a pair has left though no deployment is recorded. Nobody is asked from a machine that
    is not the head."""
    from launcher.link import head_ip
    from launcher.survey import local_interfaces

    try:
        settings = app.settings(deployment=PAIR, say=lambda line: None)
        if elsewhere := head_ip(settings.text("HEAD_IP"), local_interfaces(LocalNode("head"))):
            return Unrecorded(unseen=elsewhere[0].found)
        return of_ranks(together(app.runtime(PAIR, PATIENCE).inspect, ROLES))
    except LauncherError as error:
        return Unrecorded(unseen=error.found)


def of_ranks(ranks: Sequence[RankStatus]) -> Unrecorded:
    lost = [f"the {rank.role} {rank.ending()}" for rank in ranks if rank.state == "unreachable"]
    return Unrecorded(
        there=any(rank.state in ("running", "exited") for rank in ranks),
        unseen="; ".join([*lost, "./start.sh doctor shows why"] if lost else []),
        strangers=tuple(rank.note for rank in ranks if rank.state == "absent" and rank.note),
    )
