"""A rank's packer as a process of this machine: the rehearsal's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.nodes.base import Node
from launcher.packing.run import Ended
from launcher.packing.words import PACK, What, argv

FOREVER = 7 * 86400.0  # seconds


class _Stop(Exception):
    """Ends the packer from within the waiting for it."""


@dataclass(frozen=True)
class LocalJob:
    role: str
    rank: int
    machine: Node
    python: Path
    source: Path
    out: Path
    what: What = PACK

    @property
    def where(self) -> str:
        return str(self.out)

    @property
    def node(self) -> str:
        return self.machine.name

    @property
    def key(self) -> str:
        return "REHEARSAL_DIR"

    def run(
        self, extra: Sequence[str], line: Callable[[str], None], stop: threading.Event
    ) -> Ended:
        def tick() -> None:
            if stop.is_set():
                raise _Stop

        words = argv(str(self.python), str(self.source), str(self.out), self.rank, extra, self.what)
        try:
            done = self.machine.run(words, timeout=FOREVER, line=line, tick=tick)
        except _Stop:
            return Ended(None, "was stopped")
        if done.status < 0:
            return Ended(None, f"was ended by signal {-done.status}")
        return Ended(done.status, f"ended with exit code {done.status}")
