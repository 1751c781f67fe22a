"""What lines of a rank's log tell, and which processes compile. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

LAST_LINES = 20  # that are kept of an ended rank's log

# What every Python with torch prints on its way out.
NOISE = (
    "nanobind: leaked",
    "leaked function",
    "leaked type",
    "skipped remainder",
    "nanobind: this is likely",
    "nanobind.readthedocs.io",
    "resource_tracker",
)

# Lines that come whether or not a rank gets anywhere: vLLM's heartbeat of a stuck queue, the access
# lines of our own polls, our own notes, the memory gauge's ticks, and the stacks that we ask for.
_IDLE = re.compile(
    r"shm_broadcast\.py"
    r"|No available shared memory broadcast block found"
    r'|"GET /(?:health|v1/models|metrics)\b'
    r"|^\s*\[spark\]"
    r"|\[mem\] still "
    r"|^(?:Current thread|Thread) 0x[0-9a-f]+"
    r'|^  File "[^"]*", line \d+ in '
    r"|^\s*$"
)

COMPILERS = frozenset(
    (
        "nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink", "cuobjdump", "nvdisasm",
        "cc1plus", "cc1", "collect2", "g++", "gcc", "c++", "cc", "clang", "clang++", "as", "ld",
        "ld.gold", "ld.lld", "ld.bfd", "lld", "ninja", "make", "cmake",
    )
)  # fmt: skip
# aarch64-linux-gnu-g++-13, gcc-12, clang-18
_PREFIX_OR_VERSION = re.compile(r"^(?:[a-z0-9_]+-linux-gnu-)|(?:-\d+(?:\.\d+)*)$")


def telling(lines: Iterable[str]) -> tuple[str, ...]:
    """The last lines, without those that every Python with torch prints on its way out."""
    kept = [line for line in lines if line.strip() and not any(mark in line for mark in NOISE)]
    return tuple(kept[-LAST_LINES:])


def progress(line: str) -> bool:
    """Whether a line says that the rank got somewhere."""
    return _IDLE.search(line) is None


def compiles(command: str) -> bool:
    """Whether a process of that name (as /proc/PID/comm has it, 15 characters) is a compiler."""
    return _PREFIX_OR_VERSION.sub("", command) in COMPILERS or command in COMPILERS


def compiling(rows: Iterable[tuple[str, float]]) -> float:
    """CPU seconds of the compilers among (name, CPU seconds) of processes."""
    return sum(seconds for name, seconds in rows if compiles(name))
