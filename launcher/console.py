"""What the person at the terminal sees: short lines, one of them alive while something lasts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from launcher.clock import span

QUIET = 10.0  # seconds between two progress lines where nothing can be rewritten

_COLOURS = {"info": "36", "good": "32", "warning": "33", "error": "31"}


class Console:
    """Lines with a ``[spark]`` mark.

    On a terminal the progress line is rewritten in place and coloured; elsewhere it is printed
    plain now and then. ``hide`` masks secrets in everything printed.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        *,
        hide: Callable[[str], str] = lambda text: text,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out = out or sys.stdout
        self.err = err or sys.stderr
        self.hide = hide
        self._clock = clock
        self._open = ""  # the progress line now on the terminal
        self._last = -QUIET

    def say(self, text: str, kind: str = "info") -> None:
        self._print(self.out, text, kind)

    def warn(self, text: str) -> None:
        self._print(self.err, text, "warning")

    def error(self, text: str) -> None:
        self._print(self.err, text, "error")

    def plain(self, text: str) -> None:
        """A line to be copied or parsed: no mark before it."""
        self._clear()
        print(self.hide(text), file=self.out, flush=True)

    def progress(self, text: str, since: float | None = None) -> None:
        """Where a long piece of work stands; ``since`` (see ``now``) adds the time spent."""
        now = self._clock()
        spent = "" if since is None else f" ({span(now - since)})"
        if self.out.isatty():
            line = self.hide(f"[spark]   {text}{spent}")[:110]
            self.out.write(f"\r\x1b[K\x1b[2m{line}\x1b[0m")
            self.out.flush()
            self._open = line
        elif now - self._last >= QUIET and text:
            self._last = now
            self._print(self.out, f"  {text}{spent}", "info")

    def now(self) -> float:
        return self._clock()

    def quiet_from_here(self) -> None:
        """Start the pause before the next plain progress line anew: a piece of work begins."""
        self._last = self._clock()

    def _clear(self) -> None:
        if self._open:
            self.out.write("\r\x1b[K")
            self.out.flush()
            self._open = ""

    def _print(self, stream: TextIO, text: str, kind: str) -> None:
        self._clear()
        mark = "[spark]"
        if stream.isatty():
            mark = f"\x1b[{_COLOURS[kind]}m{mark}\x1b[0m"
        for line in self.hide(text).split("\n"):
            print(f"{mark} {line}", file=stream, flush=True)
