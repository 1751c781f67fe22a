"""How far a long copy is, as lines that ``./start.sh pack`` reads. No torch, no vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable

LINE_SECONDS = 2.0


class Meter:
    """A line every few seconds: how much of all files, how fast, how long still. In bytes."""

    def __init__(self, say: Callable[[str], None], what: str, total: int) -> None:
        self._say, self._what, self._total = say, what, total
        self._done = self._moved = 0
        self._began = self._told = time.monotonic()

    def skip(self, size: int) -> None:
        """What was there already."""
        self._done += size

    def add(self, size: int) -> None:
        self._done += size
        self._moved += size
        now = time.monotonic()
        if now - self._told < LINE_SECONDS and self._done < self._total:
            return
        self._told = now
        rate = self._moved / max(now - self._began, 1e-9)
        self._say(
            f"{self._what} {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, "
            f"{rate / 1e9:.2f} GB/s, {(self._total - self._done) / rate:.0f} s left"
        )
