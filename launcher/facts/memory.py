"""How much memory a node has left. MemAvailable is the measure: page cache comes back, CUDA's
own "free" on a GB10 does not count it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.facts.base import shell

_PRESSURE = re.compile(r"^(some|full) avg10=([0-9.]+)")


@dataclass(frozen=True)
class Memory:
    """Bytes; ``some``/``full`` are percent of the last ten seconds, None without PSI."""

    total: int
    available: int
    free: int
    cached: int
    swap_total: int
    swap_free: int
    some: float | None = None
    full: float | None = None


@dataclass(frozen=True)
class MemoryFact:
    key: str = "memory"
    argv: tuple[str, ...] = shell(
        "cat /proc/meminfo; cat /proc/pressure/memory 2>/dev/null || true"
    )
    takes_paths: bool = False

    def parse(self, text: str) -> Memory:
        sizes: dict[str, int] = {}
        pressure: dict[str, float] = {}
        for row in text.splitlines():
            if match := _PRESSURE.match(row):
                pressure[match[1]] = float(match[2])
                continue
            name, colon, rest = row.partition(":")
            words = rest.split()
            if colon and words and words[0].isdigit():
                sizes[name] = int(words[0]) * 1024
        try:
            return Memory(
                total=sizes["MemTotal"],
                available=sizes["MemAvailable"],
                free=sizes["MemFree"],
                cached=sizes.get("Cached", 0),
                swap_total=sizes.get("SwapTotal", 0),
                swap_free=sizes.get("SwapFree", 0),
                some=pressure.get("some"),
                full=pressure.get("full"),
            )
        except KeyError as error:
            raise ValueError(f"/proc/meminfo has no line {error.args[0]}") from None
