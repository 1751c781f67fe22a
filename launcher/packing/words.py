"""What ``spark_overlay.engram.pack`` is told, and what it says. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.clock import span

MODULE = "spark_overlay.engram.pack"
TP = 2
GB = 1e9

_PROGRESS = re.compile(
    r"(?:packed|verified) (?P<done>[0-9.]+) of (?P<total>[0-9.]+) GB,"
    r" (?P<rate>[0-9.]+) GB/s, (?P<left>[0-9]+) s left"
)


def argv(python: str, source: str, out: str, rank: int, extra: Sequence[str]) -> tuple[str, ...]:
    """One rank's packer; ``extra`` is --plan, --verify or nothing."""
    return (
        python, "-m", MODULE,
        "--source", source, "--out", out, "--rank", str(rank), "--tp", str(TP), *extra,
    )  # fmt: skip


def size(count: int) -> str:
    return f"{count / GB:.1f} GB" if count >= GB / 10 else f"{count / 1e6:.1f} MB"


@dataclass(frozen=True)
class Plan:
    """What a rank has to do, in bytes; ``absent`` are its files that are not whole yet."""

    total: int
    left: int
    free: int
    needed: int
    absent: tuple[str, ...]


def plan_of(lines: Sequence[str]) -> Plan | None:
    """The packer's JSON line among what it said."""
    for text in reversed(lines):
        if not text.startswith("{"):
            continue
        try:
            said = json.loads(text)
            return Plan(
                total=int(said["total"]),
                left=int(said["left"]),
                free=int(said["free"]),
                needed=int(said["needed"]),
                absent=tuple(map(str, said["absent"])),
            )
        except (ValueError, KeyError, TypeError):
            continue
    return None


@dataclass(frozen=True)
class Progress:
    done: float  # GB
    total: float
    rate: float  # GB/s
    left: int  # seconds

    def __str__(self) -> str:
        return f"{self.done:.1f}/{self.total:.1f} GB {self.rate:.2f} GB/s {span(self.left)} left"


def progress(line: str) -> Progress | None:
    found = _PROGRESS.fullmatch(line.strip())
    if found is None:
        return None
    return Progress(
        float(found["done"]), float(found["total"]), float(found["rate"]), int(found["left"])
    )


def both(standing: Mapping[str, Progress | str]) -> str:
    """One line for the terminal: "head 12.3/101.4 GB 1.20 GB/s 1 min 12 s left | worker …"."""
    return " | ".join(f"{role} {now}" for role, now in standing.items())


def translated(text: str, places: Mapping[str, str]) -> str:
    """A packer's words with its container's paths as the node has them."""
    if not places:
        return text
    inside = "|".join(re.escape(path) for path in sorted(places, key=len, reverse=True))
    return re.sub(rf"({inside})(?=[/\s:,)]|$)", lambda found: places[found[1]], text)
