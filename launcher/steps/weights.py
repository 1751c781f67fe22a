"""The step that brings the weights to the worker, and proves what its containers will mount."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.commands.nfs import Volume
from launcher.errors import LauncherError
from launcher.findings import refuse
from launcher.steps.base import Context, Step, fingerprint
from launcher.weights import backend
from launcher.weights.backend import Backend, Work
from launcher.weights.manifest import Role

KEYS = (
    "WEIGHT_SYNC", "WORKER_MODEL_DIR", "WORKER_ENGRAM_DIR", "MODEL_HOST", "ENGRAM_DIR",
    "ENGRAM_SRC", "NFS_SERVER_IP", "NFS_CLIENTS", "NFS_OPTS", "NFS_OPTS_CLIENT", "NFS_CONTAINER",
    "NFS_EXPORT_ROOT", "NFS_EXPORT_MODEL", "NFS_EXPORT_ENGRAM", "NFS_VOLUME_MODEL",
    "NFS_VOLUME_ENGRAM",
)  # fmt: skip


@dataclass
class Taken:
    """The way by which the worker has the files, once that is proven; the containers' mounts come
    from it."""

    way: Backend | None = None

    def volumes(self) -> Mapping[Role, Volume]:
        return self.way.mounts().volumes if self.way else {}


@dataclass(frozen=True, kw_only=True)
class Weights(Step):
    key: str = "weights"
    title: str = "weights (on the worker, proven where they are mounted)"
    needs: tuple[str, ...] = ()
    work: Callable[[Context], Work]
    ways: Callable[[Work], Sequence[Backend]]
    taken: Taken = field(default_factory=Taken)

    def inputs(self, ctx: Context) -> str:
        asked = {key: ctx.settings.text(key) for key in KEYS}
        return fingerprint({**asked, "manifest": self.work(ctx).manifest.key()})

    def done(self, ctx: Context) -> bool:
        """Whether the worker still has all of it, by the way that would be taken now."""
        if ctx.settings.flag("FORCE_SYNC"):
            return False
        work = self.work(ctx)
        for way in self.ways(work):
            try:
                if way.wrong():
                    continue
            except LauncherError:
                continue
            self.taken.way = way
            return True
        return False

    def look_ahead(self, ctx: Context) -> None:
        work = self.work(ctx)
        ways = self.ways(work)
        if ctx.settings.flag("SKIP_SYNC"):
            backend.proven(work, ways, ahead=True)
            return
        refuse(backend.obstacles(ways))

    def do(self, ctx: Context) -> None:
        work = self.work(ctx)
        ways = self.ways(work)
        if not ctx.settings.flag("SKIP_SYNC"):
            self.taken.way = backend.bring(work, ways)
            ctx.record.event(self.key, "brought", way=self.taken.way.name)
            return
        ctx.console.say("  SKIP_SYNC=1: nothing is brought; what is there is proven")
        self.taken.way = backend.proven(work, ways)
