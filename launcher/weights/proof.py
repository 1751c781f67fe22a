"""Whether a node's directory holds what the manifest names: what everyone asks before using it.

`ask`, `ARGV` and `rows` are the pure parts, for who runs the check elsewhere than on the node
itself, as inside a container that mounts the directory.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from launcher import files
from launcher.errors import LauncherError
from launcher.facts.base import gib
from launcher.findings import Finding
from launcher.nodes.base import Node
from launcher.weights.manifest import Entry, Part, Role

Level = Literal["sizes", "ends", "sums"]
State = Literal["ok", "missing", "size", "bytes", "unreadable"]

SOURCE = Path(__file__).with_name("treecheck.py")
THREADS = 4  # one core sums about a GB/s; a drive gives several
QUICK = 120.0  # seconds: the sizes of some fifty files, or both ends of each
FOREVER = 6 * 3600.0  # seconds: 386 GiB at 18 MB/s


@dataclass(frozen=True)
class Row:
    """What was found of one file. ``digest`` and ``ends`` where they were asked for."""

    name: str
    state: State
    size: int = -1
    mtime_ns: int = -1
    digest: str = ""
    ends: str = ""
    why: str = ""


@dataclass(frozen=True)
class Fault:
    """A file that is not as the manifest has it."""

    entry: Entry
    row: Row

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def state(self) -> State:
        return self.row.state

    def __str__(self) -> str:
        match self.row.state:
            case "size":
                few = self.row.size < self.entry.size
                how = "cut off" if few else "too long"
                return f"{self.name} is {how}: {self.row.size} of {self.entry.size} bytes"
            case "bytes":
                return f"{self.name} has the right size and other bytes ({self.row.digest[:19]}…)"
            case "missing":
                return f"{self.name} is missing" + (f" ({self.row.why})" if self.row.why else "")
            case _:
                return f"{self.name} cannot be read: {self.row.why}"


class Memory:
    """Checksums found earlier, by node and directory, in one file of the head.

    A file that kept its size and time is not summed again. ``fresh``: everything is.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        self.fresh = fresh

    def known(self, where: str) -> Mapping[str, list[Any]]:
        return {} if self.fresh else self._all().get(where, {})

    def remember(self, where: str, rows: Iterable[Row]) -> None:
        """Keep the sums of ``rows`` beside what is known there. Raises OSError."""
        found = {row.name: [row.size, row.mtime_ns, row.digest] for row in rows if row.digest}
        every = self._all()
        if any(every.get(where, {}).get(name) != value for name, value in found.items()):
            every[where] = {**every.get(where, {}), **found}
            files.replace_json(self.path, every)

    def _all(self) -> dict[str, dict[str, list[Any]]]:
        try:
            found = files.read_json(self.path) or {}
        except ValueError:
            return {}  # to be summed again
        return {
            where: {name: row for name, row in rows.items() if _is_row(row)}
            for where, rows in found.items()
            if isinstance(rows, dict)
        }


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and [type(each) for each in value] == [int, int, str]


def argv(python: str = "python3") -> tuple[str, ...]:
    """Runs the check in a bare Python: no site packages, nothing left on the node."""
    return (python, "-I", "-S", "-c", SOURCE.read_text(encoding="utf-8"))


def ask(
    directory: str,
    entries: Iterable[Entry],
    level: Level,
    known: Mapping[str, Sequence[Any]] | None = None,
    threads: int = THREADS,
) -> bytes:
    """The question, for the program's stdin."""
    return json.dumps(
        {
            "directory": directory,
            "level": level,
            "threads": threads,
            "files": [[entry.name, entry.size, entry.digest] for entry in entries],
            "known": {name: list(row) for name, row in (known or {}).items()},
        }
    ).encode()


def progress_of(line: str) -> tuple[int, int] | None:
    """Bytes done and to do, if ``line`` of the answer is about them."""
    value = _value(line)
    if value is None or "done" not in value:
        return None
    return int(value["done"]), int(value["total"])


def row_of(line: str) -> Row | None:
    value = _value(line)
    if value is None or "file" not in value:
        return None
    return Row(
        str(value["file"]),
        cast(State, value["state"]),
        int(value.get("size", -1)),
        int(value.get("mtime_ns", -1)),
        str(value.get("digest", "")),
        str(value.get("ends", "")),
        str(value.get("why", "")),
    )


def _value(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def look(
    node: Node,
    directory: str,
    entries: Sequence[Entry],
    level: Level,
    memory: Memory | None = None,
    *,
    threads: int = THREADS,
    progress: Callable[[int, int], None] | None = None,
    timeout: float | None = None,
) -> list[Row]:
    """A row for each entry, in their order. Raises LauncherError where the node cannot tell.

    ``progress`` gets bytes done and to do, while sums are made.
    """
    where = f"{node.name}:{directory}"
    known = memory.known(where) if memory and level == "sums" else None
    found: dict[str, Row] = {}
    said: list[str] = []

    def line(text: str) -> None:
        if (told := progress_of(text)) is not None:
            if progress:
                progress(*told)
        elif (row := row_of(text)) is not None:
            found[row.name] = row
        elif text.strip():
            said.append(text)

    try:
        done = node.run(
            argv(),
            timeout=timeout or (FOREVER if level == "sums" else QUICK),
            stdin=ask(directory, entries, level, known, threads),
            line=line,
        )
    finally:  # what was summed before an interruption need not be summed again
        if memory and found:
            memory.remember(where, found.values())
    if done.status or len(found) != len(entries):
        told = "\n".join(said[-3:]) or "it said nothing"
        raise LauncherError(
            f"the files in {directory} on the {node.name} could not be checked (status"
            f" {done.status}): {told}",
            f"python3 on the {node.name}, and a directory that can be read",
            f"on the {node.name}: python3 --version; ls -l {shlex.quote(directory)}",
        )
    return [found[entry.name] for entry in entries]


def prove(
    node: Node,
    directory: str,
    part: Part,
    level: Level,
    memory: Memory | None = None,
    **more: Any,
) -> list[Fault]:
    """What is not as ``part`` has it; empty where all is right. As `look`."""
    rows = look(node, directory, part.entries, level, memory, **more)
    pairs = zip(part.entries, rows, strict=True)
    return [Fault(entry, row) for entry, row in pairs if row.state != "ok"]


def summed(part: Part, rows: Iterable[Row]) -> Part:
    """The part with the sha256 that was found for entries of which only the size was known."""
    found = {row.name: row.digest.removeprefix("sha256:") for row in rows if row.state == "ok"}
    return replace(
        part,
        entries=tuple(
            entry if entry.digest else replace(entry, sha256=found.get(entry.name, ""))
            for entry in part.entries
        ),
    )


NAMES: Mapping[Role, str] = {"model": "checkpoint", "engram": "Engram source"}


def findings(
    node: str, role: Role, directory: str, faults: Sequence[Fault], mend: str
) -> list[Finding]:
    """One finding that names the files; none where there is no fault."""
    if not faults:
        return []
    told = "; ".join(str(fault) for fault in faults[:5])
    more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
    size = gib(sum(fault.entry.size for fault in faults))
    return [
        Finding(
            f"the {NAMES[role]} of the {node}, {directory}: {told}{more}",
            f"each file as the manifest has it ({len(faults)} of them, {size}, are not)",
            mend,
            topic="weights",
        )
    ]
