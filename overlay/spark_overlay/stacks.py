"""All Python stacks of a running rank, on its own standard error: the log that is read anyway.

Each process of ours answers SIGUSR1 so (`install`). ``python -m spark_overlay.stacks [PID …]`` asks
every process of its container, or those named, and says which; one that does not catch the signal
would be killed by it and is left alone. vLLM itself has no use for this signal. The answer is given
by faulthandler's C code, so also by a process that is stuck in C or holds the interpreter's lock.

Nothing but the standard library is imported: it runs where neither torch nor vllm can.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

SIGNAL = signal.SIGUSR1
STDERR = 2  # the descriptor: vLLM puts an object of its own in the place of sys.stderr
PATIENCE = 5.0  # seconds for one process to write


def install() -> None:
    """Have this process write the stacks of all its threads when it is asked to. Repeatable."""
    faulthandler.register(SIGNAL, file=STDERR, all_threads=True, chain=False)


def catches(pid: int) -> bool:
    """Whether the process has a handler for the signal, by the mask that the kernel shows."""
    return _has(_status(pid).get("SigCgt", "0"))


def ask(pid: int, patience: float = PATIENCE) -> str:
    """Have one process write its stacks, and wait until it did; what became of it, in words."""
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        return f"could not be asked: {error.strerror}"
    try:
        if not catches(pid):
            return "does not answer to this signal, so it was not sent"
        name = _status(pid).get("Name", "")
        at_rest = _blocking(pid)
        _announce(pid, f"[spark] stacks of pid {pid} ({name}):\n")
        try:
            signal.pidfd_send_signal(handle, SIGNAL)
        except OSError as error:
            return f"could not be asked: {error.strerror}"
        # Two at a time would write into each other's lines.
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            # Taken when it is pending no more, written when no thread is in the handler any more,
            # which has the signal blocked.
            time.sleep(0.02)
            if not _pending(pid) and not _blocking(pid) - at_rest:
                return "wrote its stacks"
        return f"was asked, but is not done after {patience:g} s ({_state(pid)})"
    finally:
        os.close(handle)


def all_pids() -> list[int]:
    """Every process that can be seen from here, but for this one."""
    found = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in found if pid != os.getpid()]


def main(argv: Sequence[str]) -> int:
    """Ask the processes named, without names all; 0 if at least one wrote its stacks."""
    if argv:
        if not all(word.isdecimal() for word in argv):
            print("usage: python -m spark_overlay.stacks [PID ...]", file=sys.stderr)
            return 2
        pids: Iterable[int] = [int(word) for word in argv]
    elif "SPARK_LAUNCH_ID" in os.environ:
        pids = [pid for pid in all_pids() if catches(pid)]
    else:
        print(
            "this is no rank's container (SPARK_LAUNCH_ID is not set), and strangers are not "
            "signalled: name the processes to ask",
            file=sys.stderr,
        )
        return 2
    wrote = 0
    for pid in pids:
        name = _status(pid).get("Name", "gone")
        said = ask(pid)
        wrote += said == "wrote its stacks"
        print(f"pid {pid} ({name}) {said}", flush=True)
    if not wrote:
        print("no process wrote its stacks")
    return 0 if wrote else 1


def _announce(pid: int, line: str) -> None:
    """Write a line into the other's standard error, where that is a pipe or a file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
    with contextlib.suppress(OSError):
        into = os.open(f"/proc/{pid}/fd/{STDERR}", flags)
        try:
            os.write(into, line.encode())
        finally:
            os.close(into)


def _status(where: int | Path) -> dict[str, str]:
    """/proc/PID/status as a mapping, empty when the process is gone."""
    path = where if isinstance(where, Path) else Path(f"/proc/{where}/status")
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    rows = (row.partition(":") for row in text.splitlines())
    return {key: value.strip() for key, _, value in rows}


def _has(mask: str) -> bool:
    return bool(int(mask, 16) >> (SIGNAL - 1) & 1)


def _pending(pid: int) -> bool:
    return _has(_status(pid).get("ShdPnd", "0"))


def _blocking(pid: int) -> set[str]:
    """The threads that have the signal blocked."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return set()
    return {
        tid
        for tid in threads
        if _has(_status(Path(f"/proc/{pid}/task/{tid}/status")).get("SigBlk", "0"))
    }


def _state(pid: int) -> str:
    return _status(pid).get("State", "gone")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
