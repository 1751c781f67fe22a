"""Which checks there are, and running them: every one is tried, whatever became of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from launcher.clock import span
from launcher.console import Console
from launcher.smoke import checks
from launcher.smoke.messages import messages
from launcher.smoke.responses import responses
from launcher.smoke.server import Fault, Server


@dataclass(frozen=True)
class Check:
    key: str
    run: Callable[[Server], str]


MODELS = Check("models", checks.models)
CHAT = Check("chat", checks.chat)
STREAM = Check("stream", checks.streaming)

SHORT = (MODELS, CHAT, STREAM)
ALL = (
    MODELS,
    CHAT,
    Check("thinking", checks.thinking),
    STREAM,
    Check("tools", checks.tools),
    Check("responses", responses),
    Check("messages", messages),
    Check("errors", checks.errors),
    Check("crowd", checks.crowd),
)
ANSWER = Check("answer", checks.answer)  # only of a model that can be expected to know it


@dataclass(frozen=True)
class Outcome:
    check: Check
    seconds: float
    told: str  # what a check that passed saw
    fault: Fault | None = None


def tried(
    wanted: Iterable[Check],
    server: Server,
    begin: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """One check after the other, each when its outcome is asked for; ``begin`` is told its key."""
    for check in wanted:
        begin(check.key)
        began = clock()
        try:
            told, fault = check.run(server), None
        except Fault as found:
            told, fault = "", found
        yield Outcome(check, clock() - began, told, fault)


def run(wanted: Sequence[Check], server: Server, console: Console) -> int:
    """Tell every outcome on a line; how many failed."""
    began = console.now()
    failed = 0

    def begin(key: str) -> None:
        console.quiet_from_here()  # without a terminal a check is one line, its outcome
        console.progress(f"{key} …")

    for outcome in tried(wanted, server, begin):
        took = f"{span(outcome.seconds):>11}"
        if outcome.fault is None:
            console.say(f"{outcome.check.key:<10} passed {took}  {outcome.told}", "good")
            continue
        failed += 1
        console.say(f"{outcome.check.key:<10} failed {took}", "error")
        console.say(f"  found:  {outcome.fault.found}\n  needed: {outcome.fault.needed}")
    told = f"{len(wanted) - failed} of {len(wanted)} passed" if failed else "all passed"
    console.say(
        f"smoke: {told} in {span(console.now() - began)}: {server.model} at {server.api.url}",
        "error" if failed else "good",
    )
    return failed
