"""What both nodes' self-checks said, and whether that is enough to serve. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MODULE = "spark_overlay.verify"
INDEX = "checkpoint index"  # the check whose `found` is the hash of the checkpoint's index


@dataclass(frozen=True)
class Results:
    """Of one node. ``checks`` by name; ``whole``: its last line came, and counts them all."""

    checks: Mapping[str, Mapping[str, Any]]
    whole: bool

    @property
    def index(self) -> str:
        return str(self.checks.get(INDEX, {}).get("found", ""))

    @property
    def devices(self) -> list[str]:
        return sorted({str(check.get("on")) for check in self.checks.values()} - {"cpu"})


def read(lines: Sequence[str]) -> Results:
    """Of a container's log: what is no JSON object there is a library's chatter."""
    checks: dict[str, Mapping[str, Any]] = {}
    counted = None
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "check" in found:
            checks[str(found["check"])] = found
        elif isinstance(found, dict) and "done" in found:
            counted = found["done"]
    return Results(checks, bool(checks) and counted == len(checks))


def faults(both: Mapping[str, Results], ended: Mapping[str, str]) -> list[str]:
    """All that is wrong, in words. ``both`` by role; ``ended``: how each ended, "" for well."""
    found = []
    for role, results in both.items():
        for name, check in results.checks.items():
            if check.get("ok") is not True:
                said = check.get("error") or f"{check.get('found')}, limit {check.get('limit')}"
                found.append(f"{role}: {name} ({check.get('on')}): {said}")
        if not results.whole:
            how = ended[role] or "ended without a word"
            found.append(f"{role}: the self-check {how}, after {len(results.checks)} checks")
        elif ended[role] and not any(line.startswith(f"{role}: ") for line in found):
            found.append(f"{role}: the self-check {ended[role]}")
    if found:
        return found
    (one, first), (other, second) = both.items()
    for name in sorted(first.checks.keys() ^ second.checks.keys()):
        who = one if name in first.checks else other
        found.append(f"{name} was checked on the {who} alone")
    if first.index != second.index or not first.index:
        found.append(
            f"the checkpoint's index differs: {first.index[:16] or 'unknown'} on the {one}, "
            f"{second.index[:16] or 'unknown'} on the {other}"
        )
    return found
