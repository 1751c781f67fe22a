"""What came of a run of all tests here: when, with which versions, each test's outcome and seconds.

A run of some of the tests, or one that was skipped, leaves the record of the last whole run.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from clone import CHECKOUT

if TYPE_CHECKING:
    from guests import Guests


class Record:
    def __init__(self, path: Path, tests: Path) -> None:
        self.path = path
        self._wanted = set(re.findall(r"(?m)^def (test_\w+)", tests.read_text()))
        self._began = datetime.now(UTC)
        self._versions: Mapping[str, Any] = {}
        self._seconds: Mapping[str, float] = {}
        self._tests: dict[str, dict[str, Any]] = {}

    def machines(self, guests: Guests) -> None:
        """Called when both guests are up."""
        qemu = _said("qemu-system-x86_64", "--version")
        git = ("git", "-C", str(CHECKOUT))
        changes = " and changes" if _said(*git, "status", "--porcelain") else ""
        self._versions = {
            "checkout": _said(*git, "rev-parse", "--short=12", "HEAD") + changes,
            "qemu": (re.findall(r"version (\S+)", qemu) or [""])[0],
            **guests.base.versions,
        }
        self._seconds = {key: round(seconds, 1) for key, seconds in guests.took.items()}

    def of(self, report: pytest.TestReport) -> None:
        """One phase of a test; a test is as its worst phase, its seconds are its own."""
        name = report.nodeid.rpartition("::")[2]
        told = self._tests.setdefault(name, {"outcome": "passed", "seconds": 0.0})
        if report.outcome != "passed":
            told["outcome"] = report.outcome
        if report.when == "call":
            told["seconds"] = round(report.duration, 1)

    def saw(self, test: str, **facts: Any) -> None:
        """What a test has seen, for the reader of the record."""
        told = self._tests.setdefault(test, {"outcome": "passed", "seconds": 0.0})
        told.setdefault("saw", {}).update(facts)

    def write(self) -> None:
        if not self._versions or not set(self._tests) >= self._wanted:
            return
        told = {
            "date": self._began.isoformat(timespec="seconds"),
            "versions": self._versions,
            "seconds to be up": self._seconds,
            "seconds in all": round((datetime.now(UTC) - self._began).total_seconds(), 1),
            "tests": self._tests,
        }
        self.path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


def _said(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
