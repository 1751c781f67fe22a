"""Stacks of real processes, one stuck in C with the interpreter's lock, and of a rank that runs."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.deployment import Rank
from launcher.runtimes.process import ProcessRuntime

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "overlay" / "spark_overlay" / "stacks.py"
OVERLAY = {"PYTHONPATH": str(ROOT / "overlay"), "PATH": "/usr/bin:/bin"}
INSTALL = "from spark_overlay import stacks; stacks.install()\n"
READY = "import sys; print('ready', flush=True)\n"
# PyDLL does not give the interpreter's lock away, so no Python code runs in any thread meanwhile; a
# read goes on after the signal, as a wait for the GPU or for another process does.
STUCK = (
    "import ctypes, os\n"
    "def stuck_in_c(): ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)\n"
    "stuck_in_c()\n"
)
# Sleeps in C without the lock, and sleeps on after the signal.
DEEP = "import time\ndef asleep(): time.sleep(60)\nasleep()\n"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[subprocess.Popen[str]] = []

    def run(code: str, err: Path | None = None) -> subprocess.Popen[str]:
        with (err or tmp_path / f"err{len(made)}").open("ab") as out:
            child = subprocess.Popen(
                [sys.executable, "-S", "-c", code],
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env=OVERLAY,
            )
        made.append(child)
        assert child.stdout and child.stdout.readline() == "ready\n"
        return child

    yield run
    for child in made:
        child.kill()
        child.wait()


def ask(*pids: int, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """As in a container: by a plain Python, without the launcher's or the engine's libraries."""
    argv = [sys.executable, "-I", "-S", str(SCRIPT), *map(str, pids)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, env=env or {})


@pytest.mark.parametrize(
    "code, function", [(STUCK, "stuck_in_c"), (DEEP, "asleep")], ids=["holding the lock", "asleep"]
)
def test_a_process_stuck_in_c_tells_where(
    start: Start, tmp_path: Path, code: str, function: str
) -> None:
    err = tmp_path / "err"
    child = start(INSTALL + READY + code, err)
    time.sleep(0.2)  # until it is in there
    done = ask(child.pid)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("wrote its stacks\n") and f"pid {child.pid} (" in done.stdout
    told = err.read_text()
    assert told.startswith(f"[spark] stacks of pid {child.pid} (")
    assert f" in {function}\n" in told
    assert child.poll() is None


def test_every_thread_is_told(start: Start, tmp_path: Path) -> None:
    err = tmp_path / "err"
    code = (
        "import threading, time\n"
        "def waiting_elsewhere(): time.sleep(60)\n"
        "threading.Thread(target=waiting_elsewhere, daemon=True).start()\n"
    )
    child = start(INSTALL + code + READY + DEEP, err)
    assert ask(child.pid).returncode == 0
    told = err.read_text()
    assert "in waiting_elsewhere" in told and "in asleep" in told


def test_several_do_not_write_into_each_others_lines(start: Start, tmp_path: Path) -> None:
    err = tmp_path / "err"
    children = [start(INSTALL + READY + DEEP, err) for _ in range(3)]
    assert ask(*(child.pid for child in children)).returncode == 0
    blocks = err.read_text().split("[spark] stacks of pid ")[1:]
    assert [int(block.split()[0]) for block in blocks] == [child.pid for child in children]
    assert all(block.count(" in asleep\n") == 1 for block in blocks)


def test_one_that_would_be_killed_by_the_signal_is_left_alone(start: Start) -> None:
    plain = start(READY + DEEP)
    done = ask(plain.pid)
    assert done.returncode == 1
    assert "does not answer to this signal, so it was not sent" in done.stdout
    time.sleep(0.1)
    assert plain.poll() is None


def test_one_that_ignores_it_or_is_gone_is_told(start: Start) -> None:
    deaf = start("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n" + READY + DEEP)
    assert "does not answer" in ask(deaf.pid).stdout
    deaf.kill()
    deaf.wait()
    assert "could not be asked: No such process" in ask(deaf.pid).stdout


def test_one_that_cannot_run_is_told_in_time(start: Start) -> None:
    child = start(INSTALL + READY + DEEP)
    child.send_signal(19)  # SIGSTOP
    began = time.monotonic()
    done = ask(child.pid)
    assert time.monotonic() - began < 10
    assert "was asked, but is not done after 5 s" in done.stdout and "stopped" in done.stdout


def test_without_names_and_outside_a_container_nobody_is_signalled(start: Start) -> None:
    child = start(INSTALL + READY + DEEP)
    done = ask()
    assert done.returncode == 2 and "SPARK_LAUNCH_ID is not set" in done.stderr
    assert child.poll() is None


def test_in_a_container_all_that_answer_are_asked() -> None:
    """A PID namespace of its own, as a container has, with one that answers and one that does not.

    Needs root, as Docker does.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root for a PID namespace")
    code = (
        INSTALL + "import os, subprocess, sys\n"
        f"plain = subprocess.Popen([sys.executable, '-S', '-c', {DEEP!r}])\n"
        f"done = subprocess.run([sys.executable, '-S', '-m', 'spark_overlay.stacks'])\n"
        "print('plain', plain.poll(), 'asked', done.returncode, flush=True); plain.kill()\n"
    )
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        env={**OVERLAY, "SPARK_LAUNCH_ID": "l1"},
        timeout=30,
    )
    assert "plain None asked 0" in done.stdout
    assert done.stdout.count("wrote its stacks") == 1 and "pid 1 (" in done.stdout
    assert "[spark] stacks of pid 1 (" in done.stderr


def test_the_rehearsals_runtime_saves_the_log_with_the_stacks(tmp_path: Path) -> None:
    runtime = ProcessRuntime(ROOT, tmp_path / "logs", OVERLAY)
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', CHILD])\n"
    code = f"CHILD = {INSTALL + DEEP!r}\n" + INSTALL + child + READY + STUCK
    rank = Rank(0, "head", "local", (sys.executable, "-S", "-c", code), OVERLAY, {}, {})
    runtime.start(rank, "l1")
    try:
        deadline = time.monotonic() + 10
        while "ready" not in runtime.lines("head") and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # the child installs its handler
        saved = tmp_path / "stacks" / "head.log"
        said = runtime.stacks("head", saved)
        assert said.count("wrote its stacks") == 2, said
        told = saved.read_text()
        assert "in stuck_in_c" in told and "in asleep" in told
        assert runtime.inspect("head").running
    finally:
        runtime.stop("head", 0.0)
    assert "no process to ask" in runtime.stacks("head", tmp_path / "again")


def test_lines_and_activity_of_the_rehearsals_runtime(tmp_path: Path) -> None:
    (tmp_path / "cicc").symlink_to(sys.executable)
    runtime = ProcessRuntime(ROOT, tmp_path / "logs", OVERLAY)
    assert runtime.lines("head") == []
    busy = f"subprocess.Popen([{str(tmp_path / 'cicc')!r}, '-S', '-c', 'while True: pass'])\n"
    code = "import subprocess\nprint('one\\n[spark] two\\nthree')\n" + busy + READY + DEEP
    rank = Rank(0, "head", "local", (sys.executable, "-S", "-c", code), OVERLAY, {}, {})
    runtime.start(rank, "l1")
    try:
        deadline = time.monotonic() + 10
        seen: list[str] = []
        while "ready" not in seen and time.monotonic() < deadline:
            seen += runtime.lines("head")
        assert seen == ["one", "[spark] two", "three", "ready"]
        first = runtime.activity("head")
        time.sleep(1)
        second = runtime.activity("head")
        assert first and second and first.lines == second.lines == 3
        assert second.compiling > first.compiling
    finally:
        runtime.stop("head", 0.0)
    assert runtime.activity("head") is not None
