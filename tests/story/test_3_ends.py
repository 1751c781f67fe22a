"""How a deployment ends: a rank dies, somebody presses Ctrl-C, it is stopped. And a taken port."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
from clone import START, Clone, Ran
from ranks import Pair, shared_memory, still_alive


def events(ran: Ran) -> list[dict[str, Any]]:
    assert ran.run is not None, ran.said
    return [json.loads(line) for line in (ran.run / "events.jsonl").read_text().splitlines()]


def test_a_killed_worker_is_reported_and_rehearse_brings_the_pair_back(
    clone: Clone, serving: Pair
) -> None:
    """The tables are packed before, so that what comes back reads packed rows: the answers are the
    same to the last bit."""
    answers = [answer(clone, text) for text in QUESTIONS]
    assert "packed rows" not in (clone.logs / "head.log").read_text()
    packed = clone.start("pack", "--rehearsal")
    assert packed.status == 0, packed.said
    assert "all packed files are whole" in packed.out
    again = clone.start("pack", "--rehearsal", "--verify")
    assert again.status == 0 and "equal to the shards" in again.out, again.said
    old = serving.processes()
    shared = shared_memory(old)
    assert_death_is_reported(clone, serving, "worker")

    back = clone.start("rehearse", timeout=START)
    assert back.status == 0, back.said
    assert_gone(old, shared)
    order = [(e["event"], e["role"]) for e in events(back) if "role" in e]
    assert order[:2] == [("stopping", "head"), ("stopped", "head")]  # the survivor, first
    assert order[2:] == [("rank started", "worker"), ("rank started", "head")]
    now = Pair.of(clone.standing())
    assert now.launch_id != serving.launch_id
    for rank, role in enumerate(("head", "worker")):
        file = clone.rehearsal / "packed" / f"engram-l1-r{rank}of2.bin"
        log = (clone.logs / f"{role}.log").read_text()
        used = f"packed rows from {file} by "
        if shutil.which("g++") is None:  # without a compiler rows are read plainly, from the shards
            used = "rows from "
        assert f"Engram layer 1: {used}" in log
    assert [answer(clone, text) for text in QUESTIONS] == answers


QUESTIONS = ("What is 17*19? Reply with the integer only.", "Tell me of the sea. " * 12)


def answer(clone: Clone, text: str) -> list[tuple[str, float]]:
    """Tokens of a reply with their log-probabilities, from no prefix cache."""
    body = {
        "model": clone.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "thinking": {"type": "disabled"},
        "cache_salt": uuid.uuid4().hex,
    }
    choice = clone.ask("POST", "/v1/chat/completions", json=body).json()["choices"][0]
    found = [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]]
    assert found
    return found


def test_ctrl_c_on_logs_only_detaches(clone: Clone, serving: Pair) -> None:
    following = clone.begin("logs", "-n", "3")
    end = time.monotonic() + 20
    while len(following.said().splitlines()) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    following.ctrl_c()
    left = following.wait()
    assert left.status == 130, left.said
    assert "no longer following; the head runs on" in left.out
    assert Pair.of(clone.standing()) == serving


def test_a_killed_head_is_reported_and_restart_may_be_broken_off(
    clone: Clone, serving: Pair
) -> None:
    old = serving.processes()
    shared = shared_memory(old)
    assert_death_is_reported(clone, serving, "head")

    restart = clone.begin("restart")
    restart.reaches("health")
    time.sleep(1.0)
    restart.ctrl_c()
    left = restart.wait(START)
    assert left.status == 130, left.said
    assert "the worker and the head run on" in left.err
    assert "./start.sh rehearse goes on where this stopped" in left.err
    assert_gone(old, shared)
    standing = clone.standing()
    assert standing["code"] in (4, 0), standing
    assert standing["launcher"] is None
    started = Pair.of(standing)

    attached = clone.start("rehearse", timeout=START)
    assert attached.status == 0, attached.said
    assert "rank started" not in {e["event"] for e in events(attached)}
    assert Pair.of(clone.standing()) == started


def assert_death_is_reported(clone: Clone, pair: Pair, role: str) -> None:
    """Kill the role's first process; within ten seconds all that should tell of it does."""
    watch_log = clone.logs / "watch.log"
    known = watch_log.stat().st_size
    last = (clone.logs / f"{role}.log").read_text(errors="replace").splitlines()[-1]
    pair.kill(role)
    killed = time.monotonic()
    told = clone.until(3)
    assert told.status == 3, told.said
    noted = ""
    while "last lines" not in noted and time.monotonic() - killed < 10:
        noted = watch_log.read_text()[known:]
        time.sleep(0.05)
    assert time.monotonic() - killed < 10
    assert f"the {role} ended by SIGKILL" in told.out
    assert last in told.out
    assert f"rank died: {role}, ended by SIGKILL, last lines:" in noted
    assert last in noted


def assert_gone(processes: list[psutil.Process], shared: set[Path]) -> None:
    """No process lives on, and no shared memory of theirs is left to fill the machine."""
    assert still_alive(processes) == []
    assert sorted(filter(Path.exists, shared)) == []


def test_stop_leaves_nothing(clone: Clone, serving: Pair) -> None:
    old = serving.processes()
    shared = shared_memory(old)
    assert len(old) > 2 and shared
    stopped = clone.start("stop", timeout=120.0)
    assert stopped.status == 0, stopped.said
    assert_gone(old, shared)
    down = clone.start("status")
    assert down.status == 1, down.said
    again = clone.start("stop")
    assert again.status == 0 and "nothing of the rehearsal ran" in again.out


def test_a_taken_port_is_refused_before_anything_starts(clone: Clone) -> None:
    assert clone.start("stop", timeout=120.0).status == 0
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", clone.port))
        taken.listen(1)
        refused = clone.start("rehearse")
    assert refused.status == 1, refused.said
    command = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    assert f"port {clone.port} on 127.0.0.1 is taken by pid {os.getpid()}" in refused.err
    assert command[:100] in refused.err
    assert [e["step"] for e in events(refused) if e["event"] == "started"] == ["preflight"]
    assert clone.start("status").status == 1
