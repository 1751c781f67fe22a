"""``./start.sh soak [--tokens N]``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path

from launcher import files, standing
from launcher.app import App
from launcher.errors import LauncherError, UsageError
from launcher.facts import batch
from launcher.facts.base import Missing
from launcher.facts.memory import Memory, MemoryFact
from launcher.http import NoAnswer
from launcher.nodes.base import Node
from launcher.nodes.local import LocalNode
from launcher.pair import aftermath, reach
from launcher.soak import run, series
from launcher.together import together

BELOW = 1000  # tokens that the longest prompt keeps below MAX_MODEL_LEN
GIB = 1 << 30


def add_arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--tokens", type=_count, metavar="N",
        help=f"of the prompt (the server's longest context - {BELOW})",
    )  # fmt: skip
    made.add_argument(
        "--timeout", type=_count, default=7200, metavar="SECONDS",
        help="for the whole prompt (%(default)s)",
    )  # fmt: skip


def soak(app: App, args: argparse.Namespace) -> int:
    """0 when memory holds, tight or not; 1 when it fell short or the prompt failed."""
    recorded = app.store.load().deployment
    if recorded is None:
        raise LauncherError(
            "no deployment is recorded: there is nothing to soak",
            "a server that serves",
            "./start.sh for two Sparks, ./start.sh rehearse on this machine alone",
        )
    api, model = standing.api(app, recorded), recorded.served_model_name
    try:
        length = run.longest(api, model)
        usual = length - min(BELOW, length // 2)
        tokens = args.tokens or usual
        if tokens > length - 1:
            raise UsageError(
                f"--tokens {tokens}: the server's longest context is {length}",
                f"at most {length - 1}, one less for the answer",
                f"leave it out for {usual}",
            )
        ids = run.prompt(api, model, tokens, time.time_ns())
    except (run.Refused, NoAnswer) as fault:
        raise LauncherError(
            f"{api.url} cannot be soaked: {fault}",
            "a server that serves",
            "./start.sh status, then ./start.sh logs",
        ) from fault
    nodes: dict[str, Node] = {"here": LocalNode("here")}
    if recorded.reach:
        nodes = aftermath.nodes_of(reach.Reach.of_record(recorded.reach), app)
    runtime = app.runtime(recorded.name)
    settings = app.settings(deployment=recorded.name, say=lambda line: None)
    floor = int(settings.number("DSV41_MEM_GUARD_GIB") * GIB)
    record, console = app.open_run(must=False), app.console
    since = console.now()
    console.say(f"soak: a prompt of {tokens} tokens to {model} at {api.url}")

    def look() -> Mapping[str, Memory | Missing]:
        found = together(lambda name: batch.one(nodes[name], MemoryFact()), list(nodes))
        return dict(zip(nodes, found, strict=True))

    done = run.soak(
        ids,
        floor,
        run.Means(
            ask=run.ask(api, model, float(args.timeout)),
            look=look,
            lines=lambda: runtime.lines("head"),
            progress=lambda text: console.progress(text, since),
        ),
    )
    return _tell(app, done, record.folder)


def _tell(app: App, done: series.Soak, folder: Path) -> int:
    verdict, report = done.verdict, series.rows(done)
    for row in report:
        app.console.plain(row)
    kind = {"holds": "good", "tight": "warning"}.get(verdict.word, "error")
    app.console.say(f"soak: {verdict.word}: {verdict.why}", kind)
    if verdict.word in ("tight", "falls short"):
        app.console.say(
            "more room: lower MAX_MODEL_LEN, KV_CACHE_MEMORY_BYTES or MAX_NUM_BATCHED_TOKENS,"
            " one at a time; DSV41_INDEXER_PREFILL_FACTOR=1; SPEC_METHOD=none. Then soak again"
        )
    try:
        told = [*report, f"{verdict.word}: {verdict.why}"]
        files.replace(folder / "soak.txt", ("\n".join(told) + "\n").encode())
        files.replace(folder / "soak.json", (json.dumps(series.as_json(done)) + "\n").encode())
        app.console.say(f"written down in {folder / 'soak.txt'} and soak.json")
    except OSError as error:
        app.console.warn(f"not written down: {error}")
    return verdict.code


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
