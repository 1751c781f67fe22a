"""A line of read statistics every few seconds in which rows were read. No torch, no vLLM."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from spark_overlay.engram.store import RowStore, StoreStats

log = logging.getLogger("vllm.spark_overlay.engram")


def line(name: str, before: StoreStats, now: StoreStats, seconds: float) -> str:
    """What was read between two counts. Empty if nothing was looked up."""
    lookups, ids, rows, reads, size = (
        getattr(now, key) - getattr(before, key)
        for key in ("lookups", "ids", "rows", "reads", "bytes")
    )
    if not lookups:
        return ""
    spent = now.seconds - before.seconds
    return (
        f"Engram {name}: {lookups} lookups of {ids} ids in {seconds:.0f} s, {rows} distinct rows, "
        f"{reads} reads ({size / 2**20:.1f} MiB), {1e3 * spent / lookups:.2f} ms a lookup"
    )


class Reporter:
    """Logs every ``seconds`` what each named store did since, until the process ends."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = log.info,
    ) -> None:
        self.seconds, self._clock, self._write = seconds, clock, write
        self._stores: dict[str, RowStore] = {}
        self._before: dict[str, StoreStats] = {}
        self._at = clock()
        self._thread: threading.Thread | None = None

    def watch(self, stores: Mapping[str, RowStore]) -> None:
        """Report these stores from now on, too."""
        self._stores |= stores
        self._before |= {name: store.stats() for name, store in stores.items()}
        if self._thread is None and self.seconds > 0:
            # A daemon: it must not keep a rank alive that is done.
            self._thread = threading.Thread(target=self._run, name="engram-stats", daemon=True)
            self._thread.start()

    def report(self) -> None:
        now, since = self._clock(), self._at
        self._at = now
        for name, store in list(self._stores.items()):
            stats = store.stats()
            if text := line(name, self._before[name], stats, now - since):
                self._write(text)
            self._before[name] = stats

    def _run(self) -> None:
        while True:
            time.sleep(self.seconds)
            self.report()
