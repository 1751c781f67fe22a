"""Files shared out among streams that run side by side. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.weights.manifest import Entry

SMALL = 64 << 20  # bytes: files up to this size go in one call


def lanes(entries: Sequence[Entry], count: int) -> tuple[tuple[Entry, ...], ...]:
    """At most ``count`` disjoint lists: the largest file first, each to the list with the fewest
    bytes so far. No list is empty."""
    loads = [0] * count
    lists: list[list[Entry]] = [[] for _ in range(count)]
    for entry in sorted(entries, key=lambda each: (-each.size, each.name)):
        least = min(range(count), key=lambda at: (loads[at], at))
        lists[least].append(entry)
        loads[least] += entry.size
    return tuple(tuple(each) for each in lists if each)


def calls(lane: Sequence[Entry]) -> tuple[tuple[Entry, ...], ...]:
    """What one rsync after another takes: a large file each, small ones together."""
    found: list[tuple[Entry, ...]] = []
    small: list[Entry] = []
    for entry in lane:
        if entry.size > SMALL:
            found.append((entry,))
        else:
            small.append(entry)
    return (*found, tuple(small)) if small else tuple(found)
