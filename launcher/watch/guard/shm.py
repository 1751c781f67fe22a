"""Shared memory that a killed server leaves: files in /dev/shm hold memory until they are removed.

A container of ours has a /dev/shm of its own that goes with it; a plain process tree, or a
container with the host's, has not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

SHM = Path("/dev/shm")
GONE = " (deleted)"


def used(pids: Iterable[int], root: Path = Path("/proc"), shm: Path = SHM) -> set[Path]:
    """Files of this node's ``shm`` that the processes have mapped or open. Those of processes that
    we may not look into, or that have another /dev/shm, are not among them."""
    found: set[Path] = set()
    for pid in pids:
        entry = root / str(pid)
        with contextlib.suppress(OSError):
            found |= _of(entry, shm)
    return found


def _of(entry: Path, shm: Path) -> set[Path]:
    names = set()
    for row in (entry / "maps").read_text(errors="replace").splitlines():
        words = row.split(maxsplit=5)
        if len(words) == 6:
            names.add(words[5])
    for link in (entry / "fd").iterdir():
        with contextlib.suppress(OSError):
            names.add(os.readlink(link))
    here = shm.stat()
    found = set()
    for name in names:
        path = Path(name)
        if path.parent != shm or name.endswith(GONE):
            continue
        with contextlib.suppress(OSError):
            theirs = (entry / "root" / str(shm).lstrip("/")).stat()
            if (theirs.st_dev, theirs.st_ino) == (here.st_dev, here.st_ino):
                found.add(path)
    return found


def clean(left: Iterable[Path], root: Path = Path("/proc"), shm: Path = SHM) -> list[Path]:
    """Remove those of ``left`` that no living process uses; which they were."""
    pids = [int(entry.name) for entry in root.iterdir() if entry.name.isdigit()]
    busy = used(pids, root, shm)
    gone = []
    for path in sorted(set(left) - busy):
        with contextlib.suppress(OSError):
            path.unlink()
            gone.append(path)
    return gone
