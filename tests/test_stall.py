"""When a booting pair counts as stuck, and what of its logs and processes says that it is not."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import pytest

from launcher.runtimes import loglines
from launcher.runtimes.base import Activity
from launcher.watch.stall import Stall

QUIET = Activity(5, 0.0)


def silence(stall: Stall, seconds: int, start: int = 0, seen: Activity | None = QUIET) -> float:
    """Look each second; when the verdict came."""
    for now in range(start, start + seconds):
        if stall.see(now, {"head": seen, "worker": seen}):
            return now
    return -1


def test_silence_is_told_at_the_limit_with_the_last_stages() -> None:
    stall = Stall(420)
    stall.see(0, {"head": QUIET, "worker": QUIET}, {"head": "weights are loaded", "worker": ""})
    assert silence(stall, 420, start=1) == 420
    told = stall.see(421, {"head": QUIET, "worker": QUIET})
    assert told is not None and told.seconds == 421
    assert told.stages == {"head": "weights are loaded", "worker": "nothing seen"}
    assert told.words() == (
        "no progress on either rank for 7 min 01 s; "
        "last seen: head: weights are loaded; worker: nothing seen"
    )


@pytest.mark.parametrize("moved", [Activity(6, 0.0), Activity(5, 1.0)])
def test_a_line_or_a_compilers_second_on_either_rank_starts_anew(moved: Activity) -> None:
    stall = Stall(100)
    assert silence(stall, 100) == -1
    for now in range(100, 200):
        assert stall.see(now, {"head": QUIET, "worker": moved}) is None
    assert stall.see(200, {"head": QUIET, "worker": moved}) is not None


def test_a_compiler_that_ended_is_progress_too() -> None:
    stall = Stall(10)
    stall.see(0, {"head": Activity(5, 90.0)})
    assert silence(stall, 9, start=1, seen=Activity(5, 90.0)) == -1
    assert stall.see(10, {"head": Activity(5, 0.0)}) is None


def test_a_node_that_cannot_be_asked_is_no_progress() -> None:
    stall = Stall(10)
    for now in range(10):
        seen = {"head": QUIET, "worker": None if now % 2 else QUIET}
        assert stall.see(now, seen) is None
    assert stall.see(10, {"head": QUIET, "worker": None}) is not None


def test_a_pause_of_the_launcher_is_not_the_ranks_silence() -> None:
    stall = Stall(420)
    stall.see(0, {"head": QUIET})
    assert stall.see(5000, {"head": QUIET}) is None
    assert stall.see(5001, {"head": QUIET}) is None


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError):
        Stall(0)


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=7) INFO 11-29 10:00:00 [shm_broadcast.py:878] No available shared memory"
        " broadcast block found in 60 seconds. This typically happens when",
        'INFO:     127.0.0.1:5000 - "GET /health HTTP/1.1" 503 Service Unavailable',
        "[spark] stacks of pid 7 (python3):",
        "Current thread 0x00007f2a (most recent call first):",
        '  File "/usr/lib/python3.11/threading.py", line 324 in wait',
        "   ",
    ],
)
def test_lines_that_come_anyway_are_no_progress(line: str) -> None:
    assert not loglines.progress(line)


@pytest.mark.parametrize(
    "line",
    [
        "Loading safetensors checkpoint shards:  10% Completed | 4/39 [00:10<01:20,  2.1s/it]",
        '  File "/usr/lib/python3.11/threading.py", line 324, in wait',
        'INFO:     127.0.0.1:5000 - "POST /v1/completions HTTP/1.1" 200 OK',
    ],
)
def test_lines_of_work_are_progress(line: str) -> None:
    assert loglines.progress(line)


def test_compilers_are_known_by_name_version_and_target() -> None:
    rows = [("cicc", 2.0), ("aarch64-linux-g", 1.0), ("g++-13", 4.0), ("python3", 99.0)]
    assert loglines.compiling(rows) == 6.0
    assert loglines.compiles("x86_64-linux-gnu-gcc-12") and loglines.compiles("cudafe++")
    assert not loglines.compiles("VLLM::Worker_TP")
