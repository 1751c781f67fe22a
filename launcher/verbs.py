"""What each verb does; cli.py finds the verb and its arguments."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Collection, Sequence

from launcher import lock, rehearsal
from launcher.app import PAIR, REHEARSAL, App
from launcher.clock import span
from launcher.errors import LauncherError
from launcher.packing import run as packer
from launcher.packing.words import PACK, PREPARE, What
from launcher.pair import aftermath
from launcher.record import Record
from launcher.settings import pair_rules
from launcher.settings.values import Settings
from launcher.smoke import run as smoking
from launcher.smoke.chat import QUESTION, TOKENS, user
from launcher.smoke.target import target
from launcher.standing import Report, standing
from launcher.steps import runner
from launcher.steps.base import ROLES, Context, Step
from launcher.steps.download import LOCK as DOWNLOAD_LOCK
from launcher.steps.launch import GRACE, LAUNCH, stop_all
from launcher.steps.ready import api_of

PROBE_TIME = 20.0  # seconds for the token of ``status --probe``


def rehearse(app: App, args: argparse.Namespace) -> int:
    return _up(app, "rehearse", REHEARSAL, args)


def start(app: App, args: argparse.Namespace) -> int:
    return _up(app, "start", PAIR, args)


def _up(app: App, verb: str, name: str, args: argparse.Namespace) -> int:
    with lock.hold(app.lock, verb):
        _only(app, name)
        ctx, steps = _built(app, name, args)
        _bring_up(app, verb, ctx, steps)
    return _follow_if_asked(ctx)


def restart(app: App, args: argparse.Namespace) -> int:
    with lock.hold(app.lock, "restart"):
        recorded = app.store.load().deployment
        if recorded is None:
            raise LauncherError(
                "no deployment is recorded: there is nothing to restart",
                "a deployment that was started",
                "./start.sh for two Sparks, ./start.sh rehearse on this machine alone",
            )
        app.runtime(recorded.name)
        ctx, steps = _built(app, recorded.name, args)
        _bring_up(app, "restart", ctx, steps, anew=(LAUNCH,))  # which ends the old ranks
    return _follow_if_asked(ctx)


def stop(app: App, args: argparse.Namespace) -> int:
    with lock.hold(app.lock, "stop"):
        recorded = app.store.load().deployment
        left = aftermath.Unrecorded() if recorded else aftermath.left_behind(app)
        name = recorded.name if recorded else PAIR if left.there else REHEARSAL
        began = time.monotonic()
        grace = aftermath.GRACE if name == PAIR else GRACE
        before = stop_all(
            app.store, app.runtime(name), app.open_run(must=False), app.console, grace
        )
        if any(rank.running for rank in before):
            if recorded is not None:
                aftermath.settle(app, recorded)
            app.console.say(f"the {name} is stopped ({span(time.monotonic() - began)})", "good")
        elif recorded or left.there:
            app.console.say(f"nothing of the {name} ran")
        else:  # whose user asks is not known: both are told of
            nothing = "no deployment is recorded; nothing of the rehearsal ran"
            app.console.say(f"{nothing}; {left.told()}")
    return 0


def doctor(app: App, args: argparse.Namespace) -> int:
    from launcher.pair import look  # Docker's and paramiko's libraries are for two nodes only

    return look.doctor(app, app.settings(args.set, deployment=PAIR))


def tune(app: App, args: argparse.Namespace) -> int:
    """The kernels' launch table for this pair's GPUs. A start waits for its end, and it for one."""
    with lock.hold(app.lock, "tune"):
        from launcher.pair.tuning import tuning  # Docker's and paramiko's libraries

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


def _say_next(app: App, args: argparse.Namespace) -> None:
    up = "./start.sh rehearse" if args.rehearsal else "./start.sh"
    app.console.say(f"next: {up} uses them by itself; ranks that serve are started anew")


def _write(app: App, args: argparse.Namespace, what: What) -> Settings:
    """Both ranks' files of one kind; the two kinds lie in one directory, so one at a time."""
    with lock.hold(app.logs / "pack.lock", what.verb):
        name = REHEARSAL if args.rehearsal else PAIR
        settings = app.settings(args.set, deployment=name)
        record = app.open_run()
        if args.rehearsal:
            jobs = rehearsal.packers(app, settings, what)
            again = f"./start.sh {what.verb} --rehearsal"
        else:
            from launcher.pair import packing  # Docker's and paramiko's libraries

            jobs, again = packing.jobs(app, settings, record, what), f"./start.sh {what.verb}"
        try:
            packer.pack(jobs, args.verify, app.console, record, again, what)
        except LauncherError as error:
            error.log = error.log or record.folder / "log.txt"
            raise
    return settings


def share(app: App, args: argparse.Namespace) -> int:
    from launcher.pair import weights  # Docker's and paramiko's libraries

    return weights.share(app, args)


def plan(app: App, args: argparse.Namespace) -> int:
    from launcher.plan import verb  # the checkpoint's formats are for this verb only

    return verb.plan(app, args)


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


def soak(app: App, args: argparse.Namespace) -> int:
    from launcher.soak import verb

    return verb.soak(app, args)


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


def download(app: App, args: argparse.Namespace) -> int:
    """The weights on this head, beside whatever serves. The worker is not contacted."""
    from launcher.pair import download as downloading  # Docker's library
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


def _built(app: App, name: str, args: argparse.Namespace) -> tuple[Context, Sequence[Step]]:
    """The context and the steps of a deployment; nothing is touched yet."""
    settings = app.settings(args.set, deployment=name)
    if name == PAIR:
        from launcher.pair.build import build

        pair_rules.require(settings)
        return build(app, settings, app.open_run())
    return app.build(app, settings, app.open_run())


def _only(app: App, name: str) -> None:
    """Refuse while another deployment is recorded: never both at once."""
    recorded = app.store.load().deployment
    if recorded is not None and recorded.name != name:
        raise LauncherError(
            f"the {recorded.name} is recorded as up (launch {recorded.launch_id})",
            f"no other deployment beside the {name}",
            "./start.sh stop, then run this again",
        )


def _bring_up(
    app: App, verb: str, ctx: Context, steps: Sequence[Step], anew: Collection[str] = ()
) -> None:
    began = time.monotonic()
    ctx.record.event("launcher", "began", verb=verb)
    app.console.say(f"{verb}: record in {_short(app, ctx.record)}")
    did = runner.run(steps, ctx, anew=anew)
    ctx.record.event("launcher", "ended", verb=verb, did=did)
    api = api_of(ctx)
    model = ctx.settings.text("SERVED_MODEL_NAME")
    if LAUNCH in did:
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


def running_on(app: App) -> list[str]:
    """Roles whose rank runs now, for the words after Ctrl-C."""
    runtime = app.runtime(app.recorded_name())
    return [role for role in ROLES if runtime.inspect(role).running]
