"""Copies of small files that are replaced: they may have been changed on purpose."""

from __future__ import annotations

import filecmp
import itertools
import shutil
from pathlib import Path

from launcher.weights import treecheck
from launcher.weights.manifest import Entry

SMALL = 64 << 20  # bytes; what is larger was hardly written by hand


def keep(path: Path, folder: Path, settled: Entry | None) -> Path | None:
    """Copy ``path`` into ``folder``, beside what was kept there before; where that is.

    None where nothing is kept: no small file, a link, what ``settled`` says, or kept already.
    Raises OSError.
    """
    if path.is_symlink() or not path.is_file() or path.stat().st_size > SMALL:
        return None
    if settled is not None and settled.digest:
        count = treecheck.Counter(settled.size)
        where, digest = str(path.parent), settled.digest
        row = treecheck.check(where, path.name, settled.size, digest, "sums", {}, count)
        if row["state"] == "ok":
            return None
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        aside = folder / (path.name if number == 1 else f"{path.name}.{number}")
        if not aside.exists():
            shutil.copy2(path, aside)
            return aside
        if filecmp.cmp(path, aside, shallow=False):
            return None
    raise AssertionError  # numbers do not end
