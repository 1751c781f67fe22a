"""What the rules compare the facts with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.image.decide import Flags
from launcher.link import Wanted
from launcher.settings.table import TABLE
from launcher.settings.values import Settings


@dataclass(frozen=True)
class Need:
    """Bytes to be written below a path; ``present`` of them are there already."""

    path: str
    bytes: int
    what: str
    present: int = 0

    @property
    def missing(self) -> int:
        return max(0, self.bytes - self.present)


@dataclass(frozen=True)
class Given:
    """``owner`` marks this checkout's containers: label dsv41.owner, host name : path."""

    wanted: Wanted
    owner: str
    head_container: str
    worker_container: str
    image: str
    bind: str
    port: int
    master_port: int
    margin: float  # GiB of memory beyond the weights
    head_needs: tuple[Need, ...] = ()
    worker_needs: tuple[Need, ...] = ()
    kept: tuple[str, ...] = ()  # names of our containers that are recorded
    # Whose image must be there already: nothing may bring it. Both for what serves no pair.
    image_needed: tuple[str, ...] = ("head", "worker")
    # The settings that keep the image from being brought, by node.
    image_flags: Mapping[str, str] = field(default_factory=dict)
    # Whose weights must be there already, likewise.
    weights_needed: tuple[str, ...] = ("head", "worker")
    # Whether the checkpoint is the published one: what its ranks weigh is known beforehand.
    published: bool = True

    @classmethod
    def of(
        cls,
        settings: Settings,
        owner: str,
        head_needs: tuple[Need, ...] = (),
        worker_needs: tuple[Need, ...] = (),
        kept: tuple[str, ...] = (),
    ) -> Given:
        # Otherwise the worker may mount the head's: the weights step tells.
        kept_out: dict[str, str] = {}
        if Flags.of(settings).head_needs_one:
            kept_out["head"] = "SKIP_BUILD=1 and SKIP_PULL=1"
        if settings.flag("SKIP_SHIP"):
            kept_out["worker"] = "SKIP_SHIP=1"
        copied = settings.text("WEIGHT_SYNC") in ("zfs", "rsync")
        return cls(
            wanted=Wanted.of(settings),
            owner=owner,
            head_container=settings.text("CONTAINER_HEAD"),
            worker_container=settings.text("CONTAINER_WORKER"),
            image=settings.text("IMAGE"),
            bind=settings.text("BIND"),
            port=settings.int("PORT"),
            master_port=settings.int("MASTER_PORT"),
            margin=settings.number("DSV41_BOOT_MARGIN_GIB"),
            head_needs=head_needs,
            worker_needs=worker_needs,
            kept=kept,
            image_needed=tuple(kept_out),
            image_flags=kept_out,
            weights_needed=tuple(
                node
                for node, needed in (
                    ("head", not settings.flag("AUTO_DOWNLOAD")),
                    ("worker", settings.flag("SKIP_SYNC") and copied),
                )
                if needed
            ),
            published=settings.text("HF_MODEL_REPO") == TABLE["HF_MODEL_REPO"].default,
        )

    def container(self, node: str) -> str:
        return self.head_container if node == "head" else self.worker_container

    def needs(self, node: str) -> tuple[Need, ...]:
        return self.head_needs if node == "head" else self.worker_needs
