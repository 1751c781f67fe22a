"""Whether a booting pair has stopped getting anywhere. Pure: fed with activity and the clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.clock import span
from launcher.runtimes.base import Activity


@dataclass(frozen=True)
class Silence:
    """For how long no rank has got anywhere, and the last stage seen of each role."""

    seconds: float
    stages: Mapping[str, str] = field(default_factory=dict)

    def words(self) -> str:
        last = "; ".join(f"{role}: {stage}" for role, stage in self.stages.items())
        silent = f"no progress on either rank for {span(self.seconds)}"
        return f"{silent}; last seen: {last}" if last else silent


class Stall:
    """Silent for ``limit`` seconds: no new line that tells of progress, no compiler at work.

    A pause of the launcher itself (Ctrl-Z, a slow call) is no silence of the ranks: the time from
    one look to the next counts for a third of the limit at most.
    """

    def __init__(self, limit: float) -> None:
        if limit <= 0:
            raise ValueError("the limit is a positive number of seconds")
        self._limit = limit
        self._last: float | None = None
        self._silent = 0.0
        self._seen: dict[str, Activity] = {}
        self._stages: dict[str, str] = {}

    def see(
        self,
        now: float,
        seen: Mapping[str, Activity | None],
        stages: Mapping[str, str] | None = None,
    ) -> Silence | None:
        """The verdict once the limit is reached, None before.

        A role without activity (None: its node could not be asked) tells nothing either way.
        """
        for role, stage in (stages or {}).items():
            if stage:
                self._stages[role] = stage
        moved = False
        for role, activity in seen.items():
            if activity is not None and self._seen.get(role) != activity:
                self._seen[role] = activity
                moved = True
        if self._last is None or moved:
            self._silent = 0.0
        else:
            self._silent += min(max(0.0, now - self._last), self._limit / 3)
        self._last = now
        if self._silent < self._limit:
            return None
        told = {role: self._stages.get(role, "nothing seen") for role in seen}
        return Silence(self._silent, told)
