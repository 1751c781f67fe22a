"""What each verb does; cli.py finds the verb and its arguments."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence

from launcher import lock, rehearsal
from launcher.app import App
from launcher.clock import span
from launcher.errors import LauncherError, UsageError
from launcher.record import Record
from launcher.smoke import run as smoking
from launcher.smoke.chat import QUESTION, TOKENS, user
from launcher.smoke.target import target
from launcher.standing import Report, standing
from launcher.steps import runner
from launcher.steps.base import ROLES, Context, Step
from launcher.steps.launch import stop_all
from launcher.steps.preflight import Preflight
from launcher.steps.ready import api_of

PROBE_TIME = 20.0  # seconds for the token of ``status --probe``


def rehearse(app: App, args: argparse.Namespace) -> int:
    with lock.hold(app.lock, "rehearse"):
        settings = app.settings(args.set)
        _only(app, rehearsal.NAME)
        record = app.open_run()
        ctx, steps = app.build(app, settings, record)
        _bring_up(app, "rehearse", ctx, steps)
    return _follow_if_asked(ctx)


def restart(app: App, args: argparse.Namespace) -> int:
    with lock.hold(app.lock, "restart"):
        recorded = app.store.load().deployment
        if recorded is None:
            raise LauncherError(
                "no deployment is recorded: there is nothing to restart",
                "a deployment that was started",
                "./start.sh rehearse",
            )
        app.runtime(recorded.name)
        # All that can be refused is refused while the old ranks still serve.
        settings = app.settings(args.set)
        record = app.open_run()
        ctx, steps = app.build(app, settings, record)
        ctx.plan("any", 1)
        for step in steps:
            if isinstance(step, Preflight):
                step.do(ctx)
        stop_all(ctx.store, ctx.runtime, record, app.console)
        _bring_up(app, "restart", ctx, steps)
    return _follow_if_asked(ctx)


def stop(app: App, args: argparse.Namespace) -> int:
    with lock.hold(app.lock, "stop"):
        recorded = app.store.load().deployment
        name = rehearsal.NAME if recorded is None else recorded.name
        runtime = app.runtime(name)
        began = time.monotonic()
        before = stop_all(app.store, runtime, app.open_run(), app.console)
        if any(rank.running for rank in before):
            app.console.say(f"the {name} is stopped ({span(time.monotonic() - began)})", "good")
        else:
            app.console.say(f"nothing of the {name} ran")
    return 0


def status(app: App, args: argparse.Namespace) -> int:
    report = standing(app, PROBE_TIME if args.probe else None)
    if args.json:
        app.console.plain(json.dumps(report.as_json(), indent=1))
    else:
        _tell(app, report)
    return report.code


def smoke(app: App, args: argparse.Namespace) -> int:
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


def logs(app: App, args: argparse.Namespace) -> int:
    recorded = app.store.load().deployment
    runtime = app.runtime(rehearsal.NAME if recorded is None else recorded.name)
    path = runtime.log_path(args.role)
    if not path.exists():
        raise LauncherError(
            f"there is no log of the {args.role}: {path}",
            "a rank that was started",
            "./start.sh rehearse",
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


def start(app: App, args: argparse.Namespace) -> int:
    raise UsageError(
        "starting the pair of two Sparks is not built yet",
        "a deployment that this version can start: the rehearsal on this machine",
        "./start.sh rehearse",
    )


def download(app: App, args: argparse.Namespace) -> int:
    raise UsageError(
        "downloading the weights is not built yet",
        "nothing to download: the rehearsal makes its own checkpoint",
        "./start.sh rehearse",
    )


def _only(app: App, name: str) -> None:
    """Refuse while another deployment is recorded: never both at once."""
    recorded = app.store.load().deployment
    if recorded is not None and recorded.name != name:
        raise LauncherError(
            f"the {recorded.name} is recorded as up (launch {recorded.launch_id})",
            f"no other deployment beside the {name}",
            "./start.sh stop, then run this again",
        )


def _bring_up(app: App, verb: str, ctx: Context, steps: Sequence[Step]) -> None:
    began = time.monotonic()
    ctx.record.event("launcher", "began", verb=verb)
    app.console.say(f"{verb}: record in {_short(app, ctx.record)}")
    did = runner.run(steps, ctx)
    ctx.record.event("launcher", "ended", verb=verb, did=did)
    api = api_of(ctx)
    model = ctx.settings.text("SERVED_MODEL_NAME")
    if "launch" in did:
        told = f"the {ctx.name} serves at {api.url} ({span(time.monotonic() - began)})"
    else:
        told = f"the {ctx.name} served already and nothing has changed: {api.url}"
    app.console.say(told, "good")
    app.console.plain(curl(api.url, model, with_key=bool(api.key)))


def curl(url: str, model: str, with_key: bool) -> str:
    """A request to copy. The key is named as a variable, never shown."""
    body = {
        "model": model,
        "messages": [user(QUESTION)],
        "max_tokens": TOKENS,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    words = ["curl", "-s", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    line = shlex.join([*words, "-d", json.dumps(body)])
    return line + (' -H "Authorization: Bearer $VLLM_API_KEY"' if with_key else "")


def _follow_if_asked(ctx: Context) -> int:
    if ctx.settings.flag("TAIL"):
        ctx.runtime.follow("head", 20, ctx.console.plain)
    return 0


def _short(app: App, record: Record) -> str:
    try:
        return str(record.folder.relative_to(app.root))
    except ValueError:
        return str(record.folder)


def _tell(app: App, report: Report) -> None:
    kind = {0: "good", 4: "info"}.get(report.code, "warning")
    app.console.say(report.headline, kind)
    for rank in report.ranks:
        text = rank.ending()
        if rank.running and rank.since is not None:
            text = f"runs, pid {rank.pid}, for {span(max(0.0, time.time() - rank.since))}"
        app.console.say(f"  {rank.role:<7} {text}  ({rank.log})")
        if report.code == 3 and not rank.running:
            for line in rank.last_lines:
                app.console.say(f"    {line}")
    for line in report.hints:
        app.console.say(line)


def running_on(app: App) -> list[str]:
    """Roles whose rank runs now, for the words after Ctrl-C."""
    recorded = app.store.load().deployment
    runtime = app.runtime(rehearsal.NAME if recorded is None else recorded.name)
    return [role for role in ROLES if runtime.inspect(role).running]
