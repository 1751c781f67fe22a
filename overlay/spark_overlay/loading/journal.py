"""How far a prepared file's writing is, so that a stopped one goes on. No torch.

``NAME.progress`` beside ``NAME.tmp`` says how many of the plan's blocks are on the drive, and by a
hash which plan: the header that is written, each block that is read, and size and time of the files
that they are read from. What was said under another plan counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spark_overlay.loading.plan import Block


def plan_hash(front: bytes, blocks: Sequence[Block]) -> str:
    """SHA-256 in hex. Raises OSError for a file that is gone."""
    said = hashlib.sha256(front)
    file = None
    for block in blocks:
        if block.file != file:
            file, found = block.file, block.file.stat()
            said.update(repr((str(file.name), found.st_size, found.st_mtime_ns)).encode())
        said.update(repr((block.begin, block.length)).encode())
    return said.hexdigest()


@dataclass(frozen=True, slots=True)
class Journal:
    """Of the file ``target`` while it has ``size`` bytes and is written by the plan ``plan``."""

    target: Path
    size: int
    plan: str

    @property
    def path(self) -> Path:
        return self.target.with_name(self.target.name.removesuffix(".tmp") + ".progress")

    def read(self) -> tuple[int, int]:
        """Blocks that are on the drive, and the bytes that they gave; 0, 0 without a record of this
        plan, or without the file."""
        try:
            said = json.loads(self.path.read_bytes())
            if said["plan"] != self.plan or self.target.stat().st_size != self.size:
                return 0, 0
            blocks, done = int(said["blocks"]), int(said["bytes"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0
        return (blocks, done) if blocks > 0 and 0 <= done <= self.size else (0, 0)

    def write(self, blocks: int, done: int) -> None:
        """What was written before must be on the drive already."""
        fresh = self.path.with_name(self.path.name + ".tmp")
        with fresh.open("w") as file:
            json.dump({"plan": self.plan, "blocks": blocks, "bytes": done}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
