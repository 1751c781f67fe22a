"""What is seen to before a file that is there is replaced, on the head and on the worker alike.

Small files may have been changed on purpose: a copy of them is kept. The large ones are only named:
nobody wrote them by hand, and copies would fill the disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from launcher.console import Console
from launcher.errors import LauncherError
from launcher.nodes.base import Node
from launcher.weights import proof
from launcher.weights.manifest import Entry
from launcher.weights.proof import Fault

SMALL = 64 << 20  # bytes
SOURCE = Path(__file__).with_name("aside.py")
COPYING = 300.0  # seconds


def keep(
    node: Node,
    directory: str,
    folder: str,
    faults: Iterable[Fault],
    ours: Sequence[Entry],
    console: Console,
) -> None:
    """Copy small files that have other bytes into ``folder`` of the node, and say so.

    ``ours``: contents that came from us, of which no copy is kept. Raises LauncherError where a
    copy cannot be made; nothing is replaced then.
    """
    small = {fault.name: fault.row.size for fault in faults if _by_hand(fault)}
    like = [each for each in ours if each.digest and small.get(each.name) == each.size]
    if like:
        for row in proof.look(node, directory, like, "sums"):
            if row.state == "ok":
                del small[row.name]
    if not small:
        return
    source = SOURCE.read_text(encoding="utf-8")
    words = ("python3", "-I", "-S", "-c", source, folder, directory, *small)
    done = node.run(words, timeout=COPYING)
    if done.status:
        raise LauncherError(
            f"before they are replaced, copies of {', '.join(small)} in {directory} of the"
            f" {node.name} could not be made in {folder}: {done.last(2)}",
            "a copy of each small file that is replaced: it may have been changed on purpose",
            f"on the {node.name}: mend that (CACHE_ROOT names it), or move the files away; then"
            " run this again",
        )
    for name, where in json.loads(done.text):
        console.say(f"    what {name} was on the {node.name} is kept in {where}")


def _by_hand(fault: Fault) -> bool:
    return fault.state in ("bytes", "size") and 0 < fault.row.size <= SMALL
