"""Where the pair's containers are, and by what they are known as this checkout's.

It is recorded at the launch: whatever .env says later, status, logs and stop find what was started.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.facts.docker import OWNER
from launcher.nodes.endpoint import Endpoint
from launcher.settings.values import Settings

if TYPE_CHECKING:  # the rule of launcher.verbs
    from launcher.commands.container import Container
    from launcher.deployment import Rank
    from launcher.nodes.ssh import SshNode
    from launcher.runtimes.docker import DockerRuntime


@dataclass(frozen=True)
class Reach:
    """``owner`` marks our containers; ``head`` and ``worker`` are their names."""

    endpoint: Endpoint
    head: str
    worker: str
    owner: str

    @classmethod
    def of_settings(cls, settings: Settings, root: Path) -> Reach:
        return cls(
            endpoint=Endpoint.of(settings),
            head=settings.text("CONTAINER_HEAD"),
            worker=settings.text("CONTAINER_WORKER"),
            owner=f"{platform.node()}:{root}",
        )

    @classmethod
    def of_record(cls, recorded: Mapping[str, Any]) -> Reach:
        """Raises KeyError or TypeError for what `record` did not make."""
        return cls(**{**recorded, "endpoint": Endpoint(**recorded["endpoint"])})

    def record(self) -> dict[str, Any]:
        return asdict(self)


def worker(reach: Reach, logs: Path) -> SshNode:
    """The worker's node; it connects when it is first asked something."""
    from launcher.nodes.ssh import SshNode

    return SshNode("worker", reach.endpoint, ssh(logs))


def runtime(
    reach: Reach,
    logs: Path,
    describe: Callable[[Rank], Container] | None = None,
    patience: float = 10.0,
    label: str = OWNER,
    ssh_folder: Path | None = None,
) -> DockerRuntime:
    """Both containers; each daemon is reached when it is first asked something.

    ``describe`` gives the container of a rank, for one that is to be started; ``patience`` is for
    one answer of a daemon, in seconds. ``label`` is the containers' with the owner; ``ssh_folder``
    has the configuration of ssh where that is not in ``logs``.
    """
    from launcher.nodes.daemon import daemon
    from launcher.nodes.local import LocalNode
    from launcher.runtimes.docker import DockerRuntime

    way = ssh_folder or logs
    return DockerRuntime(
        clients={"head": lambda: daemon(None), "worker": lambda: daemon(reach.endpoint, ssh(way))},
        nodes={"head": lambda: LocalNode("head"), "worker": cache(lambda: worker(reach, way))},
        names={"head": reach.head, "worker": reach.worker},
        owner=reach.owner,
        logs=logs,
        describe=describe,
        timeout=patience,
        label=label,
    )


def ssh(logs: Path) -> Path:
    """Where the configuration of ssh is written for all three clients of the worker."""
    return logs / "ssh"
