"""Numbers of a plan as they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import launcher.plan.overlay  # noqa: F401  (before spark_overlay)
from spark_overlay.budget.node import GIB, Row


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def tokens(count: int) -> str:
    return f"{count:,}"


def rows_of(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        yield f"  {row.name:<36}{gib(row.bytes):>8}  {row.basis}"
