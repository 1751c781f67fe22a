"""How the worker gets the files: three ways of one shape, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from launcher.commands.nfs import Volume
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.findings import Finding, refuse, stopping
from launcher.nodes.base import Node
from launcher.nodes.ssh import SshNode
from launcher.record import Record
from launcher.settings.values import Settings
from launcher.weights import proof
from launcher.weights.manifest import Manifest, Role
from launcher.weights.proof import Memory

STEP = "weights"
AUTO = ("nfs", "zfs", "rsync")


@dataclass(frozen=True, kw_only=True)
class Work:
    """Both nodes, and what is to be where.

    sources  the head's directories, targets  the worker's (of a copy), by role.
    address  of the head on the link, with the length of its network's prefix.
    folder   of the checkout; cache_root  of the head, far_cache_root  of the worker.
    """

    settings: Settings
    head: Node
    worker: SshNode
    manifest: Manifest
    sources: Mapping[Role, str]
    targets: Mapping[Role, str]
    address: str
    prefix: int
    owner: str
    folder: Path
    cache_root: Path
    far_cache_root: str
    console: Console
    record: Record

    @property
    def memory(self) -> Memory:
        return Memory(self.cache_root / "sums.json")


@dataclass(frozen=True)
class Mounts:
    """What the worker's containers mount; a role without a volume has its directory."""

    volumes: Mapping[Role, Volume] = field(default_factory=dict)


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    def obstacles(self) -> list[Finding]:
        """What keeps this way from being taken; nothing is changed. Both nodes are asked."""
        ...

    def bring(self) -> None:
        """Bring the files there, or what leads to them, from whatever is there. Raises
        LauncherError; `wrong` is not yet asked."""
        ...

    def wrong(self) -> list[Finding]:
        """What the worker would not find of the manifest where it is mounted; empty: all."""
        ...

    def amiss(self) -> list[Finding]:
        """`wrong`, as far as it can be asked of a worker that may not have the image yet."""
        ...

    def mounts(self) -> Mounts: ...


def copies_wrong(work: Work, mend: str) -> list[Finding]:
    """Whether the worker's own directories hold the manifest: sizes, and both ends read."""
    found: list[Finding] = []
    for part in work.manifest.parts:
        where = work.targets[part.role]
        faults = proof.prove(work.worker, where, part, "ends")
        found += proof.findings("worker", part.role, where, faults, mend)
    return found


def chosen(work: Work, ways: Sequence[Backend]) -> Backend:
    """The first without an obstacle; each that is passed over is told with its reason.

    Raises LauncherError with all obstacles where none is left.
    """
    obstacles: list[Finding] = []
    for way in ways:
        found = stopping(way.obstacles())
        if not found:
            return way
        obstacles += found
        if len(ways) > 1:
            for each in found:
                work.record.event(STEP, "passed over", way=way.name, found=each.found)
                work.console.warn(f"{way.name} is passed over: {each.found}; {each.mend}")
    refuse(obstacles)
    raise AssertionError  # no way without an obstacle, and none with one


def obstacles(ways: Sequence[Backend]) -> list[Finding]:
    """What keeps every way from being taken; empty where one is free."""
    found: list[Finding] = []
    for way in ways:
        wrong = stopping(way.obstacles())
        if not wrong:
            return []
        found += wrong
    return found


def proven(work: Work, ways: Sequence[Backend], *, ahead: bool = False) -> Backend:
    """The first way by which the worker has all of it already. Raises LauncherError with what is
    wrong with each. ``ahead``: before the image is brought."""
    found: list[Finding] = []
    for way in ways:
        wrong = way.amiss() if ahead else way.wrong()
        if not wrong:
            return way
        found += wrong
    refuse(found)
    raise AssertionError  # no way at all


def bring(work: Work, ways: Sequence[Backend]) -> Backend:
    """Bring the files by the first way that can and does, and prove them; which it was."""
    rest = list(ways)
    while True:
        way = chosen(work, rest)
        try:
            way.bring()
            refuse(way.wrong())
            return way
        except LauncherError as error:
            rest = rest[rest.index(way) + 1 :]
            if not rest:
                raise
            work.record.event(STEP, "given up", way=way.name, found=error.found)
            work.console.warn(f"{way.name} is given up: {error.found}; {error.do_next}")
