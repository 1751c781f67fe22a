"""kill -9 of the launcher in each step, then the same command again: it ends serving.

The overlay of the clone is changed first, as an update from git would, so that every step but the
engine (see test_4_engine.py) has work to do.
"""

from __future__ import annotations

import pytest
from clone import START, Clone, Ran
from ranks import Pair, running_under, still_alive


@pytest.fixture(scope="module")
def updated(clone: Clone) -> None:
    with (clone.root / "overlay" / "pyproject.toml").open("a") as project:
        project.write("\n# changed by an update\n")


def killed(clone: Clone, step: str, moment: str) -> Ran:
    command = clone.begin("rehearse")
    if moment == "output":
        command.reaches_output(step)
    else:
        command.reaches(step, moment)
    ran = command.kill()
    assert ran.status == 137, ran.said
    return ran


def assert_status_knows(clone: Clone, *codes: int) -> None:
    standing = clone.standing()
    assert standing["code"] in codes, standing
    assert standing["launcher"] is None, standing  # not taken for one that is still at work


@pytest.mark.usefixtures("updated")
def test_killed_while_it_looks(clone: Clone, serving: Pair) -> None:
    killed(clone, "preflight", "started")
    assert_status_knows(clone, 0)
    assert still_alive(serving.processes(), 0) != []


@pytest.mark.usefixtures("updated")
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
def test_killed_before_the_launch(clone: Clone, step: str, moment: str) -> None:
    killed(clone, step, moment)
    # Within the very first moment the old pair may still serve: it is ended by the step itself.
    assert_status_knows(clone, *((0, 1, 3) if (step, moment) == ("overlay", "started") else (1,)))
    assert still_working(clone) == []


def still_working(clone: Clone) -> list[str]:
    """What the killed launcher had running for a step: pip, or the maker of the checkpoint."""
    working = [*running_under(clone.root / "overlay"), *running_under(clone.rehearsal / "engine")]
    return [line for line in working if " serve " not in line]
