"""The recipe: every file that the image is made of, their stamp, and the context of a build.

What is copied is what is stamped: both come from ``files``. It goes by folders and kinds of files,
so that what tools, editors and earlier builds leave in a checkout neither counts nor travels.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import LauncherError
from launcher.facts.docker import STAMP

LABEL = STAMP
DOCKERFILE = "docker/Dockerfile"
WHOLE = (
    DOCKERFILE,
    "docker/build.txt",
    "docker/engine.txt",
    "docker/run.txt",
    "launcher/locks/nvcc.lock",
    "overlay/pyproject.toml",
    "overlay/setup.py",
    "overlay/MANIFEST.in",
)
TREES = {
    "overlay/csrc": (".py", ".cpp", ".cu", ".cuh", ".h", ".hpp"),
    "overlay/spark_overlay": (".py", ".json", ".safetensors", ".typed"),
}
LEFT_OUT = ("__pycache__", "build", "dist")  # folders, and those that begin with a dot


def files(root: Path) -> list[str]:
    """Paths below ``root``, sorted by their bytes. Raises LauncherError where one is gone."""
    missing = [name for name in WHOLE if not (root / name).is_file()]
    missing += [name for name in TREES if not (root / name).is_dir()]
    if missing:
        raise LauncherError(
            f"{root} lacks {', '.join(missing)}, of which the image is made",
            "a whole checkout",
            "git status shows what is gone; git checkout -- docker launcher overlay brings it back",
        )
    found = [*WHOLE]
    for tree, kinds in TREES.items():
        found += [path for path in _walk(root, tree) if os.path.splitext(path)[1] in kinds]
    return sorted(found, key=os.fsencode)


def _walk(root: Path, folder: str) -> Iterator[str]:
    for entry in os.scandir(root / folder):
        inside = f"{folder}/{entry.name}"
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in LEFT_OUT and not entry.name.endswith(".egg-info"):
                yield from _walk(root, inside)
        elif entry.is_file(follow_symlinks=False):
            yield inside


def stamp(root: Path, base: str = "") -> str:
    """sha256 over a line "sha256  path" for each file. ``base`` is of the build argument, where it
    is another than the Dockerfile's own."""
    lines = [
        f"{hashlib.sha256((root / name).read_bytes()).hexdigest()}  {name}\n"
        for name in files(root)
    ]
    if base:
        lines.append(f"BASE_IMAGE  {base}\n")
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def context(root: Path) -> bytes:
    """The context of ``docker build`` as a tar: equal for equal files, whoever has them, so that
    Docker finds its layers of an earlier build again."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in files(root):
            data = (root / name).read_bytes()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mode = 0o755 if (root / name).stat().st_mode & stat.S_IXUSR else 0o644
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


def ignore_text() -> str:
    """.dockerignore, for those who run ``docker build`` by hand: the same files."""
    rows = [
        "# What the image is made of, as launcher/image/stamp.py has it; a test holds them equal.",
        "*",
        *(f"!{name}" for name in WHOLE),
        *(f"!{tree}/**/*{kind}" for tree, kinds in TREES.items() for kind in kinds),
        *(f"**/{name}" for name in LEFT_OUT),
        "**/*.egg-info",
        "**/.*",
    ]
    return "\n".join(rows) + "\n"
