"""kill -9 of the launcher in each step, then the same command again: it ends serving.

While a pair serves, the overlay of the clone is changed as an update from git would change it. So
every step but the engine (see test_4_engine.py) has work to do, and the pair is stale.
"""

from __future__ import annotations

import psutil
import pytest
from clone import START, Clone
from ranks import Pair, children, still_alive


@pytest.fixture(scope="module")
def old(clone: Clone) -> Pair:
    """The pair that served when the update came."""
    if clone.standing()["code"] != 0:
        ran = clone.start("rehearse", timeout=START)
        assert ran.status == 0, ran.said
    with (clone.root / "overlay" / "pyproject.toml").open("a") as project:
        project.write("\n# changed by an update\n")
    return Pair.of(clone.standing())


def kill(clone: Clone, step: str, moment: str) -> list[psutil.Process]:
    """kill -9 of a ``rehearse`` at a moment of a step; what it had running then."""
    command = clone.begin("rehearse")
    if moment == "output":
        command.reaches_output(step)
    else:
        command.reaches(step, moment)
    below = children(command.pid)
    ran = command.kill()
    assert ran.status == 137, ran.said
    return below


def assert_standing(clone: Clone, *codes: int) -> None:
    standing = clone.standing()
    assert standing["code"] in codes, standing
    assert standing["launcher"] is None, standing  # a killed one is not taken for one at work


def test_killed_while_it_looks_around(clone: Clone, old: Pair) -> None:
    kill(clone, "preflight", "started")
    assert_standing(clone, 0)
    assert Pair.of(clone.standing()) == old


@pytest.mark.parametrize(
    ("step", "moment"),
    [
        ("overlay", "started"),
        ("overlay", "output"),
        ("checkpoint", "started"),
        ("checkpoint", "output"),
        ("launch", "started"),
    ],
)
def test_killed_before_the_launch(clone: Clone, old: Pair, step: str, moment: str) -> None:
    working = kill(clone, step, moment)
    # The step that finds the pair stale ends it first, and may be killed before or while it does.
    assert_standing(clone, *((0, 1, 3, 4) if (step, moment) == ("overlay", "started") else (1,)))
    assert still_alive(working) == []
    if step != "overlay":
        assert still_alive(old.processes(), 0) == []


def test_killed_between_the_two_ranks(clone: Clone, old: Pair) -> None:
    kill(clone, "launch", "rank started")
    assert_standing(clone, 3, 4)
    half = Pair.of(clone.standing())
    left = half.processes()
    assert left

    # Half a pair is of no use: the next run ends it, then starts both.
    kill(clone, "watch", "started")
    assert still_alive(left) == []
    assert_standing(clone, 4)
    assert Pair.of(clone.standing()).launch_id != half.launch_id


@pytest.mark.parametrize("step", ["health", "check"])
def test_killed_after_the_launch(clone: Clone, old: Pair, step: str) -> None:
    started = Pair.of(clone.standing())
    kill(clone, step, "started")
    assert_standing(clone, *((4, 0) if step == "health" else (0,)))
    assert Pair.of(clone.standing()) == started


def test_rehearse_then_ends_serving(clone: Clone, old: Pair) -> None:
    started = Pair.of(clone.standing())
    ended = clone.start("rehearse", timeout=START)
    assert ended.status == 0, ended.said
    assert "launch (worker, then head): already done" in ended.out
    assert Pair.of(clone.standing()) == started  # the ranks ran on through all of it
    assert (clone.logs / "ranks" / "watch.json").exists()
    assert started.launch_id in (clone.logs / "ranks" / "watch.json").read_text()
