"""Runs the packers of both ranks side by side: what there is to do, space, progress, the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from launcher.clock import span
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.findings import Finding, refuse
from launcher.packing.words import PACK, Plan, Progress, What, both, plan_of, progress, size
from launcher.record import Record

LOOK = 0.5  # seconds between two progress lines
END = 60.0  # seconds for packers to end that were asked to
STEP = "pack"


@dataclass(frozen=True)
class Ended:
    """How a packer ended: its exit status, None where it is not known, and the same in words."""

    status: int | None
    how: str


class Job(Protocol):
    """The packer of one rank, where its files are."""

    @property
    def role(self) -> str: ...

    @property
    def where(self) -> str:
        """The directory of the files, as the node has it."""
        ...

    @property
    def node(self) -> str:
        """Jobs of one node write to one drive."""
        ...

    @property
    def key(self) -> str:
        """The setting that says where the files are."""
        ...

    def run(
        self, extra: Sequence[str], line: Callable[[str], None], stop: threading.Event
    ) -> Ended:
        """Run it with these options to its end; ``stop`` ends it early. Raises LauncherError."""
        ...


@dataclass
class _Run:
    job: Job
    lines: list[str] = field(default_factory=list)
    now: Progress | str = "begins"
    ended: Ended | None = None
    error: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)


def pack(
    jobs: Sequence[Job],
    verify: bool,
    console: Console,
    record: Record,
    again: str,
    what: What = PACK,
) -> dict[str, Plan]:
    """Write, or with ``verify`` compare, the files of every job. Raises LauncherError with all that
    went wrong; ``again`` is the command that goes on then. Returns the plans, as they were before.
    """
    since = console.now()
    console.progress(f"looking at {what.looked} and the drives of both ranks", since)
    runs = _side_by_side(jobs, ["--plan"], console, record, show=False)
    refuse([found for run in runs if (found := _wrong(run, again, record, what))])
    plans = {run.job.role: plan for run in runs if (plan := plan_of(run.lines))}
    lost = [run for run in runs if run.job.role not in plans]
    refuse([_no_plan(run, again) for run in lost])
    if not verify:
        refuse(_no_room(jobs, plans, again))
    todo = [job for job in jobs if verify or plans[job.role].absent]
    for job in jobs:
        plan = plans[job.role]
        console.say(f"  {job.role}: {job.where}: {_told(plan, verify, what)}")
        record.event(STEP, "planned", role=job.role, where=job.where, left=plan.left)
    if todo:
        began = time.monotonic()
        console.quiet_from_here()
        runs = _side_by_side(todo, ["--verify"] if verify else [], console, record, show=True)
        refuse([found for run in runs if (found := _wrong(run, again, record, what))])
        done = f"equal to {what.original}" if verify else "whole"
        console.say(f"all {what.files} are {done} ({span(time.monotonic() - began)})", "good")
    return plans


def _told(plan: Plan, verify: bool, what: What) -> str:
    if verify:
        return f"{size(plan.total)} to compare with {what.original}, {what.units}"
    if not plan.absent:
        return f"{size(plan.total)}, whole: nothing to do"
    rest = f" of {size(plan.total)}, the rest is there" if plan.left < plan.total else ""
    return f"{size(plan.left)} to write{rest}; {size(plan.free)} free"


def _side_by_side(
    jobs: Sequence[Job], extra: Sequence[str], console: Console, record: Record, show: bool
) -> list[_Run]:
    """Each job in a thread; when one fails the others go on, for what they write is kept."""
    stop = threading.Event()
    runs = [_Run(job) for job in jobs]
    threads = [
        threading.Thread(target=_work, args=(run, extra, stop, record), daemon=True) for run in runs
    ]
    since = console.now()
    begun: list[_Run] = []
    try:
        for run, thread in zip(runs, threads, strict=True):
            begun.append(run)
            thread.start()
        # Not join: in Python 3.11 one that Ctrl-C interrupts takes a living thread for ended.
        while not all(run.over.is_set() for run in runs):
            for run in runs:
                run.over.wait(LOOK / len(runs))
            if show:
                console.progress(both({run.job.role: run.now for run in runs}), since)
    except BaseException:
        stop.set()
        console.warn("ending the packers; what they wrote is kept")
        until = time.monotonic() + END
        for run in begun:
            run.over.wait(max(0.0, until - time.monotonic()))
        for run in begun:
            if isinstance(run.error, LauncherError):
                console.warn(f"{run.job.role}: {run.error.found}; {run.error.do_next}")
            elif run.error is not None:
                console.warn(f"{run.job.role}: {type(run.error).__name__}: {run.error}")
            elif run.ended is None:
                console.warn(f"the {run.job.role}'s packer may run on; the next run ends it")
        raise
    return runs


def _work(run: _Run, extra: Sequence[str], stop: threading.Event, record: Record) -> None:
    def line(text: str) -> None:
        found = progress(text)
        if found is None:
            run.lines.append(text)
        record.text(STEP, f"{run.job.role}: {text}")
        run.now = found or run.now

    try:
        run.ended = run.job.run(extra, line, stop)
        run.now = "is done" if run.ended.status == 0 else run.ended.how
    except BaseException as error:
        run.error = error
        run.now = "has failed"
    finally:
        run.over.set()


def _wrong(run: _Run, again: str, record: Record, what: What) -> Finding | None:
    role = run.job.role
    if isinstance(run.error, LauncherError):
        return Finding(f"{role}: {run.error.found}", run.error.needed, run.error.do_next)
    if run.error is not None:
        raise run.error
    assert run.ended is not None
    if run.ended.status == 0:
        return None
    record.event(STEP, "failed", role=role, how=run.ended.how)
    said = [text for text in run.lines if text.strip() and not text.startswith("{")]
    told = "\n".join(said[-4:]) or "it said nothing"
    return Finding(
        f"the {role}'s packer {run.ended.how}: {told}",
        f"{what.files} of this source in {run.job.where} on the {role}, whole or not begun",
        f"do what it says, then {again}: {what.kept}",
    )


def _no_plan(run: _Run, again: str) -> Finding:
    return Finding(
        f"the {run.job.role}'s packer ended well and told no plan",
        "an overlay in the image, or in the engine, of the launcher's own version",
        f"install it anew, then {again}",
    )


def _no_room(jobs: Sequence[Job], plans: Mapping[str, Plan], again: str) -> list[Finding]:
    """For each node whose drive is too small for what is left of all that is written there."""
    found = []
    for node in dict.fromkeys(job.node for job in jobs):
        here = [job for job in jobs if job.node == node]
        needed = sum(plans[job.role].needed for job in here)
        free = min(plans[job.role].free for job in here)
        if free < needed:
            names = ", ".join(name for job in here for name in plans[job.role].absent)
            who = " and the ".join(job.role for job in here)
            have = "have" if len(here) > 1 else "has"
            found.append(
                Finding(
                    f"the {who} {have} {size(free)} free for {here[0].where}",
                    f"{size(needed)} there, for {names}",
                    f"free some space, or set {here[0].key} in .env to another drive, then {again}",
                    topic="disk",
                )
            )
    return found
