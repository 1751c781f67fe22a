"""A log file, read on from where it was read to; a new one in its place is read from its start."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO

from launcher.runtimes import loglines

FIRST = 1 << 20  # bytes back that the first read goes
KEPT = 20_000  # lines at most that wait to be taken


class FileLog:
    """``new`` gives each line once; ``count`` is how many of all of them told of progress."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._source: BinaryIO | None = None
        self._rest = b""
        self._waiting: list[str] = []
        self.count = 0

    def read(self) -> None:
        with self._lock:
            self._take()
            if self._source is not None and replaced(self._path, self._source.fileno()):
                self._source.close()
                self._source = None
                self._take()

    def new(self) -> list[str]:
        """The lines read since the last call."""
        with self._lock:
            taken, self._waiting = self._waiting, []
            return taken

    def _take(self) -> None:
        if self._source is None:
            try:
                self._source = self._path.open("rb")
            except FileNotFoundError:
                return
            self._source.seek(max(0, self._source.seek(0, os.SEEK_END) - FIRST))
            self._rest = b""
        *whole, self._rest = (self._rest + self._source.read()).split(b"\n")
        lines = [_line(each) for each in whole]
        self.count += sum(map(loglines.progress, lines))
        self._waiting = (self._waiting + lines)[-KEPT:]


def _line(raw: bytes) -> str:
    """The text of a line; of a progress bar that was drawn over itself, the last."""
    return raw.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]


def replaced(path: Path, fd: int) -> bool:
    """Whether ``path`` is another file now than the one opened."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino)
