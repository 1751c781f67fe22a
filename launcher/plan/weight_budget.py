"""``scripts/weight_budget.py``: what a rank holds, class by class, and the node's whole table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launcher.plan.overlay  # noqa: F401  (before spark_overlay)
from launcher.errors import LauncherError
from launcher.plan import pair
from launcher.plan.asked import asked
from launcher.plan.source import Source, of_directory, published
from launcher.plan.words import tokens
from launcher.settings.load import load
from launcher.settings.values import Settings
from spark_overlay.budget.buffers import MIB
from spark_overlay.budget.layouts import tp_faults
from spark_overlay.budget.node import GIB
from spark_overlay.budget.weights import ClassWeight, Part, total, weigh

MOST_RANKS = 64


@dataclass(frozen=True)
class Budget:
    """``ranks``: resident bytes of each; ``rows``: of the heaviest one."""

    source: Source
    tp: int
    part: Part
    rows: tuple[ClassWeight, ...]
    ranks: tuple[int, ...]

    @property
    def per_rank(self) -> int:
        return max(self.ranks)


def budget(source: Source, tp: int, *, draft: bool = True, vision: bool = True) -> Budget:
    """Raises LauncherError where ``tp`` ranks cannot share the model."""
    shape, contents = source.shape, source.contents
    if faults := tp_faults(shape, contents, tp):
        raise LauncherError(
            f"TP{tp} cannot hold {source.name}:\n  " + "\n  ".join(faults),
            "a tensor-parallel size that cuts EXL3 between blocks of 128: 1 or 2 for V4.1",
            "give --tp 1 or --tp 2",
        )
    part = Part.whole(shape, draft=draft, vision=vision)
    try:
        every = [weigh(contents, shape, part, tp, rank) for rank in range(tp)]
    except ValueError as error:
        raise LauncherError(
            str(error), "an EXL3 checkpoint of DeepSeek V4.1", "give another directory"
        ) from None
    heaviest = max(every, key=total)
    return Budget(source, tp, part, tuple(heaviest), tuple(map(total, every)))


def tell(found: Budget) -> Iterator[str]:
    unit, name = (GIB, "GiB") if found.per_rank >= GIB else (MIB, "MiB")

    def line(title: str, split: str, tensors: int, stored: int, mine: int) -> str:
        sizes = f"{stored / unit:>13.3f}{mine / unit:>13.3f}"
        return f"{title:<26}{split:<12}{tensors:>9}{sizes}"

    yield f"checkpoint: {found.source.name}"
    yield f"{'class':<26}{'cut by':<12}{'tensors':>9}{f'stored, {name}':>13}{f'rank, {name}':>13}"
    for row in found.rows:
        yield line(row.name, row.split, row.tensors, row.stored, row.resident)
    tensors, stored = (sum(r.tensors for r in found.rows), sum(r.stored for r in found.rows))
    yield line("all", "", tensors, stored, found.per_rank)
    held = [what for what, on in (("draft", found.part.draft), ("vision", found.part.vision)) if on]
    yield (
        f"TP{found.tp}: {found.per_rank / unit:.2f} {name} ({tokens(found.per_rank)} bytes) a rank,"
        f" with {' and '.join(held) or 'neither draft nor vision'}"
    )


def as_json(found: Budget) -> dict[str, Any]:
    return {
        "checkpoint": found.source.name,
        "tp": found.tp,
        "draft": found.part.draft,
        "vision": found.part.vision,
        "per_rank_bytes": found.per_rank,
        "per_rank_gib": round(found.per_rank / GIB, 3),
        "ranks_bytes": list(found.ranks),
        "stored_bytes": sum(row.stored for row in found.rows),
        "tensors": sum(row.tensors for row in found.rows),
        "classes": [
            {
                "class": row.name,
                "split": row.split,
                "tensors": row.tensors,
                "stored_bytes": row.stored,
                "resident_bytes": row.resident,
            }
            for row in found.rows
        ],
    }


def main(argv: Sequence[str], root: Path) -> int:
    """0; 2 for arguments that cannot be, 1 for a checkpoint that cannot."""
    args = _parser().parse_args(argv)
    try:
        settings = _settings(root)
        source = _source(args, settings)
        found = budget(source, args.tp, draft=not args.no_draft, vision=not args.text_only)
        # The node is the pair's, as the settings have it.
        made = _node(settings, source, args.tp)
    except LauncherError as error:
        print(f"ERROR\n{error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps({**as_json(found), "node": pair.as_json(made)}, indent=1))
        return 0
    for line in (*tell(found), "", *[*pair.tell(made)][1:]):
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/weight_budget.py",
        allow_abbrev=False,
        description="What each rank holds of an EXL3 checkpoint, from its headers alone; then where"
        " the memory of a Spark goes with the settings of .env.",
    )
    which = made.add_mutually_exclusive_group()
    which.add_argument("model", nargs="?", type=Path, metavar="MODEL_DIR", help="or MODEL_HOST")
    which.add_argument("--published", action="store_true", help="the published checkpoint")
    made.add_argument("--tp", type=_ranks, default=2, metavar="N", help="ranks (%(default)s)")
    made.add_argument("--text-only", action="store_true", help="without the vision tower")
    made.add_argument("--no-draft", action="store_true", help="without speculation")
    made.add_argument("--json", action="store_true", help="as JSON")
    return made


def _ranks(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) < 4 and 1 <= int(text) <= MOST_RANKS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST_RANKS}")


def _node(settings: Settings, source: Source, tp: int) -> pair.PairPlan:
    """Raises LauncherError where settings and checkpoint do not go together."""
    try:
        return pair.plan_pair(source, asked(settings, source, tp))
    except ValueError as error:
        raise LauncherError(
            str(error),
            "a checkpoint and settings that go together",
            "change what the first line names; ./start.sh config --explain shows each origin",
        ) from None


def _settings(root: Path) -> Settings:
    """Those of .env; the defaults where there is none, and none is made."""
    if (root / ".env").exists():
        return load(root, {})
    return Settings(root, (), ())


def _source(args: argparse.Namespace, settings: Settings) -> Source:
    if args.published:
        return published()
    return of_directory(args.model or settings.path("MODEL_HOST"))
