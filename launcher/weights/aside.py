"""Copies files that are to be replaced into a folder, beside what was kept there before.

One program for the head and the worker, as `treecheck`: stdlib only, its source is what a node's
``python3`` is given to run, with FOLDER DIRECTORY NAME… as arguments. It prints [[NAME, WHERE], …]
as JSON, of those of which a copy was made now; it ends with 1 where one could not be.
"""

from __future__ import annotations

import filecmp
import itertools
import json
import os
import shutil
import sys


def keep(path: str, folder: str) -> str:
    """Where a copy of ``path`` is now; "" where none is made: it is a link, or kept already.
    Raises OSError."""
    if os.path.islink(path):
        return ""
    os.makedirs(folder, exist_ok=True)
    name = os.path.basename(path)
    for number in itertools.count(1):
        aside = os.path.join(folder, name if number == 1 else f"{name}.{number}")
        if not os.path.lexists(aside):
            part = f"{aside}.part"
            shutil.copy2(path, part)
            os.replace(part, aside)
            return aside
        if os.path.isfile(aside) and filecmp.cmp(path, aside, shallow=False):
            return ""
    raise AssertionError  # numbers do not end


def main(folder: str, directory: str, *names: str) -> int:
    kept = []
    try:
        for name in names:
            if where := keep(os.path.join(directory, name), folder):
                kept.append((name, where))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
