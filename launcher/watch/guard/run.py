"""The guard's loop: look, decide, act, write down. Clock, looks and files come as arguments."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from launcher.watch.guard.core import Decision, Guard, Sample, gib, largest, state
from launcher.watch.guard.engine import DockerFault
from launcher.watch.guard.target import Target

LOOK = 1.0  # seconds
LOW = 0.5  # … while memory is low
HASTE = 0.25  # … while it is ending
REPORT = 30.0
STEP = 64 << 20  # bytes by which the low water must fall to be written at once
STOPPED = 3  # exit status: the server was stopped
LOST = 60.0  # seconds of looks that failed in a row, after which the guard gives up

Clock = Callable[[], float]


class Notes(Protocol):
    """Where the guard writes."""

    def line(self, text: str) -> None: ...

    def low(self, told: dict[str, Any]) -> None:
        """Replace the low-water file."""
        ...

    def why(self, told: dict[str, Any]) -> None:
        """Replace the file that says why the server was stopped."""
        ...


class Shm(Protocol):
    def used(self, pids: Iterable[int]) -> set[Path]: ...

    def clean(self, left: Iterable[Path]) -> list[Path]: ...


def watch(
    target: Target,
    guard: Guard,
    *,
    look: Callable[[], Sample],
    notes: Notes,
    shm: Shm,
    clock: Clock,
    wall: Clock,
    sleep: Callable[[float], None],
) -> int:
    """Until the server is gone: 0, or 3 if it was the guard who stopped it.

    ``clock`` never goes back, ``wall`` is the time of day; both in seconds.
    """
    reported = noted = clock()
    low: int | None = None
    acted: Decision | None = None
    failing: float | None = None
    left: set[Path] = set()
    while True:
        now = clock()
        try:
            if not target.runs():
                break
            sample = look()
        except (OSError, ValueError) as error:
            failing = now if failing is None else failing
            notes.line(f"/proc could not be read: {error}")
            if now - failing >= LOST:
                notes.line("the guard gives up")
                return 1
            sleep(LOOK)
            continue
        failing = None
        decision = guard.see(sample)
        if decision.text:
            notes.line(decision.text)
        if decision.kind in ("stop", "kill"):
            acted = acted or decision
            with contextlib.suppress(OSError, ValueError):  # short of memory: the stop comes first
                left |= shm.used(target.pids())
            what = target.stop if decision.kind == "stop" else target.kill
            if not _do(what, decision.kind, notes):
                guard.failed(sample.at)
            if decision.kind == "stop":
                notes.why(_why(target, decision, sample, wall()))
        if acted and _headless(target):
            notes.line("its first process has ended: what that left behind is killed")
            _do(target.kill, "kill", notes)
        lowest = guard.lowest
        assert lowest is not None
        if low is None or lowest.available <= low - STEP or now - noted >= REPORT:
            low, noted = lowest.available, now
            notes.low(_low(target, lowest, wall() - (sample.at - lowest.at)))
        if now - reported >= REPORT:
            reported = now
            notes.line(
                f"{state(sample)}; lowest {gib(lowest.available)} GiB; largest: {largest(sample)}"
            )
        sleep(HASTE if acted else LOW if guard.streak else LOOK)
    if guard.lowest is not None:
        notes.low(_low(target, guard.lowest, wall() - (clock() - guard.lowest.at)))
    if acted is None:
        notes.line(f"{target.name} is gone: nothing is left to guard")
        return 0
    cleaned: list[Path] = []
    with contextlib.suppress(OSError):
        cleaned = shm.clean(left)
    also = f"; removed from /dev/shm: {', '.join(p.name for p in cleaned)}" if cleaned else ""
    notes.line(f"{target.name} has ended{also}")
    return STOPPED


def _headless(target: Target) -> bool:
    try:
        return target.headless()
    except (OSError, ValueError):  # not to be told now: the next look asks again
        return False


def _do(what: Callable[[], None], name: str, notes: Notes) -> bool:
    try:
        what()
    except (DockerFault, OSError) as error:
        notes.line(f"the {name} failed: {error}")
        return False
    return True


def _why(target: Target, decision: Decision, sample: Sample, at: float) -> dict[str, Any]:
    grown = decision.growth
    return {
        "stopped": target.name,
        "at": at,
        "why": decision.text,
        "available": sample.available,
        "stalled": sample.full,
        "growth": None if grown is None else {
            "seconds": grown.seconds,
            "taken": grown.taken,
            "server": grown.own,
            "tmpfs": grown.tmpfs,
            "others": [
                {"pid": each.pid, "name": each.name, "bytes": size}
                for each, size in grown.others[:10]
            ],
        },
    }  # fmt: skip


def _low(target: Target, lowest: Sample, at: float) -> dict[str, Any]:
    return {
        "of": target.name,
        "at": at,
        "available": lowest.available,
        "free": lowest.free,
        "page_cache": lowest.cached,
        "swapped_out": lowest.swap_used,
        "stalled": lowest.full,
        "server": lowest.own_size,
        "largest": largest(lowest),
    }


def told(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
