"""The sha256 of a checkpoint's index, which must be one on both nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from spark_overlay.verify.report import Check, Outcome

INDEX = "model.safetensors.index.json"
NAME = "checkpoint index"


def checks(folder: Path) -> Iterator[Check]:
    """``found`` of the line is the hash."""
    yield Check(NAME, "cpu", lambda: Outcome(True, digest(folder / INDEX), "equal on both nodes"))


def digest(path: Path) -> str:
    """Raises OSError where it cannot be read."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
