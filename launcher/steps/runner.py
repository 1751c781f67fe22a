"""Runs steps in order, skipping what is done and redoing what is stale.

Nothing is undone before every step that is still to be done has looked ahead.

It can be killed anywhere. A step is forgotten, with all that rest on it, before it is begun, and
recorded after it has ended; so what is recorded was finished, and nothing recorded rests on
something that changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from launcher.clock import span
from launcher.errors import LauncherError
from launcher.state import Finished
from launcher.steps.base import Context, Step


def dependents(steps: Sequence[Step], keys: Iterable[str]) -> list[Step]:
    """The steps that rest on ``keys``, directly or through others, in order."""
    stale = set(keys)
    found = []
    for step in steps:
        if step.key not in stale and stale.intersection(step.needs):
            stale.add(step.key)
            found.append(step)
    return found


def run(
    steps: Sequence[Step],
    ctx: Context,
    *,
    anew: Collection[str] = (),
    now: Callable[[], float] = time.time,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Bring every step to done; the keys of those that had to be done now.

    ``anew``: keys of steps that are done again though they are done. Raises what a step raises,
    after recording where it happened.
    """
    did: list[str] = []
    looked = False
    for index, step in enumerate(steps, 1):
        head = f"{index}/{len(steps)} {step.title}"
        key = f"{ctx.name}/{step.key}"
        began = clock()
        try:
            wanted = step.inputs(ctx)
            if step.key not in anew and _stands(step, ctx, wanted):
                ctx.record.event(step.key, "skipped", fingerprint=wanted)
                ctx.console.say(f"{head}: {step.found(ctx)}")
                continue
            resting = dependents(steps, [step.key])
            ctx.record.event(step.key, "started", fingerprint=wanted)
            ctx.console.say(f"{head} …")
            ctx.console.quiet_from_here()
            if resting and not looked:
                step.look_ahead(ctx)
                for later in steps[index:]:
                    if later in resting or not _stands(later, ctx, later.inputs(ctx)):
                        later.look_ahead(ctx)
                looked = True
            for other in reversed(resting):
                other.undo(ctx)
            ctx.store.forget([key, *(f"{ctx.name}/{other.key}" for other in resting)])
            step.do(ctx)
            seconds = clock() - began
            ctx.store.finish(key, Finished(wanted, now(), round(seconds, 3)))
        except LauncherError as error:
            ctx.record.event(step.key, "failed", found=error.found, do_next=error.do_next)
            if error.log is None:
                error.log = ctx.record.folder / "log.txt"
            raise
        except BaseException as error:
            ctx.record.event(step.key, "broken off", by=f"{type(error).__name__}: {error}")
            raise
        did.append(step.key)
        ctx.record.event(step.key, "finished", seconds=round(seconds, 3))
        ctx.console.say(f"{head}: done in {span(seconds)}", "good")
    return did


def _stands(step: Step, ctx: Context, wanted: str) -> bool:
    """Whether it was done with this fingerprint, and what it made is there."""
    before = ctx.store.load().steps.get(f"{ctx.name}/{step.key}")
    return before is not None and before.fingerprint == wanted and step.done(ctx)
