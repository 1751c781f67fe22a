"""The step that looks at both nodes before anything is touched, and tells all that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from launcher import survey
from launcher.deployment import Role
from launcher.findings import refuse, stopping, warnings
from launcher.pair import look
from launcher.steps.base import PREFLIGHT, Context, Step, fingerprint


@dataclass
class Sight:
    """What the preflight of this run saw; the plan is made from it."""

    seen: look.Seen | None = None


@dataclass(frozen=True)
class PairPreflight(Step):
    key: str = PREFLIGHT
    title: str = "preflight (both nodes, the link, memory, disks, files)"
    pair: look.Pair = field(kw_only=True)
    sight: Sight = field(kw_only=True)
    check: Callable[[], None] = field(kw_only=True)  # of the plan that rests on what was seen

    def inputs(self, ctx: Context) -> str:
        return fingerprint({})

    def done(self, ctx: Context) -> bool:
        return False  # a look of the moment

    def do(self, ctx: Context) -> None:
        refuse(look.elsewhere(self.pair))
        since = ctx.console.now()
        ctx.console.progress("asking both nodes", since)
        seen = look.see(self.pair)
        probes = survey.probes(self.pair.head, seen.link) if seen.link is not None else ()
        findings = seen.findings(probes)
        for each in warnings(findings):
            ctx.record.event(self.key, "warning", found=each.found)
            ctx.console.warn(f"{each.found}; needed: {each.needed}; {each.mend}")
        for each in stopping(findings):
            ctx.record.event(self.key, "in the way", found=each.found, topic=each.topic)
        refuse(findings)
        self.sight.seen = seen
        self.check()
        link = seen.link
        assert link is not None  # or a finding says why not
        for name, side in (("head", link.head), ("worker", link.worker)):
            index = "each rail's own" if side.gid_index is None else side.gid_index
            told = f"{'+'.join(side.interfaces)} {side.address}, {'+'.join(side.hcas)}"
            ctx.record.event(self.key, "link", node=name, found=told, gid=index)
            ctx.console.say(f"  {name}: {told}, RoCE v2 GID index {index}")
        self._tell_packs(ctx, seen)

    def _tell_packs(self, ctx: Context, seen: look.Seen) -> None:
        """Where each rank's Engram rows and weights come from."""
        store = ctx.settings.text("ENGRAM_STORE")
        places = {"head": seen.head.paths.packed, "worker": seen.worker.paths.packed}
        roles: tuple[Role, Role] = ("head", "worker")
        for role in roles:
            names = seen.packs(role)
            where = f"{places[role]} ({', '.join(names)})" if names else "the shards"
            if names and store != "file":
                where = f"the shards, not {places[role]}: ENGRAM_STORE={store}"
            ctx.record.event(self.key, "engram rows", node=role, where=where)
            if names:
                ctx.console.say(f"  {role}: Engram rows from {where}")
            weights = places[role] if seen.prepared(role) else "the checkpoint"
            ctx.record.event(self.key, "weights", node=role, where=weights)
            if seen.prepared(role):
                ctx.console.say(f"  {role}: weights from its own file in {weights}")
