"""How a set of files is laid into folders of a bounded size. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def plan(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names into as few chunks of at most ``limit`` bytes as first fit, largest first, finds.

    The same sizes give the same chunks. Raises ValueError for a file that fits into none.
    """
    chunks: list[list[str]] = []
    room: list[int] = []
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if size > limit:
            raise ValueError(f"{name} has {size} bytes, a chunk at most {limit}: split it first")
        place = next((i for i, left in enumerate(room) if size <= left), len(room))
        if place == len(room):
            chunks.append([])
            room.append(limit)
        chunks[place].append(name)
        room[place] -= size
    return chunks
