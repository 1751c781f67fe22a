"""One launcher at a time."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import lock
from launcher.errors import LauncherError

ROOT = Path(__file__).resolve().parents[1]

HOLD = """
import sys, time
from pathlib import Path
from launcher import lock
with lock.hold(Path(sys.argv[1]), "rehearse"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_the_second_is_refused_and_told_who_holds_it(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    with pytest.raises(LauncherError) as refusal, lock.hold(tmp_path / "lock", "stop"):
        pass
    assert f"pid {other.pid}" in refusal.value.found
    assert "verb rehearse" in refusal.value.found
    assert "since " in refusal.value.found
    holder = lock.holder(tmp_path / "lock")
    assert holder is not None
    assert (holder.pid, holder.verb) == (other.pid, "rehearse")


def test_a_killed_holder_leaves_nothing_behind(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert lock.holder(tmp_path / "lock") is None
    with lock.hold(tmp_path / "lock", "stop"):
        holder = lock.holder(tmp_path / "lock")
        assert holder is not None
        assert (holder.pid, holder.verb) == (os.getpid(), "stop")
    assert lock.holder(tmp_path / "lock") is None


def test_words_of_a_dead_process_whose_pid_is_anothers_now_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(f'{{"pid": {os.getpid()}, "ticks": 1, "verb": "rehearse", "since": 0}}')
    assert lock.holder(path) is None
    assert lock.holder(tmp_path / "no lock") is None
