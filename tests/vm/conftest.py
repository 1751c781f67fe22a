"""Two guests for the whole session, and the record of a whole run: last_run.json beside this file.

Without root or a tool they need, all tests here are skipped with the reason; where
SPARK_TEST_DEMAND is set that is a failure.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for place in (HERE.parent / "story", HERE.parent / "rig", HERE):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import base  # noqa: E402
import record  # noqa: E402
from guests import Guests  # noqa: E402
from vm_clone import VmClone  # noqa: E402

_record = record.Record(HERE / "last_run.json", HERE / "test_vm.py")
_clones: list[VmClone] = []


def obstacle() -> str:
    """Why this machine cannot have the guests; empty where it can."""
    if os.geteuid() != 0:
        return "the guests need root: debootstrap makes their disk, a namespace holds their network"
    if platform.machine() != "x86_64":
        return f"the guests are x86-64 machines as this one must be, which is {platform.machine()}"
    lacks = base.missing()
    return f"the guests need {lacks}" if lacks else ""


@pytest.fixture(scope="session")
def guests() -> Iterator[Guests]:
    if why := obstacle():
        if os.environ.get("SPARK_TEST_DEMAND"):
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    made = Guests()
    made.up()
    _record.machines(made)
    try:
        yield made
    finally:
        made.down()


@pytest.fixture
def saw(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``saw(what=…)`` puts what the test has seen into the record."""
    return functools.partial(_record.saw, request.node.name)


@pytest.fixture(scope="session")
def clone(guests: Guests) -> VmClone:
    made = VmClone(guests)
    _clones.append(made)
    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure: what the last commands said, and what the ranks logged."""
    report = yield
    _record.of(report)
    if report.failed:
        for clone in _clones:
            report.sections += clone.account()
    return report


def pytest_sessionfinish() -> None:
    _record.write()
