"""kill -9 of the launcher at seeded moments of each verb; the next start always ends serving.

10 points; ``--full`` makes it 100 and writes what came of each to kills.json, which is committed.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pytest
from head_clone import HeadClone
from machine import command_of
from pair import Pair
from ranks import children, still_alive

pytestmark = pytest.mark.rig

START = 90.0
SEED = 20261129
RESULTS = Path(__file__).with_name("kills.json")
# How long a verb takes from a state, in seconds, to begin with; what was measured replaces it.
LASTS = {("start", "down"): 5.0, ("start", "half up"): 6.5, ("start", "serving"): 2.8,
         ("restart", "serving"): 7.0, ("stop", "serving"): 2.6}  # fmt: skip
LATE = 1.1  # of that time: some points lie after the end


@dataclass(frozen=True)
class Point:
    number: int
    verb: str
    state: str
    share: float  # of the time the verb takes


@dataclass(frozen=True)
class Outcome:
    point: Point
    after: float  # seconds until the kill
    step: str  # what the launcher's record last told of
    ended: bool  # the verb was over by then
    standing: int  # of `status` afterwards
    recovered: float  # seconds of the start that followed


def points(count: int) -> list[Point]:
    chance = random.Random(SEED)
    kinds = list(LASTS)
    made = []
    for number in range(count):
        # Each kind in turn, so that ten points have all of them.
        verb, state = kinds[number % len(kinds)]
        made.append(Point(number, verb, state, round(chance.uniform(0.0, LATE), 3)))
    return made


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "point" in metafunc.fixturenames:
        count = 100 if metafunc.config.getoption("--full", False) else 10
        metafunc.parametrize("point", points(count), ids=lambda p: f"{p.number}-{p.verb}-{p.state}")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> list[Outcome]:
    made: list[Outcome] = []

    def write() -> None:
        if request.config.getoption("--full", False):
            told = {"seed": SEED, "points": [asdict(each) for each in made]}
            RESULTS.write_text(json.dumps(told, indent=1) + "\n")

    request.addfinalizer(write)
    return made


def bring_to(clone: HeadClone, state: str) -> None:
    if state == "down":
        assert clone.start("stop", timeout=START).status == 0
        return
    if clone.standing()["code"] != 0:
        ran = clone.start("start", timeout=START)
        assert ran.status == 0, ran.said
    if state == "half up":
        Pair.of(clone).container(random.Random(clone.at).choice(["head", "worker"])).kill()


def watchers(clone: HeadClone) -> list[psutil.Process]:
    return [each for each in clone.processes() if "launcher.watch" in command_of(each)]


def test_killed_at(clone: HeadClone, point: Point, outcomes: list[Outcome]) -> None:
    bring_to(clone, point.state)
    kind = (point.verb, point.state)
    command = clone.begin(point.verb)
    at = command.began + point.share * LASTS[kind]
    while time.monotonic() < at and command.process.poll() is None:
        time.sleep(0.005)
    watching = watchers(clone)
    below = [each for each in children(command.pid) if each not in watching]
    ended = command.process.poll() is not None
    if ended:
        LASTS[kind] = 0.7 * LASTS[kind] + 0.3 * (time.monotonic() - command.began)
    after = time.monotonic() - command.began
    events = command.events()
    ran = command.kill()
    assert ran.status in ((0,) if ended else (137,)), ran.said

    # It leaves no child at work, it can be looked at, and one start makes all well.
    assert still_alive(below, 10.0) == []
    looked = clone.start("status")
    assert looked.status in (0, 1, 3, 4) and "Traceback" not in looked.said, looked.said
    assert looked.seconds < 10
    began = time.monotonic()
    again = clone.start("start", timeout=START)
    recovered = time.monotonic() - began
    assert again.status == 0, again.said
    pair = Pair.of(clone)
    assert len(clone.containers()) == 2, clone.containers()
    assert pair.completes()
    assert len(watchers(clone)) == 1
    assert [pair.launch_id in each for each in clone.secrets()] == [True], clone.secrets()
    step = f"{events[-1]['step']} {events[-1]['event']}" if events else ""
    outcomes.append(
        Outcome(point, round(after, 2), step, ended, looked.status, round(recovered, 1))
    )
