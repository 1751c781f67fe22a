"""The worker's Docker volumes of type nfs: made, made anew, and read through."""

from __future__ import annotations

import contextlib
import json
import shlex
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.commands import nfs
from launcher.commands.nfs import Volume
from launcher.errors import LauncherError
from launcher.findings import Finding, refuse
from launcher.nodes.base import Done, Node

ASK = 20.0  # seconds for an answer of the daemon


def find(node: Node, volume: Volume) -> Mapping[str, Any] | None:
    """What Docker tells of the volume of that name, None where there is none."""
    done = node.run(volume.look(), timeout=ASK)
    if done.status:
        if "no such volume" in done.last(3).lower():
            return None
        raise LauncherError(
            f"Docker on the {node.name} cannot be asked for volumes: {done.last(2)}",
            "a Docker daemon that answers",
            f"on the {node.name}: docker volume ls",
        )
    value = json.loads(done.text)
    assert isinstance(value, dict)
    return value


def make(node: Node, volume: Volume, again: bool = False) -> bool:
    """Make it, or make it anew where its options differ; whether something was made.

    Raises LauncherError that names the containers that use one that must go.
    """
    there = find(node, volume)
    if there is not None:
        if volume.same(there) and not again:
            return False
        users = node.run(volume.users(), timeout=ASK).text.split()
        if users and volume.same(there):
            return False  # asked for anew, and as it should be
        refuse(_stays(node, volume, there, users))
        _must(node, volume.remove())
    _must(node, volume.create())
    return True


def not_ours(node: Node, volume: Volume, owner: str) -> list[Finding]:
    """What would keep `make` from making it anew when our own containers have ended."""
    there = find(node, volume)
    if there is None or volume.same(there):
        return []
    ours = node.run(volume.users(owner), timeout=ASK).text.split()
    users = node.run(volume.users(), timeout=ASK).text.split()
    return _stays(node, volume, there, [name for name in users if name not in ours])


def _stays(
    node: Node, volume: Volume, there: Mapping[str, Any], users: Sequence[str]
) -> list[Finding]:
    """Why the volume that is there cannot give way."""
    if users:
        return [
            Finding(
                f"the volume {volume.name} on the {node.name} has other options than wanted"
                f" ({_told(there)}) and is used by {', '.join(users)}",
                f"it made anew: {volume.options['o']}",
                f"end what uses it (./start.sh stop, or on the {node.name}: docker rm -f"
                f" {shlex.join(users)}), then run this again; or set another NFS_VOLUME_…",
                topic="weights",
            )
        ]
    if there.get("Driver") != "local" or (there.get("Options") or {}).get("type") != "nfs":
        return [
            Finding(
                f"the {node.name} has a volume {volume.name} that is no NFS mount"
                f" ({_told(there)}): it may hold files",
                "that name free: nothing of others is removed",
                f"if it is not needed, on the {node.name}: docker volume rm {volume.name}; or set"
                " another NFS_VOLUME_MODEL, NFS_VOLUME_ENGRAM",
                topic="weights",
            )
        ]
    return []


def unequal(node: Node, volume: Volume) -> list[Finding]:
    """Whether it is there as it should be. One that is not must never be mounted: Docker would
    make an empty one in its place."""
    there = find(node, volume)
    if there is not None and volume.same(there):
        return []
    how = "is not there" if there is None else f"has other options ({_told(there)})"
    return [
        Finding(
            f"the volume {volume.name} on the {node.name} {how}",
            f"a volume of type nfs: {volume.options['o']}",
            "./start.sh share makes it, and exports what it mounts",
            topic="weights",
        )
    ]


def _told(there: Mapping[str, Any]) -> str:
    options = there.get("Options") or {}
    return ", ".join(f"{key}={text}" for key, text in sorted(options.items())) or "none"


def _must(node: Node, argv: Sequence[str]) -> None:
    done = node.run(argv, timeout=60)
    if done.status:
        raise LauncherError(
            f"{shlex.join(argv[:3])} on the {node.name} failed: {done.last(3)}",
            "a Docker daemon that can make a volume",
            f"on the {node.name}: {shlex.join(argv)}",
        )


@dataclass(frozen=True)
class Through:
    """A node as seen from a throwaway container that has a volume: `run` is all it can.

    What is asked of it runs in the image, with the volume at ``target``.
    """

    node: Node
    volume: Volume
    target: str
    image: str
    owner: str
    seconds: float  # a dead server keeps a container waiting for ever

    @property
    def name(self) -> str:
        return self.node.name

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        line: Callable[[str], None] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> Done:
        named = f"dsv41-reader-{uuid.uuid4().hex[:8]}"
        words = nfs.reading(self.volume, self.target, self.image, named, self.owner, argv)
        limit = min(self.seconds, timeout or self.seconds)
        try:
            return self.node.run(words, timeout=limit, stdin=stdin, line=line, tick=tick)
        finally:
            # --rm is docker's own; a run that was cut short leaves its container.
            # One that hangs in a mount cannot go yet.
            with contextlib.suppress(LauncherError):
                self.node.run(["docker", "rm", "--force", named], timeout=ASK)
