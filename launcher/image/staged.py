"""An image as a tar on the head: made by ``docker save``, reused while it is of the same layers."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launcher import files
from launcher.errors import LauncherError
from launcher.image import identity, pipe

VERSION = (1, 48)  # of Docker's API, from which on an image is saved by its platform


def save_argv(name: str, platform: str, said: str, api: str) -> list[str]:
    """``docker save`` to stdout. ``said``: the command's own help; ``api``: the version that it and
    the daemon speak. With a platform where both know it: of an image for several platforms the
    daemon holds the layers of one, and saving the others would fail."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", api)[:2])
    knows = "--platform" in said and numbers >= VERSION
    return ["docker", "save", *(["--platform", platform] if knows else []), name]


def reusable(path: Path, layers: Sequence[str]) -> int | None:
    """Bytes of a whole tar of these layers; None where there is none."""
    try:
        told = files.read_json(_note(path))
        size = path.stat().st_size
    except (OSError, ValueError):
        return None
    right = told == {"layers": identity.key(layers), "size": size}
    return size if right else None


def save(
    argv: Sequence[str], path: Path, layers: Sequence[str], tick: Callable[[int], None]
) -> int:
    """Make the tar by ``argv``, whole or not at all; its bytes. Raises LauncherError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(path)
    part = _part(path)
    try:
        ended = pipe.into_file(argv, part, tick)
        if not ended.well:
            raise _not_saved(part, ended.said[0] or f"it ended with {ended.statuses[0]}")
        found = layers_of(part)
        if found != list(layers):
            raise LauncherError(
                f"docker save wrote another image than it was asked for: "
                f"{identity.first_difference(layers, found)}",
                "the tar of the image that is on the head",
                "docker image inspect shows what is there; IMAGE_SHIP=stream needs no tar",
            )
        part.replace(path)
    except OSError as error:
        raise _not_saved(part, error.strerror or str(error)) from error
    finally:
        part.unlink(missing_ok=True)
    size = path.stat().st_size
    files.replace_json(_note(path), {"layers": identity.key(layers), "size": size})
    return size


def remove(path: Path) -> None:
    """The tar, and what a save that was killed has left of one."""
    for each in (_note(path), path, _part(path)):
        each.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """The same; but a tar that was not made here stays."""
    if _note(path).exists():
        remove(path)
    _part(path).unlink(missing_ok=True)


def layers_of(path: Path) -> list[str]:
    """The diff ids in a tar that ``docker save`` made. Raises LauncherError for anything else."""
    try:
        with tarfile.open(path, mode="r:") as tar:
            (entry,) = _json(tar, "manifest.json")
            config = _json(tar, str(entry["Config"]))
        return [str(each) for each in config["rootfs"]["diff_ids"]]
    except (tarfile.TarError, ValueError, KeyError, TypeError) as error:
        size = path.stat().st_size
        raise LauncherError(
            f"docker save wrote {size} bytes that are no image ({type(error).__name__}: {error})",
            "a tar with one image",
            "docker image inspect, then docker save -o FILE IMAGE by hand shows what is wrong",
        ) from error


def _json(tar: tarfile.TarFile, name: str) -> Any:
    member = tar.extractfile(name)
    if member is None:
        raise ValueError(f"{name} is no file")
    return json.load(member)


def _note(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _not_saved(part: Path, said: str) -> LauncherError:
    full = "no space left" in said.lower()
    return LauncherError(
        f"the image could not be saved to {part.parent}: {said}",
        "space there for the whole image" if full else "a docker save that ends well",
        "free some, set IMAGE_SHIP_DIR in .env to another disk, or IMAGE_SHIP=stream; then again"
        if full
        else "mend what Docker says, then ./start.sh goes on",
    )
