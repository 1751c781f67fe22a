"""The verb ``plan``: its options, and which plan they ask for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import launcher.plan.overlay  # noqa: F401  (before spark_overlay)
from launcher.app import PAIR, App
from launcher.errors import LauncherError, UsageError
from launcher.plan import others, pair, source
from launcher.plan.asked import asked
from launcher.plan.machines import MACHINES, OLDEST, Machine, capability
from launcher.settings.values import Settings
from spark_overlay.budget.node import Asked

MOST_GPUS = 64
MOST_MEMORY = 4096.0  # GiB
SHOWN_GPUS = range(1, 9)  # where their number is not given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine", choices=MACHINES, metavar="NAME",
        help=f"instead of this pair, of: {', '.join(MACHINES)}",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", type=_gpus, metavar="N", help="how many, of --machine or --memory"
    )
    parser.add_argument("--memory", type=_memory, metavar="GiB", help="of one GPU")
    parser.add_argument("--arch", type=_arch, metavar="sm80", help="its architecture")
    parser.add_argument(
        "--layers", type=_layers, default=(), metavar="14,14,12",
        help="layers of each pipeline stage, instead of the best ones",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, metavar="DIR", help="otherwise MODEL_HOST")
    which.add_argument("--published", action="store_true", help="the published checkpoint")
    parser.add_argument("--json", action="store_true", help="as JSON")


def plan(app: App, args: argparse.Namespace) -> int:
    """0 where it fits, 1 where it does not."""
    settings = app.settings(args.set, deployment=PAIR)
    found = chosen(args, settings)
    try:
        question = asked(settings, found)
        if all(
            value in (None, ())
            for value in (args.machine, args.gpus, args.memory, args.arch, args.layers)
        ):
            return _pair(app, args.json, found, question)
        return _others(app, args, found, question)
    except ValueError as error:
        if isinstance(error, LauncherError):
            raise
        raise LauncherError(
            str(error),
            "a checkpoint, settings and stages that go together",
            "change what the first line names; ./start.sh config --explain shows each origin",
        ) from None


def chosen(args: argparse.Namespace, settings: Settings) -> source.Source:
    if args.published:
        return source.published()
    if args.model is not None:
        return source.of_directory(args.model)
    return source.of_settings(settings.path("MODEL_HOST"))


def _pair(app: App, as_json: bool, found: source.Source, question: Asked) -> int:
    made = pair.plan_pair(found, question)
    if as_json:
        app.console.plain(json.dumps(pair.as_json(made), indent=1))
    else:
        for line in pair.tell(made):
            app.console.plain(line)
    return 0 if made.fits else 1


def _others(app: App, args: argparse.Namespace, found: source.Source, question: Asked) -> int:
    machine = _machine(args)
    stages: tuple[int, ...] = args.layers
    if stages and (args.gpus is None or args.gpus % len(stages)):
        raise UsageError(
            f"--layers with {len(stages)} stages and --gpus {args.gpus or 'not given'}",
            "GPUs that the stages can share evenly",
            f"./start.sh plan --gpus {2 * len(stages)} --layers {','.join(map(str, stages))} …",
        )
    numbers = SHOWN_GPUS if args.gpus is None else [args.gpus]
    every = {n: others.plan_machine(found, machine, n, question, stages) for n in numbers}
    _tell(app, args, found, machine, every)
    return 0 if any(way.runs for ways in every.values() for way in ways) else 1


def _tell(
    app: App,
    args: argparse.Namespace,
    found: source.Source,
    machine: Machine,
    every: Mapping[int, list[others.Way]],
) -> None:
    if args.json:
        plans = [others.as_json(found, machine, n, ways) for n, ways in every.items()]
        app.console.plain(json.dumps(plans[0] if args.gpus else plans, indent=1))
        return
    if args.gpus:
        lines = others.tell(found, machine, args.gpus, every[args.gpus])
    else:
        lines = others.tell_all(found, machine, every)
    for line in lines:
        app.console.plain(line)


def _machine(args: argparse.Namespace) -> Machine:
    known = MACHINES.get(args.machine or "")
    if known is None and args.memory is None:
        raise UsageError(
            "a plan for other GPUs without their memory",
            "--machine NAME, or --memory GiB",
            f"known machines: {', '.join(MACHINES)}",
        )
    memory = args.memory if args.memory is not None else (known.memory if known else 0.0)
    arch = args.arch or (known.arch if known else "sm80")
    return Machine(known.name if known else "GPU", memory, arch, bool(known and known.unified))


def _gpus(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) < 4 and 1 <= int(text) <= MOST_GPUS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST_GPUS}")


def _memory(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0 < value <= MOST_MEMORY:  # a NaN is neither
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not GiB from above 0 to {MOST_MEMORY:g}")


def _arch(text: str) -> str:
    number = capability(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no architecture; say sm80, sm90, sm121 …")
    if number < OLDEST:
        raise argparse.ArgumentTypeError(f"{text!r}: the kernels need sm{OLDEST} or newer")
    return f"sm{number}"


def _layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if all(part.isascii() and part.isdecimal() and len(part) < 4 for part in parts):
        return tuple(map(int, parts))
    raise argparse.ArgumentTypeError(f"{text!r} is not numbers of layers with commas between them")
