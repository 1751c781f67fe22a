"""Compares a directory with a list of files. One program for the head and the worker.

Stdlib only and of no other module: its source is what a node's ``python3`` is given to run, so that
nothing need be installed or left there. The question is one JSON object on stdin::

    {"directory": PATH, "level": "sizes" | "ends" | "sums", "threads": N,
     "files": [[NAME, SIZE, DIGEST], …], "known": {NAME: [SIZE, MTIME_NS, DIGEST], …}}

DIGEST is "sha256:…", "git:…" or empty, where any content is right and "sums" tells its sha256. A
digest in ``known`` stands for a file that still has that size and time. The answer is JSON lines:
``{"done": BYTES, "total": BYTES}`` twice a second while it reads, and one line for each file::

    {"file": NAME, "state": STATE, "size": N, "mtime_ns": N, "digest": D, "ends": D, "why": TEXT}

STATE is "ok", "missing", "size", "bytes" or "unreadable". "ends" reads the first and the last 4 KiB
and gives their sha256; "sums" reads what is not known, past the page cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PIECE = 8 << 20  # bytes
END = 4096  # bytes
BEAT = 0.5  # seconds


class Counter:
    """Bytes read so far, of all threads."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count


def check(
    directory: str, name: str, size: int, digest: str, level: str, known: Any, counter: Counter
) -> dict[str, Any]:
    """One file's line."""
    row: dict[str, Any] = {"file": name, "state": "ok"}
    path = os.path.join(directory, name)
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        link = os.path.lexists(path)
        return {**row, "state": "missing", "why": "a link to nothing" if link else ""}
    except OSError as error:
        return {**row, "state": "unreadable", "why": error.strerror or str(error)}
    row.update(size=found.st_size, mtime_ns=found.st_mtime_ns)
    if not stat.S_ISREG(found.st_mode):
        return {**row, "state": "unreadable", "why": "not a regular file"}
    if found.st_size != size:
        return {**row, "state": "size"}
    try:
        if level == "ends":
            row["ends"] = ends(path, size)
        elif level == "sums":
            kind = digest.partition(":")[0] or "sha256"
            had = known.get(name)
            if (
                had
                and list(had[:2]) == [found.st_size, found.st_mtime_ns]
                and had[2].partition(":")[0] == kind
            ):
                row["digest"] = had[2]
                counter.add(size)
            else:
                row["digest"] = summed(path, kind, found, counter)
            if digest and row["digest"] != digest:
                row["state"] = "bytes"
        elif not os.access(path, os.R_OK):
            return {**row, "state": "unreadable", "why": "permission denied"}
    except OSError as error:
        return {**row, "state": "unreadable", "why": error.strerror or str(error)}
    return row


def ends(path: str, size: int) -> str:
    with open(path, "rb", buffering=0) as source:
        first = source.read(END)
        source.seek(max(0, size - END))
        last = source.read(END)
    if len(first) != min(END, size) or len(last) != min(END, size):
        raise OSError("fewer bytes than its size says")
    return "sha256:" + hashlib.sha256(first + last).hexdigest()


def summed(path: str, kind: str, before: os.stat_result, counter: Counter) -> str:
    if kind == "git":
        total = hashlib.sha1(b"blob %d\0" % before.st_size, usedforsecurity=False)
    else:
        total = hashlib.sha256()
    buffer = memoryview(bytearray(PIECE))
    with open(path, "rb", buffering=0) as source:
        at = 0
        while count := source.readinto(buffer):
            total.update(buffer[:count])
            # On a Spark the GPU's driver cannot take memory back from the page cache.
            os.posix_fadvise(source.fileno(), at, count, os.POSIX_FADV_DONTNEED)
            at += count
            counter.add(count)
        after = os.fstat(source.fileno())
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise OSError("it changed while it was read")
    return "%s:%s" % (kind, total.hexdigest())  # noqa: UP031 - of old Pythons, too


def main() -> int:
    asked = json.load(sys.stdin)
    os.nice(10)
    level, directory = asked["level"], asked["directory"]
    lock, over = threading.Lock(), threading.Event()
    total = sum(size for _, size, _ in asked["files"]) if level == "sums" else 0
    counter = Counter(total)

    def tell(value: dict[str, Any]) -> None:
        with lock:
            print(json.dumps(value), flush=True)

    def beat() -> None:
        while not over.wait(BEAT):
            tell({"done": counter.done, "total": counter.total})

    def one(file: list[Any]) -> None:
        name, size, digest = file
        tell(check(directory, name, size, digest, level, asked.get("known", {}), counter))

    if total:
        threading.Thread(target=beat, daemon=True).start()
    # The largest first: the last one to be read is then a small one.
    files = sorted(asked["files"], key=lambda file: -file[1])
    with ThreadPoolExecutor(max(1, int(asked.get("threads", 1)))) as pool:
        list(pool.map(one, files))
    over.set()
    return 0


if __name__ == "__main__":
    sys.exit(main())
