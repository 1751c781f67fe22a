"""``doctor``, ``plan``, ``tune``, ``smoke`` and ``soak``: what is looked at, tried and measured."""

from __future__ import annotations

import argparse

from launcher import lock
from launcher.app import PAIR, App


def doctor(app: App, args: argparse.Namespace) -> int:
    from launcher.pair import look

    return look.doctor(app, app.settings(args.set, deployment=PAIR))


def plan(app: App, args: argparse.Namespace) -> int:
    from launcher.plan import verb

    return verb.plan(app, args)


def tune(app: App, args: argparse.Namespace) -> int:
    """The kernels' launch table for this pair's GPUs. A start waits for its end, and it for one."""
    with lock.hold(app.lock, "tune"):
        from launcher.pair.tuning import tuning

        record = app.open_run()
        found = tuning(app, app.settings(args.set, deployment=PAIR), record).run()
        if found is None:
            app.console.say(
                "no launch beats the shipped rule on this GPU: both nodes keep it", "good"
            )
        else:
            app.console.say(f"{found}; both nodes have the table {found.digest[:12]}", "good")
            app.console.say("  it serves from the next ./start.sh on")
    return 0


def smoke(app: App, args: argparse.Namespace) -> int:
    from launcher.smoke import run as smoking
    from launcher.smoke.target import target

    found = target(app, args.url, args.model, args.timeout)
    wanted = smoking.SHORT if args.short else smoking.ALL
    if args.answer:
        wanted = (smoking.ANSWER, *wanted)
    if not smoking.run(wanted, found.server, app.console):
        return 0
    if found.log is None:
        app.console.say("next: the log of that server")
    else:
        app.console.say(f"next: ./start.sh status, then ./start.sh logs ({found.log})")
    return 1


def soak(app: App, args: argparse.Namespace) -> int:
    from launcher.soak import verb

    return verb.soak(app, args)
