"""``start``, ``rehearse`` and ``restart``: from the settings to ranks that serve."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Collection, Sequence

from launcher import lock
from launcher.app import PAIR, REHEARSAL, App
from launcher.clock import span
from launcher.errors import LauncherError
from launcher.record import Record
from launcher.smoke.chat import QUESTION, TOKENS, user
from launcher.steps import runner
from launcher.steps.base import Context, Step
from launcher.steps.launch import LAUNCH
from launcher.steps.ready import api_of


def start(app: App, args: argparse.Namespace) -> int:
    return _up(app, "start", PAIR, args)


def rehearse(app: App, args: argparse.Namespace) -> int:
    return _up(app, "rehearse", REHEARSAL, args)


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


def _built(app: App, name: str, args: argparse.Namespace) -> tuple[Context, Sequence[Step]]:
    """The context and the steps of a deployment; nothing is touched yet."""
    settings = app.settings(args.set, deployment=name)
    if name == PAIR:
        from launcher.settings import pair_rules

        pair_rules.require(settings)
        from launcher.pair.build import build

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
