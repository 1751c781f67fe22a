"""The installation of the engine, broken off: nothing works on, and the next run begins it anew.

In a REHEARSAL_DIR to be thrown away. It takes from the package registry what a few seconds bring.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from clone import QUICK, Clone, Command
from ranks import children, still_alive

SOON = 1.0  # seconds: the next run begins at once, and must meet nobody in that folder


@pytest.fixture
def folder(clone: Clone, tmp_path: Path) -> Iterator[Path]:
    """A REHEARSAL_DIR without an engine; a half-made one of some 100 MB is not kept."""
    assert clone.start("stop", timeout=120.0).status == 0
    yield tmp_path
    shutil.rmtree(tmp_path)


def begin(clone: Clone, folder: Path) -> Command:
    return clone.begin("rehearse", "--set", f"REHEARSAL_DIR={folder}")


def installing(command: Command, *words: str) -> list[psutil.Process]:
    """Wait until the launcher runs ``python -m WORDS``; all that runs below it then."""
    command.reaches("engine")
    end = time.monotonic() + QUICK
    while time.monotonic() < end and command.process.poll() is None:
        below = children(command.pid)
        for process in below:
            with contextlib.suppress(psutil.Error):
                if tuple(process.cmdline()[1 : 2 + len(words)]) == ("-m", *words):
                    return below
        time.sleep(0.01)
    raise AssertionError(f"python -m {' '.join(words)} was not met:\n{command.said()}")


def test_a_broken_off_installation_is_begun_anew(clone: Clone, folder: Path) -> None:
    engine = folder / "engine"

    # kill -9 while the environment is made, which is done by a child's child.
    command = begin(clone, folder)
    installing(command, "ensurepip")
    time.sleep(0.5)
    working = children(command.pid)
    assert command.kill().status == 137
    assert still_alive(working, SOON) == []
    (engine / "half-made").touch()

    # kill -9 while pip downloads.
    command = begin(clone, folder)
    installing(command, "pip", "install")
    assert not (engine / "half-made").exists()
    time.sleep(3.0)
    working = children(command.pid)
    assert working
    assert command.kill().status == 137
    assert still_alive(working, SOON) == []
    (engine / "half-made").touch()

    # Ctrl-C.
    command = begin(clone, folder)
    working = installing(command, "pip", "install")
    assert not (engine / "half-made").exists()
    command.ctrl_c()
    left = command.wait(time.monotonic() - command.began + QUICK)
    assert left.status == 130, left.said
    assert "broken off; no rank runs" in left.err
    assert "./start.sh rehearse goes on where this stopped" in left.err
    assert still_alive(working, SOON) == []
    assert clone.start("status").status == 1
