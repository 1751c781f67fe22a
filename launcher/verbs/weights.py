"""``download``, ``share``, ``pack`` and ``prepare``: the weights, beside whatever serves."""

from __future__ import annotations

import argparse
import time

from launcher import lock
from launcher.app import PAIR, REHEARSAL, App
from launcher.clock import span
from launcher.errors import LauncherError
from launcher.packing.words import PACK, PREPARE, What
from launcher.settings.values import Settings
from launcher.steps.download import LOCK as DOWNLOAD_LOCK


def download(app: App, args: argparse.Namespace) -> int:
    """The weights on this head, beside whatever serves. The worker is not contacted."""
    from launcher.pair import download as downloading
    from launcher.weights.download import bring

    with lock.hold(app.logs / DOWNLOAD_LOCK, "download"):
        settings = app.settings(args.set, deployment=PAIR)
        record = app.open_run()
        job = downloading.job(app, settings, record, fresh=args.verify)
        began = time.monotonic()
        try:
            manifest = bring(job, ask=True, update=args.update)
            downloading.mountable(job, settings, manifest)
        except LauncherError as error:
            error.log = error.log or record.folder / "log.txt"
            raise
    app.console.say(f"the weights are whole and right ({span(time.monotonic() - began)})", "good")
    if app.store.load().deployment is not None:
        app.console.say("what serves now goes on with what it has loaded")
    else:
        app.console.say("next: ./start.sh")
    return 0


def share(app: App, args: argparse.Namespace) -> int:
    from launcher.pair import weights

    return weights.share(app, args)


def pack(app: App, args: argparse.Namespace) -> int:
    """Both ranks' packed Engram files, beside whatever serves."""
    settings = _write(app, args, PACK)
    store = settings.text("ENGRAM_STORE")
    if store != "file":
        app.console.warn(f"ENGRAM_STORE={store} does not use them; file does")
    elif not args.verify:
        _say_next(app, args)
    return 0


def prepare(app: App, args: argparse.Namespace) -> int:
    """Both ranks' prepared weights, beside whatever serves."""
    _write(app, args, PREPARE)
    if not args.verify:
        _say_next(app, args)
    return 0


def _write(app: App, args: argparse.Namespace, what: What) -> Settings:
    """Both ranks' files of one kind; the two kinds lie in one directory, so one at a time."""
    from launcher.packing import run as packer

    with lock.hold(app.logs / "pack.lock", what.verb):
        name = REHEARSAL if args.rehearsal else PAIR
        settings = app.settings(args.set, deployment=name)
        record = app.open_run()
        if args.rehearsal:
            from launcher import rehearsal

            jobs = rehearsal.packers(app, settings, what)
            again = f"./start.sh {what.verb} --rehearsal"
        else:
            from launcher.pair import packing

            jobs, again = packing.jobs(app, settings, record, what), f"./start.sh {what.verb}"
        try:
            packer.pack(jobs, args.verify, app.console, record, again, what)
        except LauncherError as error:
            error.log = error.log or record.folder / "log.txt"
            raise
    return settings


def _say_next(app: App, args: argparse.Namespace) -> None:
    up = "./start.sh rehearse" if args.rehearsal else "./start.sh"
    app.console.say(f"next: {up} uses them by itself; ranks that serve are started anew")
