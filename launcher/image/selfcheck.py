"""The overlay's self-check in a throwaway container of the serving image, on each node."""

from __future__ import annotations

from launcher.commands.container import (
    LAUNCH,
    MODEL,
    ROLE,
    Container,
    NodePlace,
    container_name,
)
from launcher.deployment import Rank, Role
from launcher.image.results import MODULE
from launcher.settings.values import Settings

CHECKER = "dsv41.checker"  # the label with the owner: for a rank's launch it is not in the way
ARGV = ("python3", "-m", MODULE, "--model", MODEL)
LIMIT = 900.0  # seconds; the kernels of a first run are compiled


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
