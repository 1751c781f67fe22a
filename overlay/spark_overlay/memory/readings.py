"""What a rank can say of memory: the node's, its own and the GPU allocator's. No torch, no vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
PROC = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")

#: Bytes that the GPU allocator has reserved and given out; None where there is no GPU.
Cuda = Callable[[], tuple[int, int] | None]


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes. ``cached`` is page cache that can be given back; ``rss`` is this process's."""

    available: int
    free: int
    cached: int
    rss: int
    cuda: tuple[int, int] | None = None


def meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes, the lines in kB only. Raises ValueError without MemAvailable."""
    found: dict[str, int] = {}
    for row in text.splitlines():
        name, _, rest = row.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) << 10
    if missing := {"MemAvailable", "MemFree"} - found.keys():
        raise ValueError(f"/proc/meminfo has no line {min(missing)}")
    return found


def read(cuda: Cuda = lambda: None, proc: Path = PROC) -> Reading:
    """Raises OSError or ValueError where /proc does not answer as Linux's does."""
    sizes = meminfo((proc / "meminfo").read_text())
    resident = int((proc / "self" / "statm").read_text().split()[1]) * PAGE
    # What lies in tmpfs is counted as cached, but no one can take it away.
    cached = sizes.get("Cached", 0) + sizes.get("Buffers", 0) - sizes.get("Shmem", 0)
    return Reading(sizes["MemAvailable"], sizes["MemFree"], max(0, cached), resident, cuda())


def available(proc: Path = PROC) -> int:
    """MemAvailable of the node, bytes."""
    return meminfo((proc / "meminfo").read_text())["MemAvailable"]


def told(reading: Reading, lowest: int) -> str:
    """A reading in words; ``lowest`` is the least MemAvailable seen so far, bytes."""
    text = (
        f"{gib(reading.available)} GiB available (lowest {gib(lowest)}), {gib(reading.free)} free, "
        f"{gib(reading.cached)} page cache; this process {gib(reading.rss)} RSS"
    )
    if reading.cuda is not None:
        reserved, allocated = reading.cuda
        text += f", CUDA {gib(reserved)} reserved, {gib(allocated)} allocated"
    return text


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"
