"""The one shape of a node: a machine on which argv runs and files lie.

Everything is blocking and in bytes, so that ssh fits under the same interface; nothing takes a
shell string. Paths are the node's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Facts:
    """What differs from machine to machine and must be asked, never assumed."""

    hostname: str
    user: str
    uid: int
    home: str
    boot_id: str
    machine: str  # x86_64, aarch64
    processors: int
    memory_available: int  # bytes, MemAvailable of /proc/meminfo


@dataclass(frozen=True)
class Done:
    """A command that ended by itself: its exit status (negative: minus the signal), its output."""

    argv: tuple[str, ...]
    status: int
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        return self.out.decode("utf-8", "replace")

    def last(self, lines: int = 20) -> str:
        """The end of what it said, errors last."""
        both = (self.out + b"\n" + self.err).decode("utf-8", "replace")
        kept = [line for line in both.splitlines() if line.strip()]
        return "\n".join(kept[-lines:])


def named(argv: Sequence[str], width: int = 40) -> str:
    """``argv`` as a message names it: one line, the first four words, a script only begun."""

    def short(word: str) -> str:
        first = word.split("\n", 1)[0]
        return first if first == word and len(word) <= width else f"{first[:width].rstrip()}…"

    return " ".join(map(short, argv[:4])) + (" …" if len(argv) > 4 else "")


class Node(Protocol):
    name: str

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        line: Callable[[str], None] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> Done:
        """Run argv to its end.

        ``env`` None is the node's own environment. ``line`` gets each line of both outputs as it
        comes; ``tick`` is called about twice a second. The command does not outlive the caller.

        Raises LauncherError when the program is missing or ``timeout`` seconds are over.
        """
        ...

    def read(self, path: Path) -> bytes: ...

    def write(self, path: Path, data: bytes, mode: int = 0o644) -> None:
        """Replace the file whole or not at all, making its directory."""
        ...

    def exists(self, path: Path) -> bool: ...

    def size(self, path: Path) -> int | None:
        """Bytes of a regular file, None if there is none."""
        ...

    def copy(self, source: Path, target: Path) -> None:
        """Bring a file of the launcher's machine to ``target`` on this node."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file or a whole directory; nothing to remove is fine."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Free space for this user where ``path`` is, or would be made."""
        ...

    def facts(self) -> Facts: ...
