"""What a soak saw, what it means, and how it is drawn. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.clock import span
from launcher.facts.base import gib
from launcher.watch.guard.core import STALLED

GIB = 1 << 30
NARROW = GIB // 2  # above the floor by less than this is tight
WIDTH = 60  # columns of a curve
ROWS = 12  # lines of the table of chunks
BARS = "▁▂▃▄▅▆▇█"

_CHUNK = re.compile(r"\[mem\] prefill (\d+) of (\d+) tokens, ([\d.]+) tok/s")


@dataclass(frozen=True)
class Point:
    """One look at one node. Seconds since the request went out; bytes; percent."""

    at: float
    available: int
    full: float | None = None


@dataclass(frozen=True)
class Chunk:
    """The prompt's first ``tokens`` were in at ``at`` seconds; ``rate`` since the chunk before."""

    at: float
    tokens: int
    total: int
    rate: float


Curves = Mapping[str, Sequence[Point]]


@dataclass(frozen=True)
class Soak:
    """``fault``: why there is no answer, empty if there is one. ``floor`` in bytes."""

    asked: int
    counted: int
    seconds: float
    floor: int
    curves: Curves
    chunks: Sequence[Chunk]
    fault: str = ""

    def lowest(self, node: str) -> Point:
        return min(self.curves[node], key=lambda point: point.available)

    @property
    def verdict(self) -> Verdict:
        return judge(self)


@dataclass(frozen=True)
class Verdict:
    """``word``: holds, tight, falls short or failed; only the last two are failures."""

    word: str
    why: str

    @property
    def code(self) -> int:
        return 0 if self.word in ("holds", "tight") else 1


def chunk(line: str, at: float) -> Chunk | None:
    """What a line of the head's log tells of the prompt, if it does."""
    found = _CHUNK.search(line)
    if found is None:
        return None
    return Chunk(at, int(found[1]), int(found[2]), float(found[3]))


def judge(soak: Soak) -> Verdict:
    if soak.fault:
        return Verdict("failed", soak.fault)
    if blind := [node for node, points in soak.curves.items() if not points]:
        return Verdict("failed", f"the memory of the {' and the '.join(blind)} could not be read")
    if soak.counted != soak.asked:
        return Verdict(
            "failed", f"the server counted {soak.counted} tokens of prompt, not {soak.asked}"
        )
    lows = {node: soak.lowest(node) for node in soak.curves}
    node = min(lows, key=lambda each: lows[each].available)
    low = lows[node]
    told = f"{node} went down to {gib(low.available)} available, floor {gib(soak.floor)}"
    if low.available < soak.floor:
        return Verdict("falls short", told)
    stalls = [p.full for points in soak.curves.values() for p in points if p.full is not None]
    if max(stalls, default=0.0) >= STALLED:
        return Verdict("tight", f"{told}, and processes waited {max(stalls):g} % of ten seconds")
    if low.available < soak.floor + NARROW:
        return Verdict("tight", told)
    return Verdict("holds", told)


def rows(soak: Soak) -> list[str]:
    """The report in plain text."""
    lines = ["GiB available, from the request to ten seconds after the answer"]
    for node, points in soak.curves.items():
        if not points:
            lines.append(f"  {node:<8} no look succeeded")
            continue
        low = soak.lowest(node)
        lines.append(
            f"  {node:<8}{points[0].available / GIB:7.2f} {curve(points)}"
            f"{points[-1].available / GIB:7.2f}   lowest {low.available / GIB:.2f}"
            f" at {low.at:.0f} s"
        )
    if soak.chunks:
        heads = "".join(f"{node:>9}" for node in soak.curves)
        lines += ["", f"{'tokens in':>11}{'seconds':>9}{'tok/s':>9}{heads}"]
        for each in thinned(soak.chunks, ROWS):
            have = "".join(_near(points, each.at) for points in soak.curves.values())
            lines.append(f"{each.tokens:>11}{each.at:>9.1f}{each.rate:>9.1f}{have}")
    elif not soak.fault:
        lines += [
            "",
            "no [mem] lines of the prompt in the head's log: speed is known as a whole only",
        ]
    if not soak.fault:
        lines += [
            "",
            f"{soak.counted} tokens in {span(soak.seconds)}:"
            f" {soak.counted / max(soak.seconds, 1e-9):.1f} tok/s in all",
        ]
    return lines


def curve(points: Sequence[Point], width: int = WIDTH) -> str:
    """One line of bars, the lowest of each column, over the time that the points span."""
    first, last = points[0].at, points[-1].at
    lows: list[int | None] = [None] * width
    for point in points:
        place = int((point.at - first) / max(last - first, 1e-9) * (width - 1))
        before = lows[place]
        lows[place] = point.available if before is None else min(before, point.available)
    held = points[0].available
    filled = []
    for low in lows:
        held = held if low is None else low
        filled.append(held)
    least, most = min(filled), max(filled)
    step = max(most - least, GIB // 16)  # what is nearly level is drawn level
    return "".join(BARS[min(7, (each - least) * 8 // step)] for each in filled)


def thinned(chunks: Sequence[Chunk], most: int) -> list[Chunk]:
    """At most ``most``, evenly, the last among them."""
    if len(chunks) <= most:
        return list(chunks)
    return [chunks[-1 - round(n * (len(chunks) - 1) / (most - 1))] for n in range(most)][::-1]


def _near(points: Sequence[Point], at: float) -> str:
    if not points:
        return f"{'?':>9}"
    nearest = min(points, key=lambda point: abs(point.at - at))
    return f"{nearest.available / GIB:>9.2f}"


def as_json(soak: Soak) -> dict[str, Any]:
    verdict = soak.verdict
    return {
        "asked": soak.asked,
        "counted": soak.counted,
        "seconds": soak.seconds,
        "floor": soak.floor,
        "verdict": verdict.word,
        "why": verdict.why,
        "curves": {
            node: [[point.at, point.available, point.full] for point in points]
            for node, points in soak.curves.items()
        },
        "chunks": [[each.at, each.tokens, each.rate] for each in soak.chunks],
    }
