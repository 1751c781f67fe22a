"""How far a rank's loading is: a plain line every few seconds, whether or not there is a terminal.

Lines come with the bytes and not by the clock, so a reader that hangs writes none, and the
launcher's hang detector sees it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

GIB = 1 << 30
EVERY = 10.0  # seconds


class Progress:
    """``total`` bytes will be read, of which ``kept`` stay on this rank. ``who`` begins the lines'
    text; ``write`` gets each."""

    def __init__(
        self,
        who: str,
        total: int,
        kept: int,
        write: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        every: float = EVERY,
    ) -> None:
        self._who, self._total, self._kept = who, total, kept
        self._write, self._clock, self._every = write, clock, every
        self.done = 0
        self._began = self._at = clock()
        self._before = 0
        self._say(f"{total / GIB:.2f} GiB to read, {kept / GIB:.2f} GiB of them to keep")

    def add(self, count: int) -> None:
        """``count`` bytes more were read and placed."""
        self.done += count
        now = self._clock()
        if now - self._at < self._every:
            return
        rate = (self.done - self._before) / max(now - self._at, 1e-9)
        left = (self._total - self.done) / max(rate, 1e-9)
        self._at, self._before = now, self.done
        share = 100 * self.done // max(self._total, 1)
        self._say(
            f"{self.done / GIB:.2f} of {self._total / GIB:.2f} GiB ({share} %), "
            f"{rate / GIB:.2f} GiB/s, {_time(left)} left"
        )

    def end(self) -> None:
        seconds = self._clock() - self._began
        rate = self.done / GIB / max(seconds, 1e-9)
        self._say(
            f"{self.done / GIB:.2f} GiB read in {seconds:.1f} s, {rate:.2f} GiB/s; "
            f"{self._kept / GIB:.2f} GiB kept"
        )

    def _say(self, text: str) -> None:
        self._write(f"[load] {self._who}: {text}")


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
