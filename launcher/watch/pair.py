"""Watches the two ranks of one launch and writes down the death of either, within seconds.

``python -m launcher.watch.pair LOGS LAUNCH_ID RUN LOCK_FD``. Stock vLLM answers /health with 200
while a rank is dead, and a headless rank outlives its head; somebody has to look. The survivor is
left alone: what to do is the user's, and ``status`` tells.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from launcher import clock, detached, files
from launcher.record import Record
from launcher.runtimes.base import RankStatus, Runtime
from launcher.runtimes.process import ProcessRuntime
from launcher.state import Store
from launcher.together import together

POLL = 0.25  # seconds
FAR_POLL = 5.0  # seconds, where a look goes to another machine
PATIENCE = 20.0  # seconds for which a node that does not answer may come back
ROLES = ("head", "worker")


def watch(
    roles: Sequence[str],
    *,
    inspect: Callable[[str], RankStatus],
    ours: Callable[[], bool],
    report: Callable[[RankStatus], None],
    sleep: Callable[[float], None],
    poll: float = POLL,
    clock: Callable[[], float] = time.monotonic,
    ran: Collection[str] = (),
) -> str:
    """Poll until there is nothing left to watch; why it ended.

    ``inspect`` gives how a role's rank fares under this launch (``absent``: not started yet, if its
    role is not in ``ran``: those that ran before the first look).
    ``ours`` says whether the launch is still the recorded one and not being stopped; it is asked
    after each look, so that an end that was asked for is not reported as a death. A node that does
    not answer is reported once it has not for ``PATIENCE`` seconds, and again when it does.
    """
    dead: set[str] = set()
    silent: dict[str, float] = {}  # role -> since when its node does not answer
    told: set[str] = set()
    seen = set(ran)  # roles whose rank has run
    while True:
        found = together(inspect, [role for role in roles if role not in dead])
        if not ours():
            return "the deployment was stopped or replaced"
        for status in found:
            role = status.role
            if status.state == "unreachable":
                since = silent.setdefault(role, clock())
                if role not in told and clock() - since >= PATIENCE:
                    report(status)
                    told.add(role)
                continue
            silent.pop(role, None)
            if role in told:
                told.discard(role)
                if status.running:
                    report(status)
            if status.running:
                seen.add(role)
            # A container that was removed behind our back leaves nothing to be asked.
            if status.state == "exited" or (status.state == "absent" and role in seen):
                report(status)
                dead.add(role)
        if len(dead) == len(roles):
            return "every rank has ended"
        sleep(poll)


def main(argv: list[str]) -> int:
    logs, launch_id, run = Path(argv[0]), argv[1], Path(argv[2])
    detached.leave()
    # The inherited lock of argv[3] is held open by this process for as long as it lives.
    entry = {"launch_id": launch_id, "pid": os.getpid()}
    files.replace_json(logs / "ranks" / "watch.json", entry)
    store = Store(logs / "state.json")
    record = Record(run)
    deployment = store.load().deployment
    far = deployment is not None and bool(deployment.reach)
    runtime: Runtime = ProcessRuntime(Path.cwd(), logs, {})
    if deployment is not None and far:
        from launcher.pair import reach  # with libraries that are for two nodes only

        runtime = reach.runtime(reach.Reach.of_record(deployment.reach), logs)

    def inspect(role: str) -> RankStatus:
        status = runtime.inspect(role)
        # A rank of another launch is none of ours; `ours` ends the watch in that case.
        if status.state == "unreachable" or status.launch_id == launch_id:
            return status
        return RankStatus(role, "absent")

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
        record.event("watch", _EVENTS[status.state], **fields)
        if status.state == "exited":
            for role in ROLES:  # a container's log goes with it
                runtime.save_log(role, run / f"{role}.log")
        with (logs / "watch.log").open("a") as out:
            out.write(told(status, time.time()))

    record.event("watch", "watching", launch_id=launch_id, pid=os.getpid())
    why = watch(
        ROLES,
        inspect=inspect,
        ours=ours,
        report=report,
        sleep=time.sleep,
        poll=FAR_POLL if far else POLL,
        ran=ROLES,  # the launcher has started both before it starts this
    )
    record.event("watch", "ended", why=why)
    return 0


_EVENTS = {
    "exited": "rank died",
    "absent": "rank is gone",
    "unreachable": "node does not answer",
    "running": "node answers again",
}


def told(status: RankStatus, now: float) -> str:
    """A death in words, with the last lines of the rank's log."""
    if status.state != "exited":
        return f"{clock.stamp(now)} {_EVENTS[status.state]}: {status.role}, {status.ending()}\n"
    death = f"{clock.stamp(now)} rank died: {status.role}, {status.ending()}"
    if not status.last_lines:  # a container that is removed by force ends first, then its log goes
        return f"{death}; no line of its log is to be had\n"
    lines = "".join(f"    {line}\n" for line in status.last_lines)
    return f"{death}, last lines:\n{lines}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
