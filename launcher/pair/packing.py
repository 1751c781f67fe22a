"""The packers of the pair: what must be there on both nodes, and how each is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher.app import App
from launcher.commands.container import Container
from launcher.deployment import Rank, Role
from launcher.findings import Finding, refuse, stopping
from launcher.packing import container
from launcher.packing.container import ContainerJob, name_of
from launcher.packing.run import Job
from launcher.packing.words import PACK, What
from launcher.pair import look, reach
from launcher.pair import weights as sharing
from launcher.pair.build import place
from launcher.preflight.weights import BOTH, engram_sources
from launcher.record import Record
from launcher.settings import pair_rules
from launcher.settings.values import Settings

# What a packer does not need (the GPU, the link, memory, ports) does not stop it.
TOPICS = ("ssh", "node", "docker", "image")


def jobs(app: App, settings: Settings, record: Record, what: What = PACK) -> Sequence[Job]:
    """The packers of both ranks. Asks both nodes; raises LauncherError with all that is missing."""
    pair_rules.require(settings)
    pair = look.Pair.of(app, settings)
    if wrong := look.elsewhere(pair):
        hint = f"; the rehearsal's are made by ./start.sh {what.verb} --rehearsal"
        refuse([replace(each, mend=each.mend + hint) for each in wrong])
    since = app.console.now()
    app.console.progress("asking both nodes", since)
    seen = look.see(pair)
    refuse(obstacles(seen, what))
    found = {"head": seen.head, "worker": seen.worker}
    roles: tuple[Role, Role] = ("head", "worker")
    places = {role: place(settings, role, found[role]) for role in roles}
    known, places["head"] = sharing.of_head(app, settings, record, places["head"])
    of = sharing.work(app, pair, seen, settings, record, places["head"], places["worker"], known)
    way = sharing.ready(of)
    places["worker"] = replace(places["worker"], volumes=way.mounts().volumes)

    def describe(rank: Rank) -> Container:
        return container.packer(rank, settings, places[rank.role], pair.at.owner, what)

    logs = app.logs / what.verb
    names = {role: name_of(settings, role, what) for role in roles}
    at = replace(pair.at, head=names["head"], worker=names["worker"])
    runtime = reach.runtime(at, logs, describe, label=container.PACKER, ssh_folder=app.logs)
    return [
        ContainerJob(role, rank, runtime, places[role], what=what)
        for rank, role in enumerate(roles)
    ]


def obstacles(seen: look.Seen, what: What = PACK) -> list[Finding]:
    # Packing brings no image: the start does, or did.
    strict = replace(seen, given=replace(seen.given, image_needed=("head", "worker")))
    wrong = [each for each in stopping(strict.findings()) if each.topic in TOPICS]
    if what.source == "model":  # brought, or found missing, by the weights step
        return wrong
    worker = "worker" in seen.given.weights_needed
    return wrong or engram_sources(seen.head, seen.worker, BOTH if worker else ("head",))
