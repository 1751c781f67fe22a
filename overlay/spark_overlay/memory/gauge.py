"""``[mem]`` lines in the rank's log: one at each phase, and every few seconds in a long one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spark_overlay.memory.readings import Reading, told

MARK = "[mem]"
TICK = 10.0  # seconds
#: How lines begin that come whether or not the rank gets anywhere; the launcher's hang detector
#: (launcher/runtimes/loglines.py) does not take them for progress.
STILL = f"{MARK} still"


class Gauge:
    """``look`` reads memory, ``write`` gets each line; ``lowest`` is the least MemAvailable that
    any look found, in bytes (None before the first)."""

    def __init__(
        self,
        look: Callable[[], Reading],
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look, self._write, self._clock = look, write, clock
        self.lowest: int | None = None

    def seen(self) -> Reading:
        reading = self._look()
        low = reading.available
        self.lowest = low if self.lowest is None else min(self.lowest, low)
        return reading

    def mark(self, phase: str, *, begins: str = MARK) -> Reading:
        """Write a line under the name of a phase."""
        reading = self.seen()
        assert self.lowest is not None
        self._write(f"{begins} {phase}: {told(reading, self.lowest)}")
        return reading

    @contextmanager
    def during(self, phase: str, tick: float = TICK) -> Iterator[None]:
        """A line now, one every ``tick`` seconds until the block ends, none at its end."""
        self.mark(phase)
        began, over = self._clock(), threading.Event()

        def run() -> None:
            while not over.wait(tick):
                self.mark(f"{phase}, {self._clock() - began:.0f} s", begins=STILL)

        # A daemon: it must not keep a rank alive that fails meanwhile.
        thread = threading.Thread(target=run, name="mem-gauge", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
