"""The launch table that a tuner wrote: where it is, and whether it may serve. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import get_args

FOLDER, NAME = "tuned", "exl3.json"  # in a node's CACHE_ROOT
MODULE = "spark_overlay.exl3.cuda.tune"
VARIABLE = "SPARK_EXL3_TABLE"  # as spark_overlay.exl3.cuda.plan has it
MARK = "table "  # before the table, on a line of the tuner's


class NoTable(ValueError):
    """What a tuner said has no table that may serve."""


@dataclass(frozen=True)
class Tuned:
    """``text`` is the file; both nodes get these very bytes. ``groups`` and ``experts``: how many
    plans are in it; ``attention``: which class is to serve, where there was a choice."""

    text: bytes
    groups: int
    experts: int
    attention: str = ""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text).hexdigest()

    def __str__(self) -> str:
        told = f"{self.groups} groups of matrices and {self.experts} steps of experts beat the rule"
        return f"{told}; {self.attention} attention" if self.attention else told


def argv(tp: int = 2) -> tuple[str, ...]:
    return ("python3", "-m", MODULE, "--print", "--tp", str(tp))


def of_lines(lines: Sequence[str]) -> Tuned | None:
    """The table among what a tuner said; None where it found nothing better than the rule.

    Raises NoTable for one that no launch can follow, and where it told neither."""
    import launcher.plan.overlay  # noqa: F401  (before spark_overlay)
    from spark_overlay.attention.select import Kind  # only a tuner's end needs these
    from spark_overlay.exl3.cuda import plan

    said = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if len(said) != 1:
        raise NoTable(f"it told {len(said)} tables")
    if said[0].strip() == "null":
        return None
    try:
        value = json.loads(said[0])
        table = plan.parse(value, "the tuner's")
    except (ValueError, AttributeError) as error:
        raise NoTable(str(error)) from error
    attention = value.get("attention")
    if attention not in (None, *get_args(Kind)):
        raise NoTable(f"{table.name}: attention is {attention!r}; {' or '.join(get_args(Kind))}")
    if table.origin != "measured" or not (table.group or table.experts or attention):
        raise NoTable(f"{table.name}: nothing in it was measured ({table.origin})")
    text = (json.dumps(value, indent=1) + "\n").encode()
    return Tuned(text, len(table.group), len(table.experts), attention or "")


def path(cache_root: str) -> PurePosixPath:
    return PurePosixPath(cache_root) / FOLDER / NAME


def inside(digest: str) -> str:
    """Where a rank finds it in its container: another table is another argument of the rank."""
    return f"/tuned/exl3-{digest[:12]}.json"
