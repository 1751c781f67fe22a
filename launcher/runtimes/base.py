"""The one shape of a runtime: it starts a rank, says how it fares, and ends it.

A runtime itself knows which rank it runs under a role; a launcher that was killed finds it again by
asking. There is one rank for a role at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # the rule of launcher.verbs
    from launcher.deployment import Rank


@dataclass(frozen=True)
class RankStatus:
    """How the rank of a role fares; ``absent`` when none was started since the last stop.

    ``unreachable`` when its node could not be asked, with the reason in ``note``: it may run.
    """

    role: str
    state: Literal["running", "exited", "absent", "unreachable"]
    launch_id: str = ""
    pid: int | None = None
    exit_code: int | None = None
    signal: str | None = None  # name of the signal that ended it
    since: float | None = None  # start, seconds since the epoch
    ended: float | None = None
    log: Path | None = None
    paused: bool = False  # it is there and does not run on
    note: str = ""  # what else is known of its end
    last_lines: tuple[str, ...] = ()  # of its log, when it has ended

    @property
    def running(self) -> bool:
        return self.state == "running"

    def ending(self) -> str:
        """How it ended, in words."""
        if self.state == "absent":
            how = "is not there: not started, or removed since"
        elif self.state == "running":
            how = "is paused" if self.paused else "runs"
        elif self.state == "unreachable":
            how = "cannot be reached"
        elif self.signal is not None:
            how = f"ended by {self.signal}"
        elif self.exit_code is not None:
            how = f"ended with exit code {self.exit_code}"
        else:
            how = "ended, its exit code is unknown"
        return f"{how} ({self.note})" if self.note else how


@dataclass(frozen=True)
class Activity:
    """What changes while a rank gets somewhere; only a difference between two says anything."""

    lines: int  # lines of its log, since this runtime first read it, that tell of progress
    compiling: float  # CPU seconds of the compilers that run under it now


class Runtime(Protocol):
    def start(self, rank: Rank, launch_id: str) -> int:
        """Start the rank and return the pid of its first process.

        It outlives the launcher. Raises LauncherError when the role has a rank already or the
        program cannot be started.
        """
        ...

    def inspect(self, role: str) -> RankStatus: ...

    def stop(self, role: str, grace: float) -> RankStatus:
        """End the rank and all it started: asked first, after ``grace`` seconds forced.

        Nothing to stop is fine. Returns how it was just before its record was cleared, or
        ``unreachable`` if it could not be stopped.
        """
        ...

    def log_path(self, role: str) -> Path:
        """Where the rank's log is, or is put when it is saved."""
        ...

    def lines(self, role: str) -> list[str]:
        """The log lines that came since the last call; none when it cannot be read."""
        ...

    def activity(self, role: str) -> Activity | None:
        """What the rank did so far; None when it cannot be asked."""
        ...

    def stacks(self, role: str, path: Path) -> str:
        """Ask the rank's processes for their Python stacks and save its log with them to ``path``.

        Returns which processes were asked, or why none was; raises nothing for a rank in trouble.
        """
        ...

    def save_log(self, role: str, path: Path) -> bool:
        """Save the rank's log to ``path``; False when there is none to be had."""
        ...

    def tail(self, role: str, lines: int, emit: Callable[[str], None]) -> None:
        """Emit the last ``lines`` lines of the rank's log."""
        ...

    def follow(self, role: str, lines: int, emit: Callable[[str], None]) -> None:
        """Emit the last ``lines`` lines and then each new one until the rank has ended."""
        ...
