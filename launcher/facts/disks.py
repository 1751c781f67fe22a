"""The file systems under the paths asked for, and whether this user may write there."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.facts.base import HOME, shell


@dataclass(frozen=True)
class Disk:
    """What lies under one path, or under its nearest existing parent. Bytes."""

    path: str  # as asked; a leading ~ is the node's home
    exists: bool
    writable: bool
    size: int
    free: int
    fstype: str
    source: str
    mount: str


@dataclass(frozen=True)
class DisksFact:
    """Rows keep the order of the paths, so a path is never read back from the output."""

    key: str = "disks"
    argv: tuple[str, ...] = shell(
        'n=0; for p; do n=$((n+1)); [ -n "$p" ] || continue; '
        + HOME
        + '; e=0; [ -e "$q" ] && e=1; '
        'while [ ! -e "$q" ] && [ "$q" != / ] && [ "$q" != . ]; do q=$(dirname -- "$q"); done; '
        'w=0; [ -w "$q" ] && w=1; printf "%s %s %s " "$n" "$e" "$w"; '
        'df -B1 --output=size,avail,fstype,source,target -- "$q" | tail -n 1; done'
    )
    takes_paths: bool = True

    def parse(self, text: str) -> dict[int, Disk]:
        """By position of the path, from 1; ``path`` is filled in by who asked."""
        found = {}
        for row in text.splitlines():
            words = row.split(None, 7)
            if len(words) != 8:
                continue
            number, exists, writable, size, free, fstype, source, mount = words
            if not (number.isdigit() and size.isdigit() and free.isdigit()):
                continue
            found[int(number)] = Disk(
                "", exists == "1", writable == "1", int(size), int(free), fstype, source, mount
            )
        return found


def expanded(path: str, home: str) -> str:
    """The same as the shell does on the node."""
    if path == "~" or path.startswith("~/"):
        return home + path[1:]
    return path
