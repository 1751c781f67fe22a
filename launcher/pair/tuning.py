"""The tuner of the pair: what must be there, and how it is run."""

from __future__ import annotations

from dataclasses import replace

from launcher.app import App
from launcher.commands.container import Container
from launcher.deployment import Rank, Role
from launcher.errors import LauncherError
from launcher.findings import refuse, stopping
from launcher.pair import look, reach
from launcher.pair.build import place
from launcher.record import Record
from launcher.settings import pair_rules
from launcher.settings.values import Settings
from launcher.tuning import run, table
from launcher.tuning.run import Tuning

# What a tuner does not need (the link's cards, memory, ports, weights) does not stop it.
TOPICS = ("ssh", "node", "docker", "image", "gpu")


def tuning(app: App, settings: Settings, record: Record) -> Tuning:
    """Asks both nodes; raises LauncherError with all that is missing, and where a rank runs."""
    pair_rules.require(settings)
    pair = look.Pair.of(app, settings)
    refuse(look.elsewhere(pair))
    busy = [role for role in ("head", "worker") if app.runtime("pair").inspect(role).running]
    if busy:
        raise LauncherError(
            f"the {' and the '.join(busy)} run{'s' if len(busy) == 1 else ''} a rank",
            "a GPU with nothing else on it: what is measured beside a server is not the kernels'",
            "./start.sh stop, then ./start.sh tune",
        )
    since = app.console.now()
    app.console.progress("asking both nodes", since)
    seen = look.see(pair)
    refuse([each for each in stopping(seen.findings()) if each.topic in TOPICS])
    roles: tuple[Role, Role] = ("head", "worker")
    found = {"head": seen.head, "worker": seen.worker}
    places = {role: place(settings, role, found[role]) for role in roles}

    def describe(rank: Rank) -> Container:
        return run.tuner(rank, settings, places[rank.role], pair.at.owner)

    at = replace(pair.at, head=run.name_of(settings))
    return Tuning(
        runtime=reach.runtime(
            at, app.logs / "tune", describe, label=run.TUNER, ssh_folder=app.logs
        ),
        nodes={"head": pair.head, "worker": pair.worker},
        paths={role: table.path(places[role].cache_root) for role in roles},
        record=record,
        console=app.console,
    )
