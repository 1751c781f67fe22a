"""Errors for the user: what was found, what was needed, what to do next, where the log is."""

from __future__ import annotations

from pathlib import Path


class LauncherError(Exception):
    """A failure that is explained to the user instead of shown as a traceback.

    `exit_code` is the status of the process; subclasses change it.
    """

    exit_code = 1

    def __init__(
        self, found: str, needed: str, do_next: str, log: Path | str | None = None
    ) -> None:
        super().__init__(found)
        self.found = found
        self.needed = needed
        self.do_next = do_next
        self.log = log

    def __str__(self) -> str:
        lines = [f"found:   {self.found}", f"needed:  {self.needed}", f"do next: {self.do_next}"]
        if self.log is not None:
            lines.append(f"log:     {self.log}")
        return "\n".join(lines)


class UsageError(LauncherError):
    """A setting or a command line that cannot be accepted; nothing was started or stopped."""

    exit_code = 2
