"""The record of one run: ``logs/runs/<utc>/events.jsonl`` for programs, ``log.txt`` for people."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from launcher import clock

SHORTEST = 6  # characters of a secret: a shorter one would be masked inside of ordinary words
KEPT = 40  # runs; the oldest go first


class Secrets:
    """Values that must never be written anywhere, and the mask put in their place."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._values: set[str] = set()
        for value in values:
            self.add(value)

    def add(self, value: str) -> None:
        if len(value) >= SHORTEST:
            self._values.add(value)
            # As it would look inside a JSON string.
            self._values.add(json.dumps(value)[1:-1])

    def hide(self, text: str) -> str:
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, "***")
        return text


def in_addresses(environ: Mapping[str, str]) -> list[str]:
    """Names and passwords in the environment's addresses of a hub and of proxies, as they are
    written there and as they are meant."""
    found = []
    for key, text in environ.items():
        if key != "HF_ENDPOINT" and not key.upper().endswith("_PROXY"):
            continue
        account = text.partition("://")[2] or text
        account = account.rpartition("@")[0]
        for each in (account, account.partition(":")[2]):
            found += [each, unquote(each)]
    return found


class Record:
    """Appends to both files of one run's folder.

    A line is one write to a file opened for appending, so that the launcher and the watcher may
    write to the same record.
    """

    def __init__(
        self,
        folder: Path,
        *,
        secrets: Secrets | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.secrets = secrets or Secrets()
        self._now = now

    def event(self, step: str, event: str, **fields: Any) -> None:
        """One thing that happened: ``time``, ``step``, ``event`` and the fields given."""
        at = clock.stamp(self._now())
        entry = {"time": at, "step": step, "event": event, **fields}
        self._append("events.jsonl", json.dumps(entry, default=str))
        told = "  ".join(f"{key}={value}" for key, value in fields.items())
        self._append("log.txt", f"{at} {step:<11} {event} {told}".rstrip())

    def text(self, step: str, line: str) -> None:
        """A line of output that belongs to ``step``: for log.txt only."""
        self._append("log.txt", f"{clock.stamp(self._now())} {step:<11} | {line}")

    def _append(self, name: str, line: str) -> None:
        data = (self.secrets.hide(line) + "\n").encode("utf-8", "backslashreplace")
        fd = os.open(self.folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)


class Unkept(Record):
    """Keeps nothing."""

    def _append(self, name: str, line: str) -> None:
        pass


def open_run(
    logs: Path, *, secrets: Secrets | None = None, now: Callable[[], float] = time.time
) -> Record:
    """Make a new folder under ``logs/runs`` and drop the oldest beyond ``KEPT``."""
    runs = logs / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    base = clock.folder(now())
    folder, count = runs / base, 1
    while True:
        try:
            folder.mkdir()
            break
        except FileExistsError:
            count += 1
            folder = runs / f"{base}-{count}"
    for old in sorted(path for path in runs.iterdir() if path.is_dir())[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return Record(folder, secrets=secrets, now=now)
