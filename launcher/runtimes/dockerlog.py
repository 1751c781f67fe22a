"""A container's log, read on through Docker's API from where it was read to."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta

from launcher.libraries.sdk import docker
from launcher.runtimes import loglines
from launcher.runtimes.reach import Reach

FIRST = 5000  # lines back that the first read goes
KEPT = 20_000  # lines at most that wait to be taken
# The two outputs of a container are stamped before they are put in order, so a line may come after
# one with a later stamp: this much is read again.
OVERLAP = timedelta(seconds=1)


class DockerLog:
    """``new`` gives each line once; ``count`` is how many of all of them told of progress."""

    def __init__(self, reach: Reach, name: str, first: int = FIRST) -> None:
        self._reach = reach
        self._name = name
        self._first = first
        self._lock = threading.Lock()
        self._since: datetime | None = None
        self._floor = b""  # what is older was left out by the first read
        self._recent: set[bytes] = set()
        self._waiting: list[str] = []
        self.count = 0

    def read(self) -> None:
        """Read what came; raises as Reach.call does."""
        with self._lock:
            since = self._since

            def ask(client: docker.DockerClient) -> bytes:
                if since is None:
                    first = max(1, self._first)  # of none, there would be no stamp to go on from
                    got = client.api.logs(self._name, timestamps=True, tail=first)
                else:
                    start = since.timestamp()
                    got = client.api.logs(self._name, timestamps=True, since=start)
                return bytes(got)

            rows = [row for row in self._reach.call(ask).split(b"\n") if row]
            fresh = [row for row in rows if row not in self._recent and row >= self._floor]
            if not fresh:
                return
            self._floor = self._floor or fresh[0]
            self._since = max(_stamp(row) for row in rows) - OVERLAP
            edge = self._since.strftime("%Y-%m-%dT%H:%M:%S.%f").encode()
            self._recent = {row for row in rows if row >= edge}
            lines = [_line(row) for row in fresh] if since or self._first else []
            self.count += sum(map(loglines.progress, lines))
            self._waiting = (self._waiting + lines)[-KEPT:]

    def new(self) -> list[str]:
        """The lines read since the last call."""
        with self._lock:
            taken, self._waiting = self._waiting, []
            return taken


def _stamp(row: bytes) -> datetime:
    """Docker's stamp has nine digits of a second, of which six fit."""
    return datetime.fromisoformat(row.partition(b" ")[0].decode("ascii", "replace"))


def _line(row: bytes) -> str:
    """The text of a row; of a progress bar that was drawn over itself, the last."""
    text = row.partition(b" ")[2].decode("utf-8", "replace").rstrip("\r")
    return text.rpartition("\r")[2]
