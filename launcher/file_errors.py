"""A file that could not be read or written, in words: the setting that led there and a mend."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

from launcher.errors import LauncherError
from launcher.settings.values import Settings


def told(
    error: OSError, root: Path, settings: Settings | None = None, log: Path | None = None
) -> LauncherError:
    """``settings``: those of the run; ``log``: its record, as far as it came to either."""
    name = Path(error.filename) if isinstance(error.filename, str) else root
    there = _nearest(name)
    shown = shlex.quote(str(there))
    if error.errno == errno.ENOSPC:
        mend = f"free some space: df -h {shown}"
    elif isinstance(error, PermissionError) and there.is_relative_to(root / "logs"):
        logs = shlex.quote(str(root / "logs"))
        mend = f"if the launcher was once run by another user: sudo chown -R $USER {logs}"
    else:
        mend = f"see ls -ld {shown}"
    if keys := _keys(name, settings) if settings else []:
        mend += f"; or set {' and '.join(keys)} in .env to a directory of this user"
    return LauncherError(
        f"{error.filename or 'a file'}: {error.strerror or error}",
        "files that this user may read and write",
        mend,
        log,
    )


def _nearest(path: Path) -> Path:
    """``path``, or the first above it that can be seen."""
    for each in (path, *path.parents):
        try:
            each.lstat()
        except OSError:
            continue
        return each
    return path


def _keys(name: Path, settings: Settings) -> list[str]:
    """The settings of this machine whose directory holds ``name``, the innermost; or those that
    need ``name``, which is not there, above theirs."""
    paths = {
        setting.key: Path(os.path.normpath(settings.path(setting.key)))
        for setting, _ in settings.items()
        if setting.kind == "path"
        and not setting.key.startswith("WORKER_")
        and settings.text(setting.key)
    }
    around = {key: len(path.parts) for key, path in paths.items() if name.is_relative_to(path)}
    if around:
        return [key for key, depth in around.items() if depth == max(around.values())]
    if _nearest(name) == name:
        return []
    return [key for key, path in paths.items() if path.is_relative_to(name)]
