"""One rig for the whole session; what a test has broken is mended before the next.

Without root or a tool it needs, all tests of the rig are skipped with the reason; where
SPARK_TEST_DEMAND is set that is a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for place in (HERE.parent / "story", HERE):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from head_clone import HeadClone  # noqa: E402
from machine import Node  # noqa: E402
from rig import Rig, obstacle  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="100 points of kill -9, not 10")


_clones: list[HeadClone] = []


@pytest.fixture(scope="session")
def whole_rig() -> Iterator[Rig]:
    if why := obstacle():
        if os.environ.get("SPARK_TEST_DEMAND"):
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    made = Rig()
    made.up()
    try:
        yield made
    finally:
        made.down()


@pytest.fixture
def rig(whole_rig: Rig) -> Iterator[Rig]:
    yield whole_rig
    whole_rig.mend()


@pytest.fixture
def head(rig: Rig) -> Node:
    return rig.head


@pytest.fixture
def worker(rig: Rig) -> Node:
    return rig.worker


@pytest.fixture(scope="session")
def one_clone(whole_rig: Rig) -> HeadClone:
    clone = HeadClone.make(whole_rig)
    _clones.append(clone)
    return clone


@pytest.fixture
def clone(rig: Rig, one_clone: HeadClone) -> HeadClone:
    """The clone with the rig's own settings, and ranks that will serve."""
    one_clone.env()
    one_clone.stub()
    return one_clone


@pytest.fixture
def clean(clone: HeadClone) -> HeadClone:
    """The clone with no pair and nothing recorded, as after `git clone`."""
    clone.forget()
    return clone


@pytest.fixture
def serving(clone: HeadClone) -> HeadClone:
    """The clone with a pair that serves with the rig's own settings: the one of the test before
    where that has done nothing to it."""
    if clone.stood != clone.standing_still() or not clone.curl("/health").out.endswith("200"):
        ran = clone.start("start", timeout=120.0)
        assert ran.status == 0, ran.said
        clone.stood = clone.standing_still()
    return clone


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure: what the last commands of each clone said, and what the ranks logged."""
    report = yield
    if report.failed:
        for clone in _clones:
            report.sections += clone.account()
    return report
