"""A directory that can be mounted elsewhere: real files, and of the tables only what is needed.

Mounted into a container or exported, a link by path leads nowhere (as those of a hub's cache do),
and a whole original checkpoint would show 48 shards for two. Such files are linked hard into a
directory of our own. Nothing is ever copied: it would be up to 386 GiB.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import LauncherError
from launcher.weights.manifest import Part

MADE = ".dsv41-links.json"  # names of the links that are ours: no other file is ever removed


@dataclass(frozen=True)
class Solid:
    """``path`` is what to mount. ``note`` tells why, where it is not the directory itself or holds
    more than what is needed."""

    path: Path
    note: str = ""


def solid(directory: Path, part: Part, at: Path, *, always: bool = False, key: str) -> Solid:
    """``directory`` itself if it can be mounted as it is, else hard links to its files in ``at``.

    The files of ``part`` are there and whole. ``always``: links are wanted in any case; ``key``
    names the setting of ``at``. Raises LauncherError where links are needed and cannot be made.
    """
    linked = [entry.name for entry in part.entries if (directory / entry.name).is_symlink()]
    names = {entry.name for entry in part.entries}
    foreign = [
        entry.name
        for entry in os.scandir(directory)
        if entry.name.endswith(".safetensors") and entry.name not in names
    ]
    more = bool(foreign) and part.role == "engram"
    if at.resolve() == directory.resolve() or not (linked or more or always):
        if linked:
            raise LauncherError(
                f"{directory} has links by path ({linked[0]}, …) and is {key} itself",
                "another directory for hard links to its files",
                f"set {key} in .env to an empty directory on the file system of"
                f" {(directory / linked[0]).resolve().parent}",
            )
        return Solid(directory)
    try:
        _link_all(directory, part, at)
    except OSError as error:
        if not (linked or always) and error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            why = f"{len(foreign)} more shards are seen there, too: {at} cannot link to its files"
            return Solid(directory, f"{directory} as it is; {why} ({error.strerror})")
        real = (directory / (linked or sorted(names))[0]).resolve()
        raise LauncherError(
            f"{at} cannot have hard links to the files of {directory}: {error.strerror}"
            f" ({error.filename2 or error.filename})",
            f"a directory on the file system of {real.parent}, for files of this user"
            " (they are never copied)",
            f"set {key} in .env to a directory there, or {part_key(part)} to one with real files",
        ) from error
    what = "links by path" if linked else f"{len(foreign)} more shards"
    return Solid(at, f"hard links in {at}" + ("" if always else f": {directory} has {what}"))


def part_key(part: Part) -> str:
    return "ENGRAM_DIR" if part.role == "engram" else "MODEL_HOST"


def _link_all(directory: Path, part: Part, at: Path) -> None:
    at.mkdir(parents=True, exist_ok=True)
    made = _made(at)
    for entry in part.entries:
        real = (directory / entry.name).resolve(strict=True)
        place = at / entry.name
        with contextlib.suppress(FileNotFoundError):
            if not place.is_symlink() and place.samefile(real):
                made.add(entry.name)
                continue
            if entry.name not in made:
                raise LauncherError(
                    f"{place} is another file than {real}, and not made by the launcher",
                    "a directory for hard links alone",
                    f"move {place} away if nothing else needs it, then run this again",
                )
        part_way = at / f".{entry.name}.{os.getpid()}.part"
        try:
            os.link(real, part_way)
            # Before the name is there, so that a killed launcher knows its links again.
            made.add(entry.name)
            _note(at, made)
            os.replace(part_way, place)
        finally:
            part_way.unlink(missing_ok=True)
    stale = made - {entry.name for entry in part.entries}
    for name in stale:  # a link keeps the bytes of a file that was replaced
        (at / name).unlink(missing_ok=True)
    _note(at, made - stale)


def _made(at: Path) -> set[str]:
    try:
        return {str(name) for name in json.loads((at / MADE).read_bytes())}
    except (OSError, ValueError, TypeError):
        return set()


def _note(at: Path, made: set[str]) -> None:
    if made != _made(at):
        (at / MADE).write_text(json.dumps(sorted(made)) + "\n", encoding="utf-8")
