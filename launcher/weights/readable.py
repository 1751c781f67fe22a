"""Whether a client of an export, whose root counts for nobody, could read the head's files."""

from __future__ import annotations

import shlex
from pathlib import Path

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
