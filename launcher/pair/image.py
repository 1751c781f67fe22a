"""The steps of the image and of its self-check, for the pair: which nodes, daemons and folders."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from launcher.app import App
from launcher.commands.container import Container, NodePlace, on_node
from launcher.deployment import Rank, Role
from launcher.facts.trees import INDEX
from launcher.image import identity, selfcheck
from launcher.image.bring import Bring
from launcher.image.ship import Ship
from launcher.image.store import ImageStore
from launcher.nodes.daemon import daemon
from launcher.pair import look, reach
from launcher.record import Record
from launcher.runtimes.base import Runtime
from launcher.settings.values import Settings
from launcher.steps.base import Context
from launcher.steps.parity import Parity


def bring(app: App, pair: look.Pair, settings: Settings, record: Record) -> Bring:
    """Contacts nobody yet."""
    here = ImageStore("head", lambda: daemon(None))
    there = ImageStore("worker", lambda: daemon(pair.at.endpoint, reach.ssh(app.logs)))

    def ship(of: str) -> Ship:
        home = settings.text("WORKER_HOME") or pair.worker.facts().home
        folder = settings.path("CACHE_ROOT") / "image-ship"
        if settings.text("IMAGE_SHIP_DIR"):
            folder = settings.path("IMAGE_SHIP_DIR")
        return Ship(
            head=pair.head,
            worker=pair.worker,
            here=here,
            there=there,
            name=settings.text("IMAGE"),
            platform=of,
            folder=folder,
            far=PurePosixPath(on_node(settings.text("WORKER_IMAGE_SHIP_DIR"), home, home)),
            keep=settings.flag("IMAGE_SHIP_KEEP"),
            record=record,
            console=app.console,
        )

    return Bring(
        root=app.root,
        settings=settings,
        head=pair.head,
        here=here,
        there=there,
        logs=app.logs,
        record=record,
        console=app.console,
        machine=platform.machine(),
        ship=ship,
    )


def parity(
    app: App,
    pair: look.Pair,
    settings: Settings,
    brought: Bring,
    place: Callable[[Role], NodePlace],
    needs: tuple[str, ...],
) -> Parity:
    """``place``: of a node, as it is known once the preflight has looked."""

    def describe(rank: Rank) -> Container:
        return selfcheck.checker(rank, settings, place(rank.role), pair.at.owner)

    def runtime(ctx: Context) -> Runtime:
        at = reach.Reach(
            pair.at.endpoint,
            selfcheck.name_of(settings, "head"),
            selfcheck.name_of(settings, "worker"),
            pair.at.owner,
        )
        logs = app.logs / "verify"
        return reach.runtime(at, logs, describe, label=selfcheck.CHECKER, ssh_folder=app.logs)

    def image() -> str:
        found = brought.here.find(settings.text("IMAGE"))
        return "" if found is None else identity.key(found.layers)

    def index() -> Path:
        return Path(place("head").model_dir) / INDEX

    return Parity(needs=needs, runtime=runtime, image=image, index=index)
