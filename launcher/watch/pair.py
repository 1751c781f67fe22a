"""Watches the two ranks of one launch and writes down the death of either, within seconds.

``python -m launcher.watch.pair LOGS LAUNCH_ID RUN LOCK_FD``. Stock vLLM answers /health with 200
while a rank is dead, and a headless rank outlives its head; somebody has to look. The survivor is
left alone: what to do is the user's, and ``status`` tells.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher import clock, detached, files
from launcher.record import Record
from launcher.runtimes.base import RankStatus
from launcher.runtimes.process import ProcessRuntime
from launcher.state import Store

POLL = 0.25  # seconds
ROLES = ("head", "worker")


def watch(
    roles: Sequence[str],
    *,
    inspect: Callable[[str], RankStatus],
    ours: Callable[[], bool],
    report: Callable[[RankStatus], None],
    sleep: Callable[[float], None],
    poll: float = POLL,
) -> str:
    """Poll until there is nothing left to watch; why it ended.

    ``inspect`` gives how a role's rank fares under this launch (``absent``: not started yet).
    ``ours`` says whether the launch is still the recorded one and not being stopped; it is asked
    after each look, so that an end that was asked for is not reported as a death.
    """
    dead: set[str] = set()
    while True:
        found = [inspect(role) for role in roles if role not in dead]
        if not ours():
            return "the deployment was stopped or replaced"
        for status in found:
            if status.state == "exited":
                report(status)
                dead.add(status.role)
        if len(dead) == len(roles):
            return "every rank has ended"
        sleep(poll)


def main(argv: list[str]) -> int:
    logs, launch_id, run = Path(argv[0]), argv[1], Path(argv[2])
    detached.leave()
    # The inherited lock of argv[3] is held open by this process for as long as it lives.
    entry = {"launch_id": launch_id, "pid": os.getpid()}
    files.replace_json(logs / "ranks" / "watch.json", entry)
    runtime = ProcessRuntime(Path.cwd(), logs, {})
    store = Store(logs / "state.json")
    record = Record(run)

    def inspect(role: str) -> RankStatus:
        status = runtime.inspect(role)
        # A rank of another launch is none of ours; `ours` ends the watch in that case.
        return status if status.launch_id == launch_id else RankStatus(role, "absent")

    def ours() -> bool:
        recorded = store.load().deployment
        return recorded is not None and recorded.launch_id == launch_id and not recorded.stopping

    def report(status: RankStatus) -> None:
        fields = {
            "role": status.role,
            "launch_id": launch_id,
            "exit_code": status.exit_code,
            "signal": status.signal,
            "last_lines": list(status.last_lines),
        }
        record.event("watch", "rank died", **fields)
        with (logs / "watch.log").open("a") as out:
            out.write(told(status, time.time()))

    record.event("watch", "watching", launch_id=launch_id, pid=os.getpid())
    why = watch(
        ROLES,
        inspect=inspect,
        ours=ours,
        report=report,
        sleep=time.sleep,
    )
    record.event("watch", "ended", why=why)
    return 0


def told(status: RankStatus, now: float) -> str:
    """A death in words, with the last lines of the rank's log."""
    lines = "".join(f"    {line}\n" for line in status.last_lines)
    return f"{clock.stamp(now)} rank died: {status.role}, {status.ending()}, last lines:\n{lines}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
