"""The weights of the pair: which directories of which node, and by which ways they may travel."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher import lock
from launcher.app import PAIR, App
from launcher.commands.container import NodePlace
from launcher.errors import LauncherError
from launcher.findings import refuse, stopping
from launcher.pair import download as downloading
from launcher.pair import look
from launcher.record import Record
from launcher.settings import pair_rules
from launcher.settings.values import Settings
from launcher.weights import backend, manifest, proof, tree
from launcher.weights.backend import Backend, Work
from launcher.weights.manifest import ROLES, Manifest, Role
from launcher.weights.nfs import Nfs
from launcher.weights.rsync import Rsync
from launcher.weights.zfs import Zfs

# Of the preflight: what the sharing itself needs. The GPU, memory and ports are the launch's.
TOPICS = ("ssh", "node", "docker", "link")


def work(
    app: App,
    pair: look.Pair,
    seen: look.Seen,
    settings: Settings,
    record: Record,
    head: NodePlace,
    worker: NodePlace,
    known: Manifest | None = None,
) -> Work:
    """``known``: the manifest, where it is not the one that is kept (or the head's own tree)."""
    link = seen.link
    if link is None:
        raise LauncherError(
            "the link between the nodes was not found", "it, for the address", "./start.sh doctor"
        )
    sources: Mapping[Role, str] = {"model": head.model_dir, "engram": head.engram_dir}
    targets: Mapping[Role, str] = {"model": worker.model_dir, "engram": worker.engram_dir}
    root = Path(head.cache_root)
    return Work(
        settings=settings,
        head=pair.head,
        worker=pair.worker,
        manifest=known or kept(root, sources),
        sources=sources,
        targets=targets,
        address=link.head.address,
        prefix=link.head.prefix,
        owner=pair.at.owner,
        folder=app.root,
        cache_root=root,
        far_cache_root=worker.cache_root,
        console=app.console,
        record=record,
    )


def kept(cache_root: Path, sources: Mapping[Role, str]) -> Manifest:
    """The manifest that the download keeps; a part that it does not have is of the head's tree."""
    found = manifest.load(cache_root / manifest.FILE)
    for role in ROLES:
        if found is None or not found.has(role):
            part = tree.of_tree(role, Path(sources[role]))
            found = found.with_part(part) if found else Manifest((part,))
    assert found is not None
    return found


def of_head(
    app: App, settings: Settings, record: Record, place: NodePlace
) -> tuple[Manifest, NodePlace]:
    """The kept manifest, and the head's directories as they can be exported."""
    held = downloading.Weights()
    job = downloading.job(app, settings, record)
    held.manifest = kept(
        Path(place.cache_root), {"model": place.model_dir, "engram": place.engram_dir}
    )
    for part in held.manifest.parts:
        where = str(job.directories[part.role])
        faults = proof.prove(job.node, where, part, "sizes")
        refuse(proof.findings("head", part.role, where, faults, "./start.sh download brings them"))
    held.directories = downloading.mountable(job, settings, held.manifest)
    return held.manifest, held.placed(place)


def ready(of: Work) -> Backend:
    """The way by which the worker has the files, proven; brought there unless SKIP_SYNC=1."""
    if not of.settings.flag("SKIP_SYNC"):
        return backend.bring(of, ways(of))
    return backend.proven(of, ways(of))


def ways(of: Work) -> Sequence[Backend]:
    """What WEIGHT_SYNC asks for; auto: all, in their order."""
    every: dict[str, Backend] = {"nfs": Nfs(of), "zfs": Zfs(of), "rsync": Rsync(of)}
    asked = of.settings.text("WEIGHT_SYNC")
    if asked == "auto":
        return [every[name] for name in backend.AUTO]
    return [every["nfs" if asked == "share" else asked]]


def share(app: App, args: argparse.Namespace) -> int:
    """The NFS export and the worker's volumes, proven; no rank is touched."""
    from launcher.pair.build import place

    with lock.hold(app.logs / "share.lock", "share"):
        settings = app.settings(args.set, deployment=PAIR)
        pair_rules.require(settings)
        record = app.open_run()
        pair = look.Pair.of(app, settings)
        try:
            refuse(look.elsewhere(pair))
            app.console.progress("asking both nodes", app.console.now())
            seen = look.see(pair)
            strict = replace(seen, given=replace(seen.given, image_needed=("worker",)))
            refuse(
                each
                for each in stopping(strict.findings())
                if each.topic in TOPICS or (each.topic == "image" and "worker" in each.found)
            )
            known, head = of_head(app, settings, record, place(settings, "head", seen.head))
            worker = place(settings, "worker", seen.worker)
            of = work(app, pair, seen, settings, record, head, worker, known)
            backend.bring(of, [Nfs(of)])
        except LauncherError as error:
            error.log = error.log or record.folder / "log.txt"
            raise
    app.console.say("the worker reads the weights through NFS", "good")
    return 0
