"""Ranks under a keeper: real processes that end in every way they can."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from launcher import processes
from launcher.deployment import Rank
from launcher.errors import LauncherError
from launcher.runtimes.base import RankStatus
from launcher.runtimes.process import ProcessRuntime

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[ProcessRuntime]:
    made = ProcessRuntime(ROOT, tmp_path, {"PATH": "/usr/bin:/bin", "X": "x"}, patience=0.2)
    yield made
    for role in ("head", "worker"):
        made.stop(role, 0.0)


def rank(
    code: str,
    *,
    role: str = "head",
    env: Mapping[str, str] | None = None,
    secret: Mapping[str, str] | None = None,
) -> Rank:
    argv = (sys.executable, "-S", "-c", code)
    return Rank(0, role, "local", argv, env or {}, secret or {}, {})  # type: ignore[arg-type]


def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def ended(runtime: ProcessRuntime, role: str = "head") -> RankStatus:
    until(lambda: not runtime.inspect(role).running)
    return runtime.inspect(role)


def gone(pid: int) -> bool:
    process = processes.find(pid)
    return process is None or process.zombie


def words(runtime: ProcessRuntime, count: int) -> list[str]:
    """The words of the head's log, once there are ``count``."""
    log = runtime.log_path("head")
    until(lambda: len(log.read_text().split()) >= count)
    return log.read_text().split()


def test_an_exit_code_and_the_last_lines_are_kept(runtime: ProcessRuntime) -> None:
    assert runtime.inspect("head").state == "absent"
    # The noise at the end is left out, and our own line starts on a line of its own.
    code = "import sys; print('last words'); print(' - leaked function x', end=''); sys.exit(3)"
    pid = runtime.start(rank(code), "one")
    status = ended(runtime)
    assert (status.state, status.exit_code, status.signal) == ("exited", 3, None)
    assert (status.launch_id, status.pid) == ("one", pid)
    assert status.last_lines[0] == "last words"
    assert "head ended: exit code 3" in status.last_lines[1]
    assert status.ending() == "ended with exit code 3"


def test_a_killed_rank_is_told_by_its_signal(runtime: ProcessRuntime) -> None:
    pid = runtime.start(rank("import time; time.sleep(60)"), "one")
    assert runtime.inspect("head").running
    os.kill(pid, signal.SIGKILL)
    status = ended(runtime)
    assert (status.exit_code, status.signal) == (None, "SIGKILL")
    assert "signal SIGKILL" in runtime.log_path("head").read_text()


def test_a_rank_dumps_no_core_and_is_the_kernels_first_choice(runtime: ProcessRuntime) -> None:
    code = (
        "import resource, time\n"
        "print(*resource.getrlimit(resource.RLIMIT_CORE),"
        " open('/proc/self/oom_score_adj').read().strip(), flush=True)\n"
        "time.sleep(60)"
    )
    runtime.start(rank(code), "one")
    assert words(runtime, 3) == ["0", "0", "1000"]
    runtime.stop("head", 1.0)


def test_stop_asks_first_and_is_idempotent(runtime: ProcessRuntime) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(print('bye', flush=True)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    runtime.start(rank(code), "one")
    words(runtime, 1)
    status = runtime.stop("head", 10.0)
    assert (status.exit_code, status.note) == (0, "as asked")
    assert "bye" in runtime.log_path("head").read_text()
    assert runtime.inspect("head").state == "absent"
    assert runtime.stop("head", 10.0).state == "absent"


def test_a_deaf_rank_is_forced_after_the_grace(runtime: ProcessRuntime) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    runtime.start(rank(code), "one")
    words(runtime, 1)
    began = time.monotonic()
    status = runtime.stop("head", 0.3)
    assert 0.3 <= time.monotonic() - began < 3
    assert status.signal == "SIGKILL"


CHILDREN = """
import os, subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, 1); time.sleep(60)"]
near = subprocess.Popen(sleep)
apart = subprocess.Popen(sleep, start_new_session=True)
print(near.pid, apart.pid, flush=True)
if len(sys.argv) > 1: os._exit(7)
time.sleep(60)
"""


def test_what_a_stopped_rank_started_ends_with_it(runtime: ProcessRuntime) -> None:
    runtime.start(rank(CHILDREN), "one")
    children = [int(word) for word in words(runtime, 2)[:2]]
    assert not any(gone(pid) for pid in children)
    runtime.stop("head", 5.0)
    assert all(gone(pid) for pid in children)


def test_what_a_dead_rank_leaves_behind_is_ended(runtime: ProcessRuntime) -> None:
    polite = CHILDREN.replace("signal.signal(15, 1);", "")
    runtime.start(rank(polite.replace("len(sys.argv) > 1", "True")), "one")
    children = [int(word) for word in words(runtime, 2)[:2]]
    assert ended(runtime).exit_code == 7
    until(lambda: all(gone(pid) for pid in children))
    until(lambda: "ended 2 processes it left behind" in runtime.log_path("head").read_text())


def test_with_a_killed_keeper_the_rank_dies_and_the_rest_is_found(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    pid = runtime.start(rank(CHILDREN), "one")
    near, _ = (int(word) for word in words(runtime, 2)[:2])
    known = json.loads((tmp_path / "ranks" / "head" / "rank.json").read_text())
    os.kill(known["keeper"], signal.SIGKILL)
    until(lambda: gone(pid))
    status = ended(runtime)
    assert status.state == "exited"
    assert status.note == "its keeper process was killed"
    assert not gone(near)
    runtime.stop("head", 1.0)
    assert gone(near)


def test_a_pid_that_is_anothers_now_is_left_alone(runtime: ProcessRuntime, tmp_path: Path) -> None:
    stranger = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    try:
        found = processes.find(stranger.pid)
        assert found is not None
        record = {
            "role": "head", "rank": 0, "launch_id": "old", "pid": stranger.pid,
            "ticks": found.ticks - 100, "keeper": stranger.pid, "keeper_ticks": found.ticks - 100,
            "boot_id": processes.boot_id(), "argv": [], "log": "", "started": 0.0,
        }  # fmt: skip
        path = tmp_path / "ranks" / "head" / "rank.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(record))
        assert runtime.inspect("head").state == "exited"
        runtime.stop("head", 0.1)
        assert stranger.poll() is None

        # Nor is anything touched when the numbers come from before a reboot.
        record |= {"ticks": found.ticks, "keeper_ticks": found.ticks, "boot_id": "another"}
        path.write_text(json.dumps(record))
        assert "started anew" in runtime.inspect("head").note
        runtime.stop("head", 0.1)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_the_environment_is_the_ranks_own_and_no_secret_meets_a_file(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    code = (
        "import os\n"
        "print(sorted(set(os.environ) - {'LC_CTYPE'}), len(os.environ['KEY']), flush=True)"
    )
    runtime.start(rank(code, env={"A": "1"}, secret={"KEY": "s3cret"}), "one")
    ended(runtime)
    assert runtime.log_path("head").read_text().startswith("['A', 'KEY', 'PATH'] 6\n")
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path


def test_one_rank_a_role_and_the_last_log_is_kept(runtime: ProcessRuntime, tmp_path: Path) -> None:
    runtime.start(rank("print('first', flush=True); import time; time.sleep(60)"), "one")
    words(runtime, 1)
    with pytest.raises(LauncherError, match="kept already"):
        runtime.start(rank("pass"), "two")
    assert runtime.inspect("head").launch_id == "one"
    runtime.stop("head", 5.0)
    runtime.start(rank("print('second', flush=True)"), "two")
    assert "first" in (tmp_path / "head.log.1").read_text()
    assert ended(runtime).launch_id == "two"
    assert "first" not in runtime.log_path("head").read_text()


def test_a_program_that_is_not_there_is_an_error_that_names_it(runtime: ProcessRuntime) -> None:
    lost = Rank(0, "head", "local", ("/no/such/vllm",), {}, {}, {})
    with pytest.raises(LauncherError, match=r"/no/such/vllm: No such file"):
        runtime.start(lost, "one")
    assert runtime.inspect("head").state == "absent"


def test_follow_shows_the_end_then_new_lines_then_ends_with_the_rank(
    runtime: ProcessRuntime,
) -> None:
    code = (
        "import time\n"
        "for n in range(5): print('old', n, flush=True)\n"
        "time.sleep(0.4)\n"
        "print('new', flush=True)"
    )
    runtime.start(rank(code), "one")
    words(runtime, 10)
    got: list[str] = []
    runtime.follow("head", 2, got.append)
    assert got[:3] == ["old 3", "old 4", "new"]
    assert "head ended: exit code 0" in got[3]
