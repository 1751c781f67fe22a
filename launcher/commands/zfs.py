"""zfs's argv and what it prints, in the words that old versions (zfs-fuse) know too. Pure.

``tool`` is how zfs is called on a node: ("zfs",), ("/usr/sbin/zfs",) or ("sudo", "-n", "zfs").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Tool = tuple[str, ...]

# How it may be called: root's own, then by sudo, which asks nothing.
TOOLS: tuple[Tool, ...] = (
    ("zfs",), ("/usr/sbin/zfs",), ("/sbin/zfs",),
)  # fmt: skip


def by_sudo(tool: Tool) -> Tool:
    return ("sudo", "-n", *tool)


@dataclass(frozen=True)
class Snapshot:
    """``guid`` is the same for a snapshot and what was received of it."""

    dataset: str
    name: str
    guid: str

    @property
    def full(self) -> str:
        return f"{self.dataset}@{self.name}"


def get(tool: Tool, name: str, *properties: str) -> tuple[str, ...]:
    return (*tool, "get", "-H", "-p", "-o", "property,value", ",".join(properties), name)


def values(text: str) -> dict[str, str]:
    """Of `get`."""
    rows = (line.split("\t", 1) for line in text.splitlines())
    return {row[0]: row[1].strip() for row in rows if len(row) == 2}


def snapshots(tool: Tool, dataset: str) -> tuple[str, ...]:
    return (
        *tool, "list", "-H", "-r", "-t", "snapshot", "-o", "name,guid", "-s", "creation", dataset,
    )  # fmt: skip


def listed(text: str, dataset: str) -> tuple[Snapshot, ...]:
    """Of `snapshots`, the oldest first; those of datasets below it are left out."""
    found = []
    for line in text.splitlines():
        name, _, guid = line.partition("\t")
        of, at, short = name.partition("@")
        if at and of == dataset:
            found.append(Snapshot(dataset, short, guid.strip()))
    return tuple(found)


def newest_common(head: Sequence[Snapshot], worker: Sequence[Snapshot]) -> Snapshot | None:
    """The head's newest snapshot that the worker has too, by its guid."""
    there = {each.guid for each in worker}
    return next((each for each in reversed(head) if each.guid in there), None)


def snapshot(tool: Tool, dataset: str, name: str) -> tuple[str, ...]:
    return (*tool, "snapshot", f"{dataset}@{name}")


def send(tool: Tool, last: Snapshot, since: Snapshot | None) -> tuple[str, ...]:
    """The whole of ``last``, or what changed after ``since``."""
    base = ("-i", f"@{since.name}") if since else ()
    return (*tool, "send", *base, last.full)


def receive(tool: Tool, dataset: str) -> tuple[str, ...]:
    """Not mounted, for where is set after. ``-F`` takes back what was changed there since."""
    return (*tool, "recv", "-u", "-F", dataset)


def rollback(tool: Tool, to: Snapshot) -> tuple[str, ...]:
    """Takes newer snapshots away with it."""
    return (*tool, "rollback", "-r", to.full)


def settle(tool: Tool, dataset: str, directory: str) -> tuple[tuple[str, ...], ...]:
    """Commands that put it at its directory, to be read only."""
    return (
        (*tool, "set", f"mountpoint={directory}", dataset),
        (*tool, "set", "readonly=on", dataset),
    )


def mount(tool: Tool, dataset: str) -> tuple[str, ...]:
    return (*tool, "mount", dataset)


def destroy(tool: Tool, one: Snapshot) -> tuple[str, ...]:
    return (*tool, "destroy", one.full)


def outdated(found: Sequence[Snapshot], prefix: str, keep: Sequence[str]) -> tuple[Snapshot, ...]:
    """Snapshots of ours that are not needed any more."""
    return tuple(
        each for each in found if each.name.startswith(f"{prefix}-") and each.guid not in keep
    )
