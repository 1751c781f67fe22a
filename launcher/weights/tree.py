"""The manifest of what lies in a directory of the head, where no hub has told it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from launcher.errors import LauncherError
from launcher.facts.trees import INDEX
from launcher.findings import Finding, refuse
from launcher.weights.choice import chosen
from launcher.weights.manifest import Entry, Part, Role
from launcher.weights.proof import NAMES

DIRECTORIES = {"model": "MODEL_HOST", "engram": "ENGRAM_DIR"}
HEADER = 256 << 20  # bytes; a longer header is none
META = "__metadata__"


def of_tree(role: Role, directory: Path) -> Part:
    """The files of ``role`` in ``directory`` with their sizes; checksums are not known yet.

    Raises LauncherError with all that is missing, cut off or unreadable.
    """
    where = f"the {NAMES[role]}, {directory} ({DIRECTORIES[role]}),"
    mend = "./start.sh download fetches what is missing (AUTO_DOWNLOAD=1), or bring it there"
    look = f"ls -l {shlex.quote(str(directory))}"
    needed = f"{INDEX} and the files that it names, whole"
    try:
        listing = [entry.name for entry in os.scandir(directory) if entry.is_file()]
        index = (directory / INDEX).read_bytes()
    except FileNotFoundError as error:
        lacks = f"lacks {INDEX}" if directory.is_dir() else "does not exist"
        raise LauncherError(f"{where} {lacks}", needed, mend) from error
    except OSError as error:
        raise LauncherError(f"{where} cannot be read: {error.strerror}", needed, look) from error
    names, missing = chosen(role, index, listing, f"{directory / INDEX}")
    found = [Finding(f"{where} lacks {name}", needed, mend) for name in missing]
    entries = []
    for name in names:
        path = directory / name
        try:
            size = path.stat().st_size
            whole = length(path) if name.endswith(".safetensors") else size
        except (OSError, ValueError) as error:
            found.append(Finding(f"{where}: {name} cannot be read: {error}", needed, look))
            continue
        if size != whole:
            how = "cut off" if size < whole else "too long"
            told = f"{where}: {name} is {how}: {size} of {whole} bytes"
            found.append(Finding(told, needed, mend))
        entries.append(Entry(name, size))
    refuse(found)
    return Part(role, "", "", tuple(entries))


def length(path: Path) -> int:
    """Bytes that a safetensors file has by its own header. Raises OSError, ValueError."""
    with path.open("rb") as source:
        count = int.from_bytes(source.read(8), "little")
        if not 2 <= count <= HEADER:
            raise ValueError("it is no safetensors file")
        text = source.read(count)
    if len(text) < count:
        return 8 + count
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    try:
        ends = [int(row["data_offsets"][1]) for name, row in header.items() if name != META]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"its header is damaged: {error!r}") from error
    return 8 + count + max(ends, default=0)
