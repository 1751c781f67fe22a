"""The memory of both nodes just before a launch: the old ranks are gone, the new not yet there.

The preflight looks while the old ranks still hold theirs. This is the look that counts, and page
cache, which the GPU's driver cannot take from, is dropped where that is allowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher.console import Console
from launcher.errors import LauncherError
from launcher.facts import batch
from launcher.facts.base import Missing, gib
from launcher.facts.memory import Memory, MemoryFact
from launcher.findings import Finding
from launcher.nodes.base import Node
from launcher.preflight.memory import TOPIC, crowded
from launcher.together import together

WAIT = 30.0  # seconds; a stop has waited for the driver already
LOOK = 1.0
DROP = ("sudo", "-n", "sysctl", "-q", "vm.drop_caches=1")  # 1: page cache alone
DROPPING = 60.0  # seconds: writing what is dirty may take some
BY_HAND = "sync; sudo sysctl vm.drop_caches=1"

Look = Callable[[], Mapping[str, Memory | Missing]]


def before_launch(
    nodes: Mapping[str, Node], need: int, drop: bool, console: Console, **more: Any
) -> list[Finding]:
    """What stands in the way of ranks that need ``need`` bytes each. ``drop``: page cache, too."""

    def look() -> Mapping[str, Memory | Missing]:
        found = together(lambda role: batch.one(nodes[role], MemoryFact()), list(nodes))
        return dict(zip(nodes, found, strict=True))

    return settled(look, lambda role: drop_cache(nodes[role]), need, drop, console, **more)


def drop_cache(node: Node) -> str | None:
    """Why the page cache could not be dropped, None when it was."""
    try:
        node.run(("sync",), timeout=DROPPING)  # what is dirty would stay
        done = node.run(DROP, timeout=DROPPING)
    except LauncherError as error:
        return error.found
    return None if done.status == 0 else done.last(1)


def settled(
    look: Look,
    drop_on: Callable[[str], str | None],
    need: int,
    drop: bool,
    console: Console,
    *,
    limit: float = WAIT,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Finding]:
    """Drop what may be dropped, then wait up to ``limit`` seconds for ``need`` on every node."""
    found = look()
    full = [role for role, memory in found.items() if _crowded(memory, need)]
    for role in full:
        _drop(role, found[role], drop_on if drop else None, console)
    if full and drop:
        before, found = found, look()
        for role in full:
            _tell(role, before[role], found[role], console)
    began, since = clock(), console.now()
    while short := {role: m for role, m in found.items() if _short(m, need)}:
        if clock() - began >= limit:
            break
        told = ", ".join(f"{role} {_have(memory)} of {gib(need)}" for role, memory in short.items())
        console.progress(f"waiting for memory: {told}", since)
        sleep(LOOK)
        found = look()
    return [_finding(role, memory, need, limit) for role, memory in short.items()]


def _crowded(memory: Memory | Missing, need: int) -> bool:
    return not isinstance(memory, Missing) and crowded(memory, need)


def _drop(
    role: str,
    memory: Memory | Missing,
    drop_on: Callable[[str], str | None] | None,
    console: Console,
) -> None:
    assert not isinstance(memory, Missing)
    why = "DSV41_DROP_PAGE_CACHE=0" if drop_on is None else drop_on(role)
    if why is not None:
        console.warn(
            f"the page cache of the {role} stays ({why}): {gib(memory.free)} are free beside"
            f" {gib(memory.cached)} of it, which the GPU's driver cannot take. On the {role}:"
            f" {BY_HAND}"
        )


def _tell(role: str, before: Memory | Missing, now: Memory | Missing, console: Console) -> None:
    if isinstance(before, Missing) or isinstance(now, Missing) or now.free <= before.free:
        return
    console.say(
        f"  {role}: page cache {gib(before.cached)} -> {gib(now.cached)},"
        f" free {gib(before.free)} -> {gib(now.free)}"
    )


def _short(memory: Memory | Missing, need: int) -> bool:
    return isinstance(memory, Missing) or memory.available < need


def _have(memory: Memory | Missing) -> str:
    return "unknown" if isinstance(memory, Missing) else gib(memory.available)


def _finding(role: str, memory: Memory | Missing, need: int, limit: float) -> Finding:
    if isinstance(memory, Missing):
        have = f"the memory of the {role} is not known: {memory.reason}"
    else:
        have = (
            f"the {role} has {gib(memory.available)} of memory available, with the old ranks gone"
            f" and after {limit:.0f} s"
        )
    return Finding(
        have,
        f"{gib(need)}: a rank's weights and the margin beyond (DSV41_BOOT_MARGIN_GIB)",
        f"end other programs on the {role} (ps aux --sort=-rss | head shows which are large), then"
        " ./start.sh again",
        topic=TOPIC,
    )
