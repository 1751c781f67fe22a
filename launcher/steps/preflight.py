"""The step that looks before anything is touched, and tells all that is wrong at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher import ports, processes
from launcher.findings import Finding, refuse
from launcher.steps.base import ROLES, Context, Step, fingerprint

MEMORY_BYTES = 6 << 30  # two ranks of the rehearsal take some 4.5 GiB
DISK_BYTES = 1 << 30

__all__ = ["Finding", "Preflight", "port", "refuse"]


@dataclass(frozen=True)
class Preflight(Step):
    key: str = "preflight"
    title: str = "preflight (port, memory, disk)"
    disk: Path = Path()  # where the deployment writes
    memory: int = MEMORY_BYTES

    def inputs(self, ctx: Context) -> str:
        return fingerprint({"port": ctx.settings.int("PORT"), "bind": ctx.settings.text("BIND")})

    def done(self, ctx: Context) -> bool:
        return False  # a look of the moment

    def do(self, ctx: Context) -> None:
        refuse([*port(ctx), *self._memory(ctx), *self._disk(ctx)])

    def _memory(self, ctx: Context) -> list[Finding]:
        if any(ctx.runtime.inspect(role).running for role in ROLES):
            return []  # our own ranks hold it now, and are kept or ended first
        free = ctx.node.facts().memory_available
        if free >= self.memory:
            return []
        return [
            Finding(
                f"{free / 2**30:.1f} GiB of memory available",
                f"{self.memory / 2**30:.1f} GiB for two ranks",
                "end other programs; free -h and ps aux --sort=-rss | head show which are large",
            )
        ]

    def _disk(self, ctx: Context) -> list[Finding]:
        found = []
        for path in (self.disk, ctx.logs):
            free = ctx.node.free_bytes(path)
            if free < DISK_BYTES:
                found.append(
                    Finding(
                        f"{free / 2**30:.2f} GiB free at {path}",
                        f"{DISK_BYTES / 2**30:.0f} GiB for the checkpoint, caches and logs",
                        "free some space there",
                    )
                )
        return found


def port(ctx: Context) -> list[Finding]:
    """The API's port, unless it is our own rank that holds it."""
    host, number = ctx.settings.text("BIND"), ctx.settings.int("PORT")
    why = ports.taken(host, number)
    if why is None:
        return []
    who = ports.holders(number)
    ours = {status.pid for role in ROLES if (status := ctx.runtime.inspect(role)).running}
    foreign = [each for each in who if _session(each.pid) not in ours]
    if who and not foreign:
        return []
    names = " and ".join(str(each) for each in foreign)
    found = f"port {number} on {host} {why}" + (f" by {names}" if names else "")
    mend = "end that process, or set another PORT in .env (for one run: --set PORT=…)"
    if not who:
        mend = "set BIND to an address of this machine and PORT to one this user may open"
    return [Finding(found, f"port {number} free for the API", mend)]


def _session(pid: int | None) -> int | None:
    """A rank's processes share a session that carries its first pid as number."""
    process = None if pid is None else processes.find(pid)
    return None if process is None else process.session
