"""A check's outcome, and its line of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

DONE = "done"  # the key of the last line: how many checks there were


@dataclass(frozen=True)
class Outcome:
    """``found`` against ``limit``: the worst error and what is allowed, or values in words."""

    ok: bool
    found: Any
    limit: Any = 0


@dataclass(frozen=True)
class Check:
    """``on``: the device it runs on, "cpu" or a GPU's name."""

    name: str
    on: str
    run: Callable[[], Outcome]


def within(error: float, limit: float) -> Outcome:
    """NaN is outside of every limit."""
    return Outcome(bool(error <= limit), round(error, 9), limit)


def report(checks: Iterable[Check], emit: Callable[[str], None]) -> int:
    """Run all, one failing or not; 0, or 1 where one failed or there was none."""
    count = failed = 0
    for check in checks:
        line: dict[str, Any] = {"check": check.name, "on": check.on}
        try:
            outcome = check.run()
            line |= {"ok": outcome.ok, "found": outcome.found, "limit": outcome.limit}
        except Exception as error:  # a kernel that cannot be launched is a failed check
            line |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
        count += 1
        failed += not line["ok"]
        emit(json.dumps(line))
    emit(json.dumps({DONE: count, "failed": failed}))
    return int(failed > 0 or count == 0)
