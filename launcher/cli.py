"""``./start.sh VERB …``: finds the verb, runs it, turns its end into words and an exit status."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from launcher import file_errors
from launcher.app import PAIR, App, Builder, rehearsal
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.record import Secrets

ROOT = Path(__file__).resolve().parents[1]
REHEARSE = "./start.sh rehearse"
DAY = 86400.0  # seconds

# What it is for, and the module of launcher.verbs that has it.
VERBS: Mapping[str, tuple[str, str]] = {
    "rehearse": ("serve a tiny V4.1 from two ranks on this machine, no GPU", "up"),
    "start": ("serve from two Sparks; the verb when none is given", "up"),
    "doctor": ("look at both Sparks and the link between them; changes nothing", "look"),
    "plan": ("will it fit: memory of this pair, or of other machines", "look"),
    "download": ("fetch the weights onto this head, also while a model serves", "weights"),
    "share": ("export the weights to the worker by NFS, beside whatever serves", "weights"),
    "pack": ("write each rank's Engram rows into files that are read faster", "weights"),
    "prepare": ("write each rank's share of the weights into a file of its own", "weights"),
    "tune": ("measure the kernels' launches on this pair's GPU, once, some minutes", "look"),
    "status": ("how the deployment stands: 0 serving, 4 starting, 3 half up, 1 down", "state"),
    "smoke": ("try a running server: chat, tools, Responses, Messages, many at once", "look"),
    "soak": ("one prompt of full length while both nodes' memory is watched", "look"),
    "logs": ("follow the log of a rank; Ctrl-C only detaches", "state"),
    "restart": ("check the settings, then stop and start the deployment", "up"),
    "stop": ("end both ranks", "stop"),
    "config": ("the settings in force, with --explain or --json", ""),
    "test": ("run the tests", ""),
    "help": ("this text", ""),
}
WITH_SETTINGS = {
    "rehearse", "start", "doctor", "plan", "download", "share", "pack", "prepare", "tune",
    "restart", "config",
}  # fmt: skip


class Interrupted(KeyboardInterrupt):
    """A signal other than Ctrl-C that ends the launcher in the same orderly way."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(
    argv: Sequence[str],
    *,
    root: Path = ROOT,
    environ: Mapping[str, str] | None = None,
    build: Builder = rehearsal,
) -> int:
    """Run one verb; the exit status. ``build`` makes the rehearsal's context and steps."""
    secrets = Secrets()
    console = Console(hide=secrets.hide)
    app = App(
        root,
        os.environ if environ is None else environ,
        console,
        secrets,
        build,
    )
    verb, rest = (argv[0], list(argv[1:])) if argv else ("start", [])
    if verb == "--set":  # the settings of the verb that need not be given
        verb, rest = "start", list(argv)
    if verb in ("-h", "--help"):
        verb = "help"
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        console.error(f"{verb!r} is not a verb{hint}")
        print(usage(), file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _interrupt)
    try:
        return _run(app, verb, rest)
    except LauncherError as error:
        console.error(str(error))
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        _say_interrupted(app, verb)
        return 128 + (interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT)
    except BrokenPipeError:
        # The reader of our output left (| head). Nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        app.console.error(str(file_errors.told(error, root, app.last.settings, app.last.log)))
        return 1
    except SystemExit as end:  # argparse has said what it wanted to
        return end.code if isinstance(end.code, int) else 1
    except Exception:
        console.error(
            "a fault in the launcher itself; please report these lines:\n"
            + traceback.format_exc().rstrip()
        )
        return 70


def usage() -> str:
    rows = "\n".join(f"  {verb:<9} {told}" for verb, (told, _) in VERBS.items())
    return (
        "usage: ./start.sh [VERB] [OPTIONS]\n\n"
        f"{rows}\n\n"
        "./start.sh VERB --help shows the options of a verb. start, rehearse, download, share,\n"
        "pack, prepare, restart, doctor, plan and config take --set KEY=VALUE … : settings for\n"
        "this run, above .env's."
    )


def _run(app: App, verb: str, rest: list[str]) -> int:
    if verb == "help":
        app.console.plain(usage())
        return 0
    if verb == "test":
        from launcher import testing

        return testing.run(rest, root=app.root, environ=app.environ)
    args = parser(verb).parse_args(rest)
    if verb == "config":
        from launcher.settings import cli_config

        return cli_config.run(args)
    return function(verb)(app, args)


def function(verb: str) -> Callable[[App, argparse.Namespace], int]:
    """What runs the verb."""
    module = importlib.import_module(f"launcher.verbs.{VERBS[verb][1]}")
    found: Callable[[App, argparse.Namespace], int] = getattr(module, verb)
    return found


def parser(verb: str) -> argparse.ArgumentParser:
    told = VERBS[verb][0]
    made = argparse.ArgumentParser(prog=f"./start.sh {verb}", description=told, allow_abbrev=False)
    if verb in WITH_SETTINGS:
        made.add_argument(
            "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
            help="settings for this run, above those of .env",
        )  # fmt: skip
    if verb == "config":
        from launcher.settings import cli_config

        cli_config.add_arguments(made)
    if verb == "pack":
        made.add_argument(
            "--verify", action="store_true", help="compare every row with the shards; writes none"
        )
        made.add_argument("--rehearsal", action="store_true", help="the rehearsal's tables")
    if verb == "prepare":
        made.add_argument(
            "--verify", action="store_true", help="compare every byte with the checkpoint"
        )
        made.add_argument("--rehearsal", action="store_true", help="the rehearsal's checkpoint")
    if verb == "download":
        made.add_argument(
            "--update", action="store_true", help="settle on the repositories' newest commits"
        )
        made.add_argument("--verify", action="store_true", help="make every checksum anew")
    if verb == "plan":
        from launcher.plan import verb as planning

        planning.add_arguments(made)
    if verb == "status":
        made.add_argument("--json", action="store_true", help="all that is known, as JSON")
        made.add_argument("--probe", action="store_true", help="also generate one token")
    if verb == "smoke":
        from launcher.smoke.server import TIMEOUT

        made.add_argument(
            "--url", metavar="http://HOST:PORT",
            help="any server, its key in the environment as VLLM_API_KEY; otherwise what"
            " ./start.sh status shows",
        )  # fmt: skip
        made.add_argument("--model", metavar="NAME", help="otherwise the server's own (its first)")
        made.add_argument("--short", action="store_true", help="models, chat and stream only")
        made.add_argument("--answer", action="store_true", help="also demand 17*19=323, twice")
        made.add_argument(
            "--timeout", type=_seconds, default=TIMEOUT, metavar="SECONDS",
            help="for each request (%(default)g)",
        )  # fmt: skip
    if verb == "soak":
        from launcher.soak import verb as soaking

        soaking.add_arguments(made)
    if verb == "logs":
        made.add_argument("role", nargs="?", choices=("head", "worker"), default="head")
        made.add_argument("-n", dest="lines", type=_count, default=100, help="lines to begin with")
        made.add_argument("--no-follow", action="store_true", help="end after those lines")
    return made


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= DAY:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from above 0 to a day")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


def _say_interrupted(app: App, verb: str) -> None:
    """What runs on, and the next command."""
    if verb == "logs":
        return
    if verb in ("smoke", "soak"):
        app.console.warn("broken off; it only asked, so nothing of the server has changed")
        return
    if verb == "pack":
        app.console.warn("broken off; what is packed is kept. Next: ./start.sh pack goes on")
        return
    if verb == "prepare":
        app.console.warn("broken off; what is written is kept. Next: ./start.sh prepare goes on")
        return
    if verb == "tune":
        app.console.warn("broken off; both nodes have the launch table that they had")
        return
    if verb == "download":
        app.console.warn("broken off; whole files are kept. Next: ./start.sh download goes on")
        return
    from launcher.verbs.state import running_on

    with contextlib.suppress(LauncherError, OSError):
        left = running_on(app)
        again = "./start.sh" if app.recorded_name() == PAIR or verb == "start" else REHEARSE
        if left:
            app.console.warn(
                f"broken off; the {' and the '.join(left)} run{'s' if len(left) == 1 else ''} on."
                f" Next: ./start.sh status; {again} goes on where this stopped;"
                " ./start.sh stop ends them"
            )
        elif verb in ("rehearse", "start", "restart"):
            app.console.warn(f"broken off; no rank runs. Next: {again} goes on where this stopped")
        else:
            app.console.warn(f"broken off. Next: ./start.sh {verb} again")
