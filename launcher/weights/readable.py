"""What a client of an export could read: all of the weights, though its root counts for nobody, and
nothing else."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from launcher.commands.nfs import Export
from launcher.findings import Finding, stopping
from launcher.weights.backend import Work


def unreadable(work: Work) -> list[Finding]:
    """What of the head a client's root, squashed to nobody, could not read."""
    found = []
    for part in work.manifest.parts:
        where = Path(work.sources[part.role])
        names = ["", *(entry.name for entry in part.entries)]
        try:
            shut = [name or "." for name in names if not _open_to_all(where / name)]
        except OSError as error:
            shut = [f"{error.filename}: {error.strerror}"]
        if shut:
            more = f" and {len(shut) - 3} more" if len(shut) > 3 else ""
            found.append(
                Finding(
                    f"in {where} others may not read {', '.join(shut[:3])}{more}",
                    "files that everyone may read: the export takes the worker's root for nobody",
                    f"on the head: chmod -R a+rX {shlex.quote(str(where))}",
                    topic="weights",
                )
            )
    return stopping(found)


def _open_to_all(path: Path) -> bool:
    mode = path.stat().st_mode
    return bool(mode & 0o004) and (not path.is_dir() or bool(mode & 0o001))


def more_under(export: Export) -> list[Finding]:
    """What would be exported beside the two directories: all that is under the root is."""
    try:
        more = sorted(
            entry.name
            for entry in os.scandir(export.root)
            if entry.name not in export.directories
            and (not entry.is_dir(follow_symlinks=False) or any(os.scandir(entry.path)))
        )
        told = ", ".join(more[:3]) + (f" and {len(more) - 3} more" if len(more) > 3 else "")
    except FileNotFoundError:
        return []
    except OSError as error:
        told = f"what cannot be told: {error.strerror}"
    if not told:
        return []
    return [
        Finding(
            f"under the root of the export, {export.root}, there is {told}",
            f"nothing but {' and '.join(export.directories)}: clients may read all that is there",
            "set NFS_EXPORT_ROOT in .env to an empty directory, or leave it empty",
            topic="weights",
        )
    ]
