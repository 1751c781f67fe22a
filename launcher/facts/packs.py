"""Packed Engram files and prepared weights: whose lie in a directory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from launcher.facts.base import HOME, shell

_NAME = re.compile(r"engram-l(\d+)-r(\d+)of(\d+)\.bin")
_WEIGHTS = re.compile(r"weights-r(\d+)of(\d+)\.safetensors")


@dataclass(frozen=True)
class Packs:
    """``sizes`` of the files that have their final name, in bytes."""

    sizes: dict[str, int] = field(default_factory=dict)

    def of(self, rank: int, tp: int = 2) -> tuple[str, ...]:
        """The names of this rank's files."""
        return tuple(
            name
            for name in sorted(self.sizes)
            if (found := _NAME.fullmatch(name)) and (int(found[2]), int(found[3])) == (rank, tp)
        )

    def weights(self, rank: int, tp: int = 2) -> bool:
        """Whether this rank's prepared weights are there."""
        return f"weights-r{rank}of{tp}.safetensors" in self.sizes


@dataclass(frozen=True)
class PacksFact:
    """Of the third path; a directory that is not there holds none."""

    key: str = "packs"
    argv: tuple[str, ...] = shell(
        'p=$3; [ -n "$p" ] || exit 0; ' + HOME + '; [ -d "$q" ] || exit 0; '
        'find -L "$q" -maxdepth 1 -type f '
        "\\( -name 'engram-l*-r*of*.bin' -o -name 'weights-r*of*.safetensors' \\) "
        "-printf '%s %f\\n'"
    )
    takes_paths: bool = True

    def parse(self, text: str) -> Packs:
        rows = (row.partition(" ") for row in text.splitlines() if row.strip())
        ours = (row for row in rows if _NAME.fullmatch(row[2]) or _WEIGHTS.fullmatch(row[2]))
        return Packs({name: int(size) for size, _, name in ours})
