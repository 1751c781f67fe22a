"""The pair as a `Site`: from the settings and the link that was found. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from launcher.commands.container import CACHE, ENGRAM, MODEL, PACKED
from launcher.deployment import Place, Role, Site
from launcher.link import Link, NodeLink
from launcher.settings.values import Settings

PROGRAM = ("python3", "-m", "spark_overlay.serving.serve")


def site(
    settings: Settings,
    link: Link,
    packed: Collection[Role] = (),
    extra_env: Mapping[str, str] | None = None,
    prepared: Collection[Role] = (),
) -> Site:
    """Both ranks in their containers, each on its own side of the link. ``packed``: those whose
    node has packed rows; ``prepared``: prepared weights."""

    def place(role: Role, side: NodeLink) -> Place:
        return Place(
            node=role,
            role=role,
            host=side.address,
            interface=side.interface,
            model_dir=MODEL,
            engram_dir=ENGRAM,
            program=PROGRAM,
            hcas=side.hcas,
            gid_index=side.gid_index,
            packed_dir=PACKED if role in packed else "",
            prepared_dir=PACKED if role in prepared else "",
        )

    return Site(
        name="pair",
        device="cuda",
        head=place("head", link.head),
        worker=place("worker", link.worker),
        master_port=settings.int("MASTER_PORT"),
        api_host=settings.text("BIND"),
        api_port=settings.int("PORT"),
        cache_dir=CACHE,
        extra_env=extra_env or {},
    )
