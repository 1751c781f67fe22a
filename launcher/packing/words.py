"""What the overlay's packers are told, and what they say: two modules, one language. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.clock import span

TP = 2
GB = 1e9

_PROGRESS = re.compile(
    r"(?:packed|verified) (?P<done>[0-9.]+) of (?P<total>[0-9.]+) GB,"
    r" (?P<rate>[0-9.]+) GB/s, (?P<left>[0-9]+) s left"
)


@dataclass(frozen=True)
class What:
    """What is written, from which of a node's sources. ``verb`` is ./start.sh's."""

    verb: Literal["pack", "prepare"]
    module: str
    source: Literal["engram", "model"]
    #: In words: what is looked at, what is written, what that is compared with and how.
    looked: str
    files: str
    original: str
    units: str
    #: What becomes of a run that was stopped.
    kept: str


PACK = What(
    "pack",
    "spark_overlay.engram.pack",
    "engram",
    "the tables",
    "packed files",
    "the shards",
    "row by row",
    "it goes on where it stopped",
)
PREPARE = What(
    "prepare",
    "spark_overlay.loading.prepare",
    "model",
    "the checkpoint",
    "prepared files",
    "the checkpoint",
    "byte by byte",
    "it goes on where it stopped",
)


def argv(
    python: str, source: str, out: str, rank: int, extra: Sequence[str], what: What = PACK
) -> tuple[str, ...]:
    """One rank's packer; ``extra`` is --plan, --verify or nothing."""
    return (
        python, "-m", what.module,
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
