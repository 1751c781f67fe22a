"""One rank killed while it serves: what the other does, what the launcher sees and when, and
whether a start afterwards finds anything left of the one before."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpu.served import Pair, ServedFailed
from launcher import health, ports, processes
from launcher.runtimes.base import RankStatus
from launcher.watch import pair as watch

#: A launcher that polls every quarter of a second has seen it by then.
SEEN = 5.0
#: What the driver may keep, and other processes may move, of a GPU (MiB).
LEFT = 64
Values = dict[str, Any]


def gpu_used() -> list[int]:
    """MiB used of each GPU; none without a driver."""
    if not shutil.which("nvidia-smi"):
        return []
    argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def members(pair: Pair) -> list[tuple[int, int]]:
    """(pid, start ticks) of every process of both ranks."""
    found = []
    for role in pair.roles:
        leader = pair.runtime.session(role)
        if leader is None or (first := processes.find(leader)) is None:
            continue
        found += [(first.pid, first.ticks)]
        found += [(each.pid, each.ticks) for each in processes.below(leader)]
    return found


def kill_and_look(pair: Pair, role: Any, prompt: list[int], observe: float) -> Values:
    """Kill the rank of ``role`` while a reply is made; seconds from the kill until each is seen.
    None: not within ``observe`` seconds."""
    launch, model = pair.deployment.launch_id, pair.deployment.served_model_name
    request: Values = {}
    asking = threading.Thread(target=_ask, args=(pair, prompt, request, observe), daemon=True)
    asking.start()
    time.sleep(1.0)
    began_with = "ended" in request
    seen: dict[str, float] = {}
    told: Values = {}
    stop = threading.Event()

    def note(what: str, since: float) -> None:
        seen.setdefault(what, round(time.monotonic() - since, 3))

    killed = pair.runtime.inspect(role)
    if killed.pid is None:
        raise RuntimeError(f"the {role} does not run: nothing to kill")
    began = time.monotonic()

    def report(status: RankStatus) -> None:
        note(f"watch reports the {status.role}", began)
        told[status.role] = status.ending()

    watching = threading.Thread(
        target=watch.watch,
        args=(pair.roles,),
        kwargs={"inspect": pair.runtime.inspect, "ours": lambda: not stop.is_set(),
                "report": report, "sleep": time.sleep},
        daemon=True,
    )  # fmt: skip
    watching.start()
    os.kill(killed.pid, signal.SIGKILL)
    while time.monotonic() - began < observe:
        ranks = [pair.runtime.inspect(each) for each in pair.roles]
        verdict = health.ranks_verdict(launch, ranks)
        if verdict is not None and "ranks_verdict" not in seen:
            note("ranks_verdict", began)
            told["verdict"], told["standing"] = verdict.reason, verdict.standing.name
        if health.api_fault(pair.api, model, 1.0, time.monotonic) is not None:
            note("/health or /v1/models fails", began)
        for rank in ranks:
            if not rank.running:
                note(f"{rank.role} has ended", began)
        if "ended" in request:
            seen.setdefault("the request ends", round(request["ended"] - began, 3))
        if not any(rank.running for rank in ranks) and "ended" in request:
            break
        time.sleep(0.05)
    stop.set()
    survivors = [r.role for r in map(pair.runtime.inspect, pair.roles) if r.running]
    return {
        "killed": role,
        "in_flight": not began_with,
        "request": request.get("said", "no answer"),
        "seconds": seen,
        "told": told,
        "outlives": survivors,
        "observed": observe,
    }


def _ask(pair: Pair, prompt: list[int], request: Values, observe: float) -> None:
    try:
        reply = pair.complete(prompt, 1500, timeout=observe + 30, logprobs=False)
        request["said"] = f"{len(reply['tokens'])} tokens"
    except Exception as error:  # what a client sees is the answer asked for
        request["said"] = f"{type(error).__name__}: {error}"[:300]
    request["ended"] = time.monotonic()


def left_over(
    pair: Pair, known: list[tuple[int, int]], before: list[int], wait: float = 10.0
) -> Values:
    """What is there of a stopped deployment: processes, listeners, MiB of each GPU."""
    deadline = time.monotonic() + wait
    while True:
        alive = [pid for pid, ticks in known if processes.alive(pid, ticks)]
        rank = pair.deployment.ranks[0]
        held = {name: str(h) for name, port in rank.ports.items() for h in ports.holders(port)}
        grown = [now - was for now, was in zip(gpu_used(), before, strict=True)]
        nothing = not alive and not held and all(mib <= LEFT for mib in grown)
        if nothing or time.monotonic() > deadline:
            return {"processes": alive, "ports": held, "gpu_mib": grown, "nothing": nothing}
        time.sleep(0.2)


def fall(
    make: Callable[[], Pair], roles: Sequence[Any], prompt: list[int], observe: float,
    left: Callable[[], float],
) -> tuple[bool, Values]:  # fmt: skip
    """Start; for each of ``roles``: kill it, look, stop, look for remains, start once more on the
    same ports (a listener left behind would show) and ask the same."""
    before = gpu_used()
    pair = make()
    values: Values = {}
    right, known = True, []
    try:
        values["start_s"] = round(pair.start(max(1.0, left())), 1)
        first = pair.complete(prompt, 8)["tokens"]
        for role in roles:
            known = members(pair)
            seen = values[role] = kill_and_look(pair, role, prompt, observe)
            stopping = time.monotonic()
            pair.stop()
            seen["processes"] = len(known)
            seen["stop_s"] = round(time.monotonic() - stopping, 2)
            seen["left_after_stop"] = left_over(pair, known, before)
            seen["restart_s"] = round(pair.start(max(1.0, left())), 1)
            again = pair.complete(prompt, 8)["tokens"]
            seen["same_tokens_after"] = first == again
            right = right and bool(
                seen["in_flight"]
                and seen["seconds"].get(f"watch reports the {role}", SEEN) < SEEN
                and seen["seconds"].get("ranks_verdict", SEEN) < SEEN
                and len(first) == len(again) == 8
                and seen["left_after_stop"]["nothing"]
            )
        known = members(pair)
    except ServedFailed as error:  # what was seen until then is told
        values["failed"] = str(error)[:2000]
        right = False
    finally:
        pair.stop()
    values["left_at_end"] = left_over(pair, known, before)
    return right and values["left_at_end"]["nothing"], values
