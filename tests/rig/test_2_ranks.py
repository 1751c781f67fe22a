"""Faults of ranks that boot or serve: seen in time, told with what they last said, and mended."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from head_clone import HeadClone
from pair import Pair

pytestmark = pytest.mark.rig

START = 90.0
SOON = 30.0  # seconds within which a dead rank is seen
HANG = "DSV41_HANG_SECONDS=4"
STUCK = "wait_for_a_kernel_that_never_ends"


# ---- while it boots ----


@pytest.mark.parametrize("role", ["worker", "head"])
def test_a_rank_dies_while_it_boots(clean: HeadClone, role: str) -> None:
    dies = {"mode": "die", "after": 1.0, "code": 3, "boot": 30.0}
    clean.stub(**{role: dies})
    ran = clean.start("start", timeout=START)
    assert ran.status == 1, ran.said
    assert f"the {role} ended with exit code 3" in ran.err
    assert "the stub was told to die" in ran.err  # its last lines
    assert ran.seconds < SOON
    assert clean.standing()["code"] in (1, 3)

    clean.stub()
    again = clean.start("start", timeout=START)
    assert again.status == 0, again.said
    assert Pair.of(clean).completes()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def _stacks(clone: HeadClone) -> dict[str, str]:
    """Text of the files under logs/ that hold Python stacks."""
    found: dict[str, str] = {}
    for path in _files(clone.logs):
        if STUCK in (text := path.read_text(errors="replace")):
            found[str(path.relative_to(clone.logs))] = text
    return found


@pytest.mark.parametrize("mode", ["hang", "silent"])
def test_a_hang_dumps_the_stacks_of_both_ranks(clean: HeadClone, mode: str) -> None:
    """The heartbeat of vLLM's queue is no progress."""
    clean.stub(
        worker={"mode": mode, "at": "Loading safetensors"},
        head={"mode": mode, "at": "Loading model from scratch"},
    )
    ran = clean.start("start", "--set", HANG, timeout=START)
    assert ran.status == 1, ran.said
    assert "no progress" in ran.err
    assert "the model is built" in ran.err, "the worker's last stage"
    assert "the ranks have met" in ran.err, "the head's last stage"
    assert 4 <= ran.seconds < 4 + SOON
    stacks = _stacks(clean)
    assert any("head" in name for name in stacks), list(stacks)
    assert any("worker" in name for name in stacks), list(stacks)


@pytest.mark.parametrize(
    "busy",
    [{"mode": "chatty", "last": 8.0}, {"mode": "compile", "last": 6.0}],
    ids=lambda b: b["mode"],
)
def test_slow_is_not_hung(clean: HeadClone, busy: dict[str, Any]) -> None:
    """Lines of progress, and a compiler at work without a word, both count."""
    clean.stub(head={**busy, "at": "init engine"})
    ran = clean.start("start", "--set", HANG, timeout=START)
    assert ran.status == 0, ran.said
    assert Pair.of(clean).completes()


@pytest.mark.parametrize(("mode", "told"), [("garbage", "/v1/models"), ("mute", "/health")])
def test_an_api_that_does_not_serve(clean: HeadClone, mode: str, told: str) -> None:
    clean.stub(head={"mode": mode})
    ran = clean.start("start", "--set", "READY_TIMEOUT=6", "DSV41_HANG_SECONDS=60", timeout=START)
    assert ran.status == 1, ran.said
    assert told in ran.err and "READY_TIMEOUT=6" in ran.err
    # Both still run, and a start waits on.
    assert len(clean.running()) == 2
    assert clean.standing()["code"] in (3, 4)
    assert clean.start("stop").status == 0
    assert clean.containers() == {}


def test_a_rank_that_eats_memory(clean: HeadClone) -> None:
    clean.stub(worker={"mode": "eat", "mib": 200})
    ran = clean.start("start", timeout=START)
    assert ran.status == 0, ran.said
    stats = Pair.of(clean).container("worker").stats(stream=False)
    assert stats["memory_stats"]["usage"] > 200 << 20


def test_ctrl_c_while_it_boots_leaves_ranks_that_the_next_start_takes_on(clean: HeadClone) -> None:
    clean.stub(head={"boot": 4.0})
    first = clean.begin("start")
    first.reaches("health", timeout=START)
    first.ctrl_c()
    left = first.wait()
    assert left.status == 130, left.said
    assert "the worker and the head run on" in left.err
    pair = Pair.of(clean)
    ran = clean.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert Pair.of(clean) == pair


# ---- while it serves ----


@pytest.mark.parametrize("role", ["worker", "head"])
def test_a_rank_dies_while_it_serves(serving: HeadClone, role: str) -> None:
    pair = Pair.of(serving)
    last = pair.log(role).splitlines()[-1]
    pair.kill(role)
    killed = time.monotonic()
    told = serving.until(3)
    assert told.status == 3, told.said
    assert f"the {role} ended" in told.out and last in told.out
    noted = ""
    while f"rank died: {role}" not in noted and time.monotonic() - killed < SOON:
        noted = (serving.logs / "watch.log").read_text()
        time.sleep(0.1)
    assert f"rank died: {role}" in noted
    if role == "worker":  # vLLM's API does not know of it
        assert serving.curl("/health").out.endswith("200")

    ran = serving.start("start", timeout=START)
    assert ran.status == 0, ran.said
    now = Pair.of(serving)
    assert now.launch_id != pair.launch_id and now.completes()
    # What the dead rank said last is not lost with its container.
    assert any(last in path.read_text(errors="replace") for path in _files(serving.logs))


def test_the_workers_host_is_gone_while_it_serves(serving: HeadClone) -> None:
    pair = Pair.of(serving)
    serving.rig.unplug(serving.rig.worker)
    began = time.monotonic()
    told = serving.start("status")
    assert told.status == 3, told.said
    assert "the worker's node does not answer" in told.out
    assert time.monotonic() - began < 15
    # A start changes nothing where half of it cannot be seen.
    ran = serving.start("start", timeout=START)
    assert ran.status == 1, ran.said
    assert "the worker" in ran.err
    assert len(serving.running()) == 2

    serving.rig.unplug(serving.rig.worker, plugged=True)
    assert serving.until(0).status == 0
    assert Pair.of(serving) == pair


def test_stop_with_the_worker_out_of_reach_says_what_is_left(serving: HeadClone) -> None:
    serving.rig.unplug(serving.rig.worker)
    ran = serving.start("stop", timeout=START)
    assert ran.status != 0, ran.said
    assert "worker" in ran.err
    serving.rig.unplug(serving.rig.worker, plugged=True)
    again = serving.start("stop", timeout=START)
    assert again.status == 0, again.said
    assert serving.containers() == {}


def test_both_die_together(serving: HeadClone) -> None:
    pair = Pair.of(serving)
    for role in ("worker", "head"):
        pair.kill(role)
    told = serving.until(1)
    assert told.status == 1, told.said
    ran = serving.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert Pair.of(serving).completes()


def test_the_workers_docker_is_stopped(serving: HeadClone) -> None:
    """Its containers go with it here; the launcher says what is the matter."""
    worker = serving.rig.worker
    worker.dockerd_stop()
    try:
        told = serving.start("status")
        assert told.status == 3, told.said
        ran = serving.start("start", timeout=START)
        assert ran.status == 1, ran.said
        assert "the Docker daemon of the worker cannot be used" in ran.err
        assert "systemctl enable --now docker" in ran.err
    finally:
        worker.dockerd_start()
        worker.dockerd_ready()
    ran = serving.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert Pair.of(serving).completes()
