"""Secrets come in a file: a container's environment is shown to everyone who may ask Docker.

``SPARK_SECRET_ENV`` names it: a NAME=value a line, each value a JSON string.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import MutableMapping

VARIABLE = "SPARK_SECRET_ENV"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def load(environ: MutableMapping[str, str]) -> None:
    """Put the file's variables into ``environ``; nothing to do where none is named.

    Raises SystemExit, and shows no value, for a file that is missing, that others may read, or that
    is written otherwise.
    """
    path = environ.get(VARIABLE)
    if path is None:
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SystemExit(
            f"{VARIABLE} names {path}, which cannot be read: {error.strerror}. Needed is the file "
            "that the launcher writes at each start; ./start.sh restart writes it anew"
        ) from None
    try:
        text = _private(path, fd)
    finally:
        os.close(fd)
    environ.update(_parsed(path, text))


def _private(path: str, fd: int) -> bytes:
    """All of a file that its owner alone may read; asked of the file that is open, not its name."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise SystemExit(f"{VARIABLE} names {path}, which is no regular file")
    if found.st_mode & 0o077:
        raise SystemExit(
            f"{VARIABLE} names {path}, which others may read "
            f"(mode {stat.S_IMODE(found.st_mode):04o}). "
            "Needed is mode 0600; ./start.sh restart writes it anew"
        )
    with open(fd, "rb", closefd=False) as source:
        return source.read()


def _parsed(path: str, text: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, line in enumerate(text.decode("utf-8", "replace").split("\n"), 1):
        if not line:
            continue
        name, _, quoted = line.partition("=")
        try:
            value = json.loads(quoted)
        except ValueError:
            value = None
        if not isinstance(value, str) or "\0" in value or _NAME.fullmatch(name) is None:
            raise SystemExit(f'{path} line {number} is not NAME="value", the value a JSON string')
        found[name] = value
    return found
