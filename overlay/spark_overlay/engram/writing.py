"""What the two writers of a rank's own files share (``pack``, ``loading.prepare``): plan, room,
signals. No numpy, no torch."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SPARE_BYTES = 1 << 28  # left free on the drive beside the files


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to do, in bytes: of all files ``total``, still to be written ``left``; ``free``
    on the drive, where ``needed`` must be. ``absent`` names the files that are not whole."""

    folder: str
    total: int
    left: int
    free: int
    needed: int
    absent: tuple[str, ...]


def free_bytes(folder: Path) -> int:
    """Bytes for this user on the drive of the folder, or of what is to hold it."""
    while not folder.exists():
        folder = folder.parent
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGINT: what is on the drive by then is kept."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
