"""The rehearsal: both ranks on this machine, on the CPU, over loopback, as plain processes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from launcher.app import REHEARSAL, App
from launcher.deployment import Deployment, Place, Role, Site, deploy
from launcher.errors import LauncherError
from launcher.facts.packs import Packs
from launcher.nodes.local import LocalNode
from launcher.packing.local import LocalJob
from launcher.packing.run import Job
from launcher.packing.words import PACK, What
from launcher.record import Record
from launcher.settings.rehearsal import PROFILE
from launcher.settings.values import Settings
from launcher.steps.base import ROLES, Context, Step
from launcher.steps.check import Check
from launcher.steps.checkpoint import MANIFEST, Checkpoint
from launcher.steps.engine import Engine
from launcher.steps.guard import MemoryGuard, Post
from launcher.steps.launch import Launch
from launcher.steps.overlay import Overlay
from launcher.steps.preflight import Preflight
from launcher.steps.ready import Ready
from launcher.steps.watcher import Watcher

HOST = "127.0.0.1"
INTERFACE = "lo"
COMPILER = "g++"
RANKS: Mapping[Role, int] = {"head": 0, "worker": 1}
SERVE = "spark_overlay.serving.serve"


def build(app: App, settings: Settings, record: Record) -> tuple[Context, Sequence[Step]]:
    """The context and the steps, in boot order, of ``rehearse``."""
    settings = without_compiler(settings, app.console.warn)
    folder = settings.path("REHEARSAL_DIR").resolve()
    python = folder / "engine" / "bin" / "python"
    ctx = context(app, settings, record, folder, (str(python), "-m", SERVE))
    overlay = app.root / "overlay"
    steps: list[Step] = [
        Preflight(disk=folder),
        Engine(folder=folder / "engine", lock=app.root / "launcher" / "locks" / "engine.lock"),
        Overlay(engine=folder / "engine", source=overlay),
        Checkpoint(python=python, folder=folder, package=overlay / "spark_overlay"),
        Launch(sources=overlay / "spark_overlay"),
        Watcher(),
        *([MemoryGuard(posts=posts)] if settings.flag("DSV41_MEM_GUARD") else []),
        Ready(),
        Check(),
    ]
    return ctx, steps


PACKED = "packed"  # in REHEARSAL_DIR


def packed_dir(settings: Settings, folder: Path, role: Role) -> str:
    """Where the rank's packed files are, if it has any and reads by native code."""
    packs = Packs(dict.fromkeys((p.name for p in (folder / PACKED).glob("engram-*.bin")), 0))
    has = settings.text("ENGRAM_STORE") == "file" and packs.of(RANKS[role])
    return str(folder / PACKED) if has else ""


def prepared_dir(folder: Path, role: Role) -> str:
    """Where the rank's prepared weights are, if it has any."""
    packs = Packs(dict.fromkeys((p.name for p in (folder / PACKED).glob("weights-*")), 0))
    return str(folder / PACKED) if packs.weights(RANKS[role]) else ""


def packers(app: App, settings: Settings, what: What = PACK) -> Sequence[Job]:
    """The packers of both ranks over the rehearsal's own files. Raises LauncherError."""
    folder = settings.path("REHEARSAL_DIR").resolve()
    python = folder / "engine" / "bin" / "python"
    for path in (python, folder / MANIFEST):
        if not path.exists():
            raise LauncherError(
                f"{path} is not there", "the rehearsal's engine and tables", "./start.sh rehearse"
            )
    node = LocalNode()
    sources = {"engram": "engram-src", "model": "checkpoint"}
    return [
        LocalJob(role, rank, node, python, folder / sources[what.source], folder / PACKED, what)
        for role, rank in RANKS.items()
    ]


def posts(ctx: Context) -> dict[str, Post]:
    """Where the guards of the ranks stand; each guards a rank's first process and all below it."""
    folder = PurePosixPath(ctx.logs) / "memguard"
    ranks = [ctx.runtime.inspect(role) for role in ROLES]
    return {
        rank.role: Post(ctx.node, folder, ("--pid", str(rank.pid)), sys.executable)
        for rank in ranks
        if rank.running
    }


def without_compiler(
    settings: Settings,
    say: Callable[[str], None],
    which: Callable[[str], str | None] = shutil.which,
) -> Settings:
    """Rows are read plainly where nothing can build the native reader and nobody asked for it."""
    if settings.origin("ENGRAM_STORE") != "default" or which(COMPILER):
        return settings
    say(
        f"no {COMPILER} here: Engram rows are read by plain reads, slower and the same"
        " (ENGRAM_STORE=plain)"
    )
    return settings.with_profile(REHEARSAL, {**PROFILE, "ENGRAM_STORE": "plain"})


def context(
    app: App, settings: Settings, record: Record, folder: Path, program: tuple[str, ...]
) -> Context:
    """``program`` is what both ranks run; ``folder`` holds checkpoint, tables and caches."""

    def place(role: Role) -> Place:
        return Place(
            node="local",
            role=role,
            host=HOST,
            interface=INTERFACE,
            model_dir=str(folder / "checkpoint"),
            engram_dir=str(folder / "engram-src"),
            program=program,
            packed_dir=packed_dir(settings, folder, role),
            prepared_dir=prepared_dir(folder, role),
        )

    def plan(launch_id: str, master_port: int) -> Deployment:
        site = Site(
            name="rehearsal",
            device="cpu",
            head=place("head"),
            worker=place("worker"),
            master_port=master_port,
            api_host=settings.text("BIND"),
            api_port=settings.int("PORT"),
            cache_dir=str(folder / "cache"),
        )
        return deploy(settings, site, launch_id)

    return Context(
        name=REHEARSAL,
        root=app.root,
        logs=app.logs,
        settings=settings,
        node=LocalNode(),
        runtime=app.runtime(REHEARSAL),
        store=app.store,
        record=record,
        console=app.console,
        plan=plan,
    )
