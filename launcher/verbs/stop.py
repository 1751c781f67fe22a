"""``stop``: both ranks are ended, and their memory is waited for."""

from __future__ import annotations

import argparse
import time

from launcher import lock
from launcher.app import PAIR, REHEARSAL, App
from launcher.clock import span
from launcher.pair import aftermath
from launcher.steps.launch import GRACE, stop_all


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
