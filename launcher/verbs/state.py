"""``status`` and ``logs``: what was started is looked at and followed."""

from __future__ import annotations

import argparse
import json
import time

from launcher.app import App
from launcher.clock import span
from launcher.errors import LauncherError
from launcher.standing import Report, standing
from launcher.steps.base import ROLES

PROBE_TIME = 20.0  # seconds for the token of ``status --probe``


def status(app: App, args: argparse.Namespace) -> int:
    report = standing(app, PROBE_TIME if args.probe else None)
    if args.json:
        app.console.plain(json.dumps(report.as_json(), indent=1))
    else:
        _tell(app, report)
    return report.code


def _tell(app: App, report: Report) -> None:
    kind = {0: "good", 4: "info"}.get(report.code, "warning")
    app.console.say(report.headline, kind)
    for rank in report.ranks:
        text = rank.ending()
        if rank.running and rank.since is not None:
            how = "is paused" if rank.paused else "runs"
            text = f"{how}, pid {rank.pid}, for {span(max(0.0, time.time() - rank.since))}"
        where = str(rank.log)
        if report.deployment is not None and report.deployment.reach and rank.running:
            where = f"./start.sh logs {rank.role}"
        app.console.say(f"  {rank.role:<7} {text}  ({where})")
        if report.code == 3 and not rank.running:
            for line in rank.last_lines:
                app.console.say(f"    {line}")
    for line in report.hints:
        app.console.say(line)


def logs(app: App, args: argparse.Namespace) -> int:
    runtime = app.runtime(app.recorded_name())
    if runtime.inspect(args.role).state == "absent" and not runtime.log_path(args.role).exists():
        raise LauncherError(
            f"there is no log of the {args.role}: {runtime.log_path(args.role)}",
            "a rank that was started",
            "./start.sh for two Sparks, ./start.sh rehearse on this machine alone",
        )
    if args.no_follow:
        runtime.tail(args.role, args.lines, app.console.plain)
        return 0
    try:
        runtime.follow(args.role, args.lines, app.console.plain)
    except KeyboardInterrupt:
        app.console.say(f"no longer following; the {args.role} runs on")
        raise
    app.console.say(f"the {args.role} {runtime.inspect(args.role).ending()}")
    return 0


def running_on(app: App) -> list[str]:
    """Roles whose rank runs now, for the words after Ctrl-C."""
    runtime = app.runtime(app.recorded_name())
    return [role for role in ROLES if runtime.inspect(role).running]
