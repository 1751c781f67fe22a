"""How far a long reading or writing of bytes has come, and when it ends. Pure."""

from __future__ import annotations

from collections import deque

from launcher.clock import span

WINDOW = 30.0  # seconds over which the rate is taken: links and drives have their moods


def size(count: float) -> str:
    """Bytes for a reader, in the units of drives and hubs: ``101.4 GB``, ``12 bytes``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{int(count)} bytes"


class Pace:
    """``told`` gives a line such as ``12.3 GB of 196.1 GB, 0.4 GB/s, 7 min 40 s left``."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._seen: deque[tuple[float, int]] = deque()

    def told(self, done: int, now: float) -> str:
        """``now`` in seconds of a clock that only goes forward."""
        done = min(done, self.total)
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()  # a file began anew
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[0][0] < now - WINDOW:
            self._seen.popleft()
        began, before = self._seen[0]
        text = f"{size(done)} of {size(self.total)}"
        if now - began < 1.0 or done == before:
            return text
        rate = (done - before) / (now - began)
        return f"{text}, {size(rate)}/s, {span((self.total - done) / rate)} left"
