"""One clone for the whole story. Each file can also be run by itself.

What must hold at the end: the clone's ranks are stopped, and the engine, which the clone shared
with the checkout, has the checkout's overlay again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from clone import CHECKOUT, START, Clone, Ran, rehearsal_folder
from ranks import Pair

from launcher import rehearsal
from launcher.app import App
from launcher.console import Console
from launcher.record import Record, Secrets

MODEL = 'it\'s a "model" of $(touch pwned) `touch pwned` ; touch pwned'
KEY = "story-key-4711 $(touch pwned)"

_broken: list[str] = []
_clones: list[Clone] = []


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    try:
        shared = rehearsal_folder(os.environ)
    except AssertionError as error:
        pytest.fail(str(error), pytrace=False)
    folder = tmp_path_factory.mktemp("story")
    made = Clone.make(folder, shared, MODEL, KEY)
    _clones.append(made)
    try:
        yield made
    finally:
        try:
            ended = made.start("stop", timeout=120.0)
            assert ended.status == 0, ended.said
        finally:
            put_overlay_back(shared, folder)
            shutil.rmtree(shared / rehearsal.PACKED, ignore_errors=True)
            shutil.rmtree(made.root / ".venv", ignore_errors=True)


def put_overlay_back(shared: Path, notes: Path) -> None:
    """The overlay is installed in place, so the engine now imports the clone's. Run the checkout's
    own overlay step on it, outside the checkout's state: what the checkout recorded holds again.
    """
    app = App(CHECKOUT, os.environ, Console(), Secrets(), rehearsal.build)
    settings = app.settings([f"REHEARSAL_DIR={shared}"])
    record = notes / "overlay put back"
    record.mkdir()
    ctx, steps = rehearsal.build(app, settings, Record(record))
    overlay = next(step for step in steps if step.key == "overlay")
    if not overlay.done(ctx):
        overlay.do(ctx)


@pytest.fixture
def serving(clone: Clone) -> Pair:
    """The pair as it serves now; it is started first if it does not."""
    if clone.standing()["code"] != 0:
        ran = clone.start("rehearse", timeout=START)
        assert ran.status == 0, ran.said
    return Pair.of(clone.standing())


@pytest.fixture(autouse=True)
def story_goes_on() -> None:
    """Where the pair could not be brought up once, the rest would only wait for it."""
    if _broken:
        pytest.fail(f"not run: no pair could be brought up for {_broken[0]}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.when == "setup":
        _broken.append(item.nodeid)
    if report.failed and len(_broken) < 2:
        for made in _clones:
            report.sections += [(_title(ran), ran.said) for ran in made.history[-4:]]
            report.sections += [(f"end of {path}", text) for path, text in made.log_tails()]
    return report


def _title(ran: Ran) -> str:
    return f"{ran.words}: status {ran.status} after {ran.seconds:.1f} s"
