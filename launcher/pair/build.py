"""The pair: a rank in a container on each of two Sparks, over the ConnectX-7 link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from launcher.app import PAIR, App
from launcher.commands.container import (
    Container,
    Mount,
    NodePlace,
    container,
    container_name,
    place_of,
)
from launcher.deployment import Deployment, Rank, Role, deploy
from launcher.errors import LauncherError
from launcher.facts.base import Missing
from launcher.findings import Finding
from launcher.nodes.base import Node
from launcher.pair import aftermath, look, margin, reach
from launcher.pair import download as downloading
from launcher.pair import image as images
from launcher.pair import weights as sharing
from launcher.pair.preflight import PairPreflight, Sight
from launcher.pair.site import site
from launcher.preflight.memory import needed, per_rank
from launcher.record import Record
from launcher.settings.values import Settings
from launcher.steps.base import Context, Step
from launcher.steps.check import Check
from launcher.steps.download import Download
from launcher.steps.guard import MemoryGuard, Post
from launcher.steps.image import ImageStep
from launcher.steps.launch import Launch
from launcher.steps.ready import Ready
from launcher.steps.warmup import Warmup
from launcher.steps.watcher import Watcher
from launcher.steps.weights import Taken, Weights
from launcher.survey import Survey
from launcher.tuning import table
from launcher.weights.backend import Work
from launcher.weights.download import bring

POLL = 1.0  # seconds: each look asks two daemons


def build(app: App, settings: Settings, record: Record) -> tuple[Context, Sequence[Step]]:
    """The context and the steps, in boot order, of ``start``. Contacts nobody."""
    pair = look.Pair.of(app, settings)
    sight = Sight()
    weights = downloading.Weights()
    taken = Taken()

    def fetch() -> None:
        job = downloading.job(app, settings, record)
        weights.manifest = bring(job)
        weights.directories = downloading.mountable(job, settings, weights.manifest)

    def seen() -> look.Seen:
        if sight.seen is None:
            raise LauncherError(
                "nothing is known of the nodes", "the preflight first", "./start.sh"
            )
        return sight.seen

    def plan(launch_id: str, master_port: int) -> Deployment:
        link = seen().link
        assert link is not None  # the preflight ends where there is none
        there = site(
            settings,
            link,
            packed_roles(settings, seen()),
            tuned_env(seen()),
            prepared_roles(seen()),
        )
        return deploy(settings, there, launch_id)

    def describe(rank: Rank) -> Container:
        mark = plan(rank.env["SPARK_LAUNCH_ID"], settings.int("MASTER_PORT")).fingerprint
        return container(
            rank,
            settings,
            with_packs(settings, seen(), rank.role, at(rank.role)),
            owner=pair.at.owner,
            fingerprint=mark,
        )

    def check() -> None:
        """Whether both containers can be described at all."""
        for rank in plan("0" * 12, settings.int("MASTER_PORT")).ranks:
            describe(rank)

    nodes: dict[str, Node] = {"head": pair.head, "worker": pair.worker}

    def room(ctx: Context) -> list[Finding]:
        """The memory of both nodes when the old ranks are gone."""
        need = needed(seen().given.margin, weights.per_rank() or per_rank(seen().head))
        drop = settings.flag("DSV41_DROP_PAGE_CACHE")
        return margin.before_launch(nodes, need, drop, app.console)

    def post(role: Role) -> Post:
        found = seen().head if role == "head" else seen().worker
        folder = PurePosixPath(place(settings, role, found).cache_root) / "memguard"
        return Post(nodes[role], folder, (container_name(settings, role),))

    def at(role: Role) -> NodePlace:
        survey = seen().head if role == "head" else seen().worker
        found = with_table(place(settings, role, survey), survey)
        return weights.placed(found) if role == "head" else replace(found, volumes=taken.volumes())

    def work(ctx: Context) -> Work:
        return sharing.work(
            app, pair, seen(), settings, record, at("head"), at("worker"), weights.manifest
        )

    def rests_on() -> dict[str, str]:
        return {"weights": weights.manifest.key() if weights.manifest else ""}

    brought = images.bring(app, pair, settings, record)
    ctx = Context(
        name=PAIR,
        root=app.root,
        logs=app.logs,
        settings=settings,
        node=pair.head,
        runtime=reach.runtime(pair.at, app.logs, describe),
        store=app.store,
        record=record,
        console=app.console,
        plan=plan,
        reach=pair.at.record(),
        memory=lambda: aftermath.memory(nodes),
        former=lambda recorded: reach.runtime(reach.Reach.of_record(recorded.reach), app.logs),
        settle=lambda recorded: aftermath.settle(app, recorded),
        grace=aftermath.GRACE,
    )
    guard = MemoryGuard(posts=lambda ctx: {"head": post("head"), "worker": post("worker")})
    steps: list[Step] = [
        PairPreflight(pair=pair, sight=sight, check=check),
        Download(bring=fetch),
        ImageStep(bring=lambda ctx: brought),
        Weights(work=work, ways=sharing.ways, taken=taken),
        images.parity(app, pair, settings, brought, at, ("image", "weights")),
        # The ports were looked at from the head's own list: the container, as root, may open those
        # that this user may not.
        Launch(
            needs=("image", "weights", "parity"),
            master_port=settings.int("MASTER_PORT"),
            check=room,
            rests_on=rests_on,
        ),
        Watcher(),
        *([guard] if settings.flag("DSV41_MEM_GUARD") else []),
        Ready(poll=POLL),
        Warmup(),
        Check(),
    ]
    return ctx, steps


def place(settings: Settings, role: Role, found: Survey) -> NodePlace:
    """The node of `role`, with what was found there."""
    if role == "head":
        home = str(Path.home())
    else:
        asked = settings.text("WORKER_HOME")
        home = asked or ("/" if isinstance(found.identity, Missing) else found.identity.home)
    devices = () if isinstance(found.devices, Missing) else found.devices
    return place_of(settings, role, home, devices=devices)


def packed_roles(settings: Settings, seen: look.Seen) -> tuple[Role, ...]:
    """Whose node has packed files, which its rank will use after checking them."""
    if settings.text("ENGRAM_STORE") != "file":
        return ()
    both: tuple[Role, Role] = ("head", "worker")
    return tuple(role for role in both if seen.packs(role))


def prepared_roles(seen: look.Seen) -> tuple[Role, ...]:
    """Whose node has prepared weights, which its rank will read after checking whose they are."""
    both: tuple[Role, Role] = ("head", "worker")
    return tuple(role for role in both if seen.prepared(role))


def tuned_env(seen: look.Seen) -> dict[str, str]:
    """Names the launch table to both ranks; the preflight has found the same one on both nodes."""
    digest = _tuned(seen.head)
    return {table.VARIABLE: table.inside(digest)} if digest else {}


def with_table(found: NodePlace, survey: Survey) -> NodePlace:
    """With the launch table mounted where it is."""
    digest = _tuned(survey)
    if not digest:
        return found
    mount = Mount(str(table.path(found.cache_root)), table.inside(digest))
    return replace(found, mounts=(*found.mounts, mount))


def _tuned(survey: Survey) -> str:
    return "" if isinstance(survey.tuned, Missing) else survey.tuned.digest


def with_packs(settings: Settings, seen: look.Seen, role: Role, found: NodePlace) -> NodePlace:
    """Without packed files their directory is not mounted: it need not exist."""
    used = role in packed_roles(settings, seen) or role in prepared_roles(seen)
    return found if used else replace(found, packed_dir="")
