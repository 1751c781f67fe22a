"""What makes two images the same: their layers in order. Pure.

An Id is of a daemon's store (overlay2 and containerd's differ), and digests of a registry are lost
by save and load; the diff ids of the layers are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from launcher.facts.docker import Image

ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}


def key(layers: Sequence[str]) -> str:
    """16 hex digits for a list of diff ids."""
    return hashlib.sha256(",".join(layers).encode()).hexdigest()[:16]


def same(one: Image | None, other: Image | None) -> bool:
    """An image without layers is equal to none: nothing is known of it."""
    return one is not None and other is not None and bool(one.layers) and one.layers == other.layers


def first_difference(one: Sequence[str], other: Sequence[str]) -> str:
    equal = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        equal += 1
    return f"of {len(one)} and {len(other)} layers the first {equal} are equal"


def platform(asked: str, image: Image | None, machine: str = "") -> str:
    """os/architecture: IMAGE_PLATFORM, else as the image says, else as the machine is."""
    if asked:
        return asked
    if image is not None and image.os and image.architecture:
        return f"{image.os}/{image.architecture}"
    return f"linux/{ARCHITECTURES.get(machine, 'arm64')}"


def fits(image: Image, asked: str, machine: str) -> bool:
    """Whether it runs there: of the platform asked for, else of the machine's architecture."""
    wanted = asked.split("/")[1] if asked.count("/") else ARCHITECTURES.get(machine, "")
    return not wanted or not image.architecture or image.architecture == wanted
