"""Times as they are written: UTC, to the second, sortable."""

from __future__ import annotations

import time


def stamp(at: float) -> str:
    """Seconds since the epoch -> ``2026-11-29T14:31:05Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def folder(at: float) -> str:
    """Seconds since the epoch -> ``20261129T143105Z``, fit for a directory name."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))


def span(seconds: float) -> str:
    """A duration for a reader: ``0.4 s``, ``42 s``, ``3 min 07 s``, ``2 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
