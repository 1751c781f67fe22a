"""Files replaced whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any


def replace(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write ``data`` to ``path`` so that a reader, or a power cut, sees the old file or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of this thread alone: checksums of several files are remembered at the same time.
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(fd, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        # The rename is durable only once the directory is; some filesystems refuse to sync one.
        with contextlib.suppress(OSError):
            os.fsync(folder)
    finally:
        os.close(folder)


def replace_json(path: Path, value: Any, mode: int = 0o644) -> None:
    replace(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), mode)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``; None if the file is not there.

    Raises ValueError on anything that is not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object was expected, found {type(value).__name__}")
    return value


def tail(path: Path, lines: int, window: int = 65536) -> tuple[str, ...]:
    """The last ``lines`` lines of a text file, read from its last ``window`` bytes."""
    if lines <= 0:
        return ()
    try:
        with path.open("rb") as source:
            size = source.seek(0, os.SEEK_END)
            start = max(0, size - window)
            source.seek(start)
            text = source.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ()
    found = text.splitlines()
    if start and len(found) > 1:
        found = found[1:]
    return tuple(found[-lines:])
