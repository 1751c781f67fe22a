"""/proc as the guard reads it: sizes, pressure, processes. ``root`` stands for /proc itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.watch.guard.core import Process, Sample

PROC = Path("/proc")
SMALL = 8 << 20  # bytes below which a process is no matter of the guard's
#: What the kernel accounts for; the rest of MemTotal is the driver's.
ACCOUNTED = (
    "MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "Slab", "KernelStack", "PageTables",
    "SecPageTables", "Percpu", "Bounce", "WritebackTmp", "Hugetlb", "VmallocUsed", "Zswap",
)  # fmt: skip


def sizes(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes. Raises ValueError without the lines that every Linux has."""
    found: dict[str, int] = {}
    for row in text.splitlines():
        name, _, rest = row.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) << 10
    if missing := {"MemTotal", "MemFree", "MemAvailable"} - found.keys():
        raise ValueError(f"/proc/meminfo has no line {min(missing)}")
    return found


def full(text: str) -> float | None:
    """The share of ten seconds in which all waited for memory, percent; None if it says none."""
    for row in text.splitlines():
        words = row.split()
        if words[:1] == ["full"]:
            for word in words[1:]:
                name, _, value = word.partition("=")
                if name == "avg10":
                    try:
                        return float(value)
                    except ValueError:
                        return None
    return None


def pressure(root: Path = PROC) -> float | None:
    """None where the kernel was built or booted without PSI."""
    try:
        return full((root / "pressure" / "memory").read_text())
    except OSError:
        return None


def processes(root: Path = PROC, small: int = SMALL) -> Iterator[Process]:
    """All that have some memory of their own; one that ends meanwhile is left out."""
    for entry in root.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            found = process(entry)
        except (OSError, ValueError, IndexError):
            continue
        if found.size >= small:
            yield found


def process(entry: Path) -> Process:
    """Of one /proc/PID. Raises OSError when it is gone."""
    status = dict(_rows((entry / "status").read_text(errors="replace")))

    def kib(key: str) -> int:
        words = status.get(key, "0").split()
        return int(words[0]) << 10 if words else 0

    private = kib("RssAnon") + kib("VmSwap")
    if "RssAnon" not in status and "VmRSS" in status:  # an older kernel
        private = kib("VmRSS") + kib("VmSwap")
    name = status.get("Name", "?")
    return Process(int(entry.name), ticks(entry), name, private, kib("RssShmem"))


def _rows(text: str) -> Iterator[tuple[str, str]]:
    for row in text.splitlines():
        name, _, value = row.partition(":")
        yield name, value.strip()


def ticks(entry: Path) -> int:
    """When it was started, in clock ticks since boot."""
    return int(_stat(entry)[19])


def zombie(entry: Path) -> bool:
    return _stat(entry)[0] in ("Z", "X")


def parent(entry: Path) -> int:
    return int(_stat(entry)[1])


def _stat(entry: Path) -> list[str]:
    text = (entry / "stat").read_text(errors="replace")
    return text[text.rindex(")") + 2 :].split()


def tree(pid: int, root: Path = PROC) -> set[int]:
    """``pid`` and all below it."""
    children: dict[int, list[int]] = {}
    for entry in root.iterdir():
        if entry.name.isdigit():
            try:
                children.setdefault(parent(entry), []).append(int(entry.name))
            except (OSError, ValueError, IndexError):
                continue
    found, todo = {pid}, [pid]
    while todo:
        fresh = [child for child in children.get(todo.pop(), []) if child not in found]
        found.update(fresh)
        todo += fresh
    return found


def look(own: Callable[[], set[int]], at: float, root: Path = PROC) -> Sample:
    """One sample. ``own``: pids of the server. Raises OSError or ValueError without /proc."""
    size = sizes((root / "meminfo").read_text())
    mine, every = own(), list(processes(root))
    shmem = size.get("Shmem", 0)
    # Without the kernel's account of anonymous memory the rest says nothing.
    rest = size["MemTotal"] - sum(size.get(name, 0) for name in ACCOUNTED)
    return Sample(
        at=at,
        available=size["MemAvailable"],
        free=size["MemFree"],
        cached=max(0, size.get("Cached", 0) + size.get("Buffers", 0) - shmem),
        shmem=shmem,
        driver=max(0, rest) if "AnonPages" in size else 0,
        swap_used=max(0, size.get("SwapTotal", 0) - size.get("SwapFree", 0)),
        full=pressure(root),
        own=tuple(each for each in every if each.pid in mine),
        others=tuple(each for each in every if each.pid not in mine),
    )
