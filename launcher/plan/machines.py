"""Machines that a plan can be made for."""

from __future__ import annotations

from dataclasses import dataclass

OLDEST = 80  # compute capability, times ten, from which the overlay's kernels run
SMALL_RECORD = (100, 103)  # whose KV record is another one


@dataclass(frozen=True)
class Machine:
    """``memory``: GiB of one GPU as its driver counts them; ``arch`` as compilers name it."""

    name: str
    memory: float
    arch: str
    unified: bool = False


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("spark", 121.69, "sm121", unified=True),
        Machine("a100-40", 39.4, "sm80"),
        Machine("a100-80", 79.2, "sm80"),
        Machine("a800-40", 39.4, "sm80"),
        Machine("a800-80", 79.2, "sm80"),
        Machine("ga100-64", 63.3, "sm80"),
        Machine("3090", 23.6, "sm86"),
        Machine("a6000", 47.4, "sm86"),
        Machine("rtx6000", 47.4, "sm89"),
        Machine("rtx6000-pro", 94.9, "sm120"),
        Machine("h200", 139.8, "sm90"),
    )
}


def capability(arch: str) -> int | None:
    """``sm80``, ``sm_80``, ``8.0``, ``sm121a`` -> 80, 80, 80, 121; None for no architecture."""
    text = arch.lower().removeprefix("sm").removeprefix("_").rstrip("af")
    major, point, minor = text.partition(".")
    text = major + minor if point and len(minor) == 1 else text
    return int(text) if text.isascii() and text.isdecimal() and 2 <= len(text) <= 3 else None
